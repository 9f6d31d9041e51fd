"""Arguments of `torch.ops.sparge_cpu.run` and `backward` as the library passes them, and others in
their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

import sparge
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe
from sparge.backends.cpu import library as native
from sparge.backends.cpu import stages
from sparge.engine.check import check_call
from sparge.values.call import Inputs
from sparge.values.stages import prepare
from sparge.values.tokenmask import TokenMask

B, HQ, HK, LQ, LK, D, DV = 2, 4, 2, 300, 200, 24, 40
N_Q, N_K = 3, 4
I8, I32, I64, F64 = torch.int8, torch.int32, torch.int64, torch.float64
POOL = {"skipped": "pool", "pool_group": 16}
DROP = {"skipped": "drop"}

INT8 = Recipe(
    KeepMass(0.7),
    predictor="mean",
    min_similarity=0.1,
    pv_skip=4.0,
    protect=((0, 3), (-5, None)),
    **POOL,
)
RECIPES = {
    "int8": INT8,
    "int8-fast": Recipe(KeepFraction(0.5), predictor="blend", precision="int8-fast", **POOL),
    "half": Recipe(KeepAll(), precision="half"),
    "exact": Recipe(KeepMass(0.5), predictor="rows", precision="exact", **DROP),
    "budget": Recipe(KeepError(0.05), **POOL),
    "budget fast": Recipe(KeepError(0.002), precision="int8-fast", **DROP),
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def inputs(*, masked: bool) -> Inputs:
    mask = numbers(B, 1, LQ, LK) > -1 if masked else None
    return Inputs(numbers(B, HQ, LQ, D), numbers(B, HK, LK, D), numbers(B, HK, LK, DV), mask)


def call_of(recipe: Recipe, given: Inputs) -> Any:
    causal = {} if given.attn_mask is not None else {"is_causal": True}
    options = {"attn_mask": given.attn_mask, "enable_gqa": True, "recipe": recipe} | causal
    return check_call(*given[:3], **options)


def passed(run: Callable[[], object], number: int = -1) -> dict[str, Any]:
    """The arguments of the last native call of a function, or of another one."""
    found: list[dict[str, Any]] = []
    ops, run_op, backward_op = native.ops(), native.run, native.ops().backward
    names = [argument.name for argument in backward_op.default._schema.arguments]

    class Watched:
        def backward(self, *given: Any) -> None:
            found.append({"op": "backward"} | dict(zip(names, given, strict=True)))
            backward_op(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

    def watched(fields: dict[str, Any]) -> bool:
        found.append({"op": "run", "isa": native.isa_number()} | fields)
        return run_op(fields)

    with mock.patch.object(native, "ops", Watched), mock.patch.object(native, "run", watched):
        run()
    return {name: x for name, x in found[number].items() if x is not None}


def whole(name: str, *, masked: bool = False, **options: Any) -> dict[str, Any]:
    given = inputs(masked=masked)
    call = call_of(RECIPES[name], given)
    options = {"timed": True, "limit": stages.KeptLimit(1e9, 0.1, 2.0)} | options
    return passed(lambda: stages.run_call(call, given, **options))


def staged(name: str, number: int, *, masked: bool = False) -> dict[str, Any]:
    """Of prepare_keys, prepare_queries, predict, select, attend."""
    given = inputs(masked=masked)
    call = call_of(RECIPES[name], given)
    tokens = TokenMask(LQ, LK, call.is_causal, call.offset, given.attn_mask)

    def run() -> None:
        prepared = prepare(stages, call, given, to_plan=True, to_attend=True)
        mass = stages.predict(call, prepared, tokens)
        plan = stages.select(call, prepared, mass, tokens)
        stages.attend(call, prepared, plan, tokens)

    return passed(run, number)


def planned(name: str) -> dict[str, Any]:
    given = inputs(masked=False)
    call = call_of(RECIPES[name], given)
    plan = stages.run_call(call, given, attends=False).plan()
    return passed(lambda: stages.run_call(call, given, plan=plan))


def kinds() -> dict[str, Any]:
    tokens = TokenMask(LQ, LK, False, 0, inputs(masked=True).attn_mask)
    return passed(lambda: stages.block_kinds(tokens))


def pack(name: str) -> dict[str, Any]:
    lengths = torch.tensor([0, 130, LK])
    q, k, v = numbers(LK, HQ, D), numbers(LK, HK, D), numbers(LK, HK, DV)
    options = {"recipe": RECIPES[name], "enable_gqa": True, "backend": "cpu", "is_causal": True}
    found = passed(lambda: sparge.attention_varlen(q, k, v, lengths, lengths, **options))
    return found | {"limits": torch.tensor([0.0, 30.0], dtype=F64)}


def backward() -> dict[str, Any]:
    given = inputs(masked=True)
    leaves = [x.requires_grad_() for x in given[:3]]
    recipe = Recipe(KeepMass(0.7), precision="exact", pv_skip=4.0, **DROP)
    options = {"attn_mask": given.attn_mask, "enable_gqa": True, "recipe": recipe}
    out = sparge.attention(*leaves, **options, backend="cpu")
    return passed(lambda: out.sum().backward())


_CASES = {
    "whole": lambda: whole("int8", masked=True),
    "whole fast": lambda: whole("int8-fast"),
    "whole half": lambda: whole("half"),
    "whole budget": lambda: whole("budget", masked=True),
    "plan": lambda: whole("int8", attends=False, limit=None),
    "planned": lambda: planned("int8"),
    "planned, raised": lambda: planned("budget fast"),
    "keys": lambda: staged("int8-fast", 0),
    "queries": lambda: staged("int8", 1),
    "predict": lambda: staged("int8", 2, masked=True),
    "predict rows": lambda: staged("exact", -3),
    "select": lambda: staged("int8", 3),
    "select budget": lambda: staged("budget", 3),
    "attend": lambda: staged("int8", 4, masked=True),
    "attend fast": lambda: staged("int8-fast", 4),
    "attend exact": lambda: staged("exact", -1),
    "kinds": kinds,
    "pack": lambda: pack("int8"),
    "pack budget": lambda: pack("budget"),
    "backward": backward,
}
_MADE: dict[str, dict[str, Any]] = {}


def valid(case: str) -> dict[str, Any]:
    """Arguments that are accepted, each time in memory of their own."""
    if case not in _MADE:
        _MADE[case] = _CASES[case]()
    return {name: copied(x) for name, x in _MADE[case].items()}


def copied(x: Any) -> Any:
    if isinstance(x, list):
        return [copied(y) for y in x]
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def call(arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    return getattr(torch.ops.sparge_cpu, arguments.pop("op"))(**arguments)


CASES = tuple(_CASES)
INTEGERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, 2**36, 2**40, 2**63 - 1, -(2**31), -(2**63)])
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.half, F64, I8, I32, I64, torch.bool])


@st.composite
def mutated(draw, value):
    """Another tensor or number in the place of `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(INTEGERS)
    if isinstance(value, float):
        return draw(st.floats())
    if isinstance(value, list):
        at = draw(st.integers(0, len(value) - 1))
        if draw(st.booleans()):
            return value[:at]
        return [*value[:at], draw(mutated(value[at])), *value[at + 1 :]]
    shape = list(value.shape)
    how = draw(st.sampled_from(["none", "size", "rank", "dtype", "strides", "numbers"]))
    if how == "none":
        return None
    if how == "size":
        d = draw(st.integers(0, len(shape) - 1))
        shape[d] = draw(st.sampled_from([0, 1, 2, 3, 63, 65, 320, shape[d] + 1]))
    elif how == "rank":
        shape = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(DTYPES) if how == "dtype" else value.dtype
    x = torch.zeros(shape, dtype=dtype)
    if how == "strides" and shape:
        return torch.zeros((), dtype=dtype).expand(shape)
    if how == "numbers":
        x = value.clone(memory_format=torch.contiguous_format)
        wild = [0, 1, 2, -1, 127, 2**30, -(2**31), float("nan"), float("inf"), -1e30]
        fits = [n for n in wild if dtype.is_floating_point or isinstance(n, int)]
        fits = [n for n in fits if dtype not in (I8, torch.bool) or -128 <= n < 128]
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from(fits))
    return x
