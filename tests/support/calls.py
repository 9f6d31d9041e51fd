"""Small calls, and a backend of another name, for the tests of choosing and recording."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from sparge import KeepFraction, QTensor, Recipe
from sparge.backends.cpu import rates
from sparge.backends.reference import REFERENCE
from sparge.engine.check import check_call
from sparge.routing import Backend, get_backend
from sparge.routing.crossover import Crossover
from sparge.values.backend import FixedCost
from sparge.values.call import Call, Inputs
from sparge.values.stages import prepare

SLOW = FixedCost(False, "slow")
BUILT_IN = Crossover(rates.BUILT_IN)
FIXED = replace(BUILT_IN, measured=True)
"""Costs of the native core that tests are routed by."""
HALF = Recipe(keep=KeepFraction(0.5), precision="half")


EXACT = Recipe(keep=KeepFraction(0.5), precision="exact")


def tensors(B=1, Hq=2, Hk=2, Lq=140, Lk=200, D=16, Dv=16, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = ((B, Hq, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv))
    return [torch.randn(size, generator=g).to(dtype) for size in sizes]


def block_mask(n_q=2, n_k=4):
    mask = torch.ones(n_q, n_k, dtype=torch.bool)
    mask[0, 1] = False
    return mask


def a_call(L=2048, **facts):
    common = {"B": 1, "Hq": 2, "Hk": 2, "Lq": L, "Lk": L, "D": 64, "Dv": 64}
    plain = {"dtype": torch.float32, "device": "cpu", "scale": 0.125, "recipe": Recipe()}
    return Call(**{**common, **plain, **facts})


def fake(name="fake", refusal=lambda h, c: None, slower=None):
    """The reference by another name; `slower` is why dense attention is faster."""
    cost = FixedCost(slower is None, slower or "fast")
    about = "the reference by another name"
    return Backend(name, about, REFERENCE.stages, refusal, cost, lambda h, c: "fake-isa")


def call_of(q, k, v, **facts):
    """The metadata of a call on these tensors."""
    return check_call(q, k, v, enable_gqa=True, **facts)


class Operands(NamedTuple):
    """What the attend stage reads."""

    query: torch.Tensor | QTensor
    key: torch.Tensor | QTensor
    value: torch.Tensor | QTensor
    lse_shift: torch.Tensor | None


def operands_of(q, k, v, precision, backend, scale=None):
    """What the attend stage of a backend reads."""
    call = call_of(q, k, v, recipe=Recipe(precision=precision), scale=scale)
    made = prepare(
        get_backend(backend).stages(), call, Inputs(q, k, v), to_plan=False, to_attend=True
    )
    return Operands(made.queries.rows, made.keys.key, made.keys.value, made.queries.lse_shift)


# What 16-bit P and V, and 8-bit P, may cost against the same operands in fp64: half an ulp of P and
# V each, relative; measured values lie a factor of two and more below. In fp8 0.021 was measured.
KERNEL_TOLERANCE = {"exact": 5e-6, "half": 6e-3, "int8": 6e-3, "int8-fast": 8e-3, "fp8": 0.028}
QUANTIZATION_TOLERANCE = {
    "exact": 5e-6,
    "half": 0.01,
    "int8": 0.02,
    "int8-fast": 0.03,
    "fp8": 0.042,
}


@lru_cache
def fast_is_fp8(backend):
    """Whether int8-fast multiplies P and V in fp8 there: 3 mantissa bits where int8 has 7."""
    x = torch.ones(1, 1, 64, 16)
    return operands_of(x, x, x, "int8-fast", backend).value.codes.dtype != torch.int8


def limit(table, precision, backend):
    """The limit of a precision; int8-fast in fp8 has an entry "fp8" of its own."""
    fp8 = precision == "int8-fast" and fast_is_fp8(backend)
    return table["fp8" if fp8 else precision]


def half_step(x, want):
    """How far rounding may take the numbers `want` from those of `x`, codes or a tensor."""
    if isinstance(x, torch.Tensor):
        return want.abs() * torch.finfo(x.dtype).eps / 2
    scale = x.row_scale().double() if x.per_channel else x.row_scale().double().unsqueeze(-1)
    if x.codes.dtype == torch.int8:
        return 0.51 * scale
    fp8 = torch.finfo(x.codes.dtype)
    return 0.51 * fp8.eps * want.abs().maximum(scale * fp8.smallest_normal)


def scales_each_key(backend):
    """Whether each key has a scale of its own, not only each block of keys."""
    return operands_of(*tensors(), "int8", backend).key.rows_per_scale == 1


def only(runs):
    (run,) = runs
    return run
