"""`torch.ops.sparge.*` check their arguments as the Python functions do: nothing that is passed to
them may crash the process or return numbers for a call that makes no sense."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import tensors
from sparge import KeepFraction, Recipe

ops = torch.ops.sparge
EXACT = Recipe(KeepFraction(0.5), precision="exact").to_json()
FACTS = {"is_causal": True, "offset": 0, "scale": 0.25, "recipe": EXACT}
BACKENDS = ("cpu", "reference")


def a_plan(backend="cpu"):
    q, k, _ = tensors()
    counts, indices, allowed, _ = ops.plan(q, k, None, None, *FACTS.values(), backend)
    return {"counts": counts, "indices": indices, "allowed": allowed}


def arguments(op, backend="cpu"):
    """Valid arguments of an op, by name."""
    q, k, v = tensors()
    three = {"query": q, "key": k, "value": v}
    if op == "plan":
        masks = {"attn_mask": None, "block_mask": None}
        return {"query": q, "key": k, **masks, **FACTS, "backend": backend, "value": v}
    if op == "attend":
        return {**three, "attn_mask": None, **a_plan(backend), **FACTS, "backend": backend}
    if op == "attend_backward":
        out, lse, _ = ops.attend(**arguments("attend", backend))
        grads = {"grad_out": torch.ones_like(out), "grad_lse": torch.zeros_like(lse)}
        saved = {**three, "out": out, "attn_mask": None, **a_plan(backend)}
        return {**grads, **saved, **FACTS, "backend": backend}
    masks = {"attn_mask": None, "block_mask": None}
    flags = {"return_lse": True, "needs_grad": False, "backend": backend}
    return {**three, **masks, **FACTS, **flags}


OPS = ("plan", "attend", "attend_backward", "attention")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_the_valid_arguments_are_valid(op, backend):
    assert all(torch.is_tensor(x) for x in getattr(ops, op)(**arguments(op, backend)))


# What each did before it was checked is in its name.
BROKEN = {
    "indices out of range (SIGSEGV)": {"indices": lambda x: x.fill_(2**30)},
    "indices negative (SIGSEGV)": {"indices": lambda x: x.fill_(-(2**30))},
    "counts too large (SIGABRT)": {"counts": lambda x: x.fill_(10**6)},
    "counts negative": {"counts": lambda x: x.fill_(-1)},
    "counts int64": {"counts": lambda x: x.long()},
    "counts of fewer blocks": {"counts": lambda x: x[..., :1]},
    "indices cut": {"indices": lambda x: x[..., :1]},
    "three key heads for two query heads (SIGFPE)": {
        "key": lambda x: torch.randn(1, 3, 200, 16),
        "value": lambda x: torch.randn(1, 3, 200, 16),
    },
    "a shorter value (numbers)": {"value": lambda x: x[:, :, :100]},
    "another head dim of the key (numbers)": {"key": lambda x: x[..., :8]},
    "another dtype of the key (numbers)": {"key": lambda x: x.double()},
    "a mask of a wrong shape (numbers)": {"attn_mask": lambda x: torch.ones(1, 1, 3, 5).bool()},
    "a mask of a wrong dtype": {"attn_mask": lambda x: torch.ones(1, 1, 1, 1, dtype=torch.int64)},
    "a batch of another size": {"key": lambda x: x.expand(2, -1, -1, -1)},
    "no tokens": {"query": lambda x: x[:, :, :0]},
    "a head dim of zero": {"query": lambda x: x[..., :0], "key": lambda x: x[..., :0]},
    "a 3-D query": {"query": lambda x: x[0]},
    "an absurd offset": {"offset": lambda x: 2**62},
    "a scale that is not finite": {"scale": lambda x: float("nan")},
    "a recipe that is no JSON": {"recipe": lambda x: "{"},
    "a recipe of an unknown field": {"recipe": lambda x: '{"kept": 1}'},
    "an unknown backend": {"backend": lambda x: "cuda"},
    "a block mask of a wrong shape": {"block_mask": lambda x: torch.ones(7, 7).bool()},
    "a gradient of another shape": {"grad_out": lambda x: x[..., :3]},
    "an LSE gradient of another shape": {"grad_lse": lambda x: x[..., :3]},
    "an output of another shape": {"out": lambda x: x[:, :, :10]},
    "no gradient for 8 bits": {"recipe": lambda x: Recipe().to_json()},
}
NAMES = {op: {a.name for a in getattr(ops, op).default._schema.arguments} for op in OPS}
CASES = [
    (op, case)
    for op in OPS
    for case, changes in BROKEN.items()
    if set(changes) <= NAMES[op] and ("8 bits" not in case or op == "attend_backward")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op, case", CASES)
def test_broken_arguments_raise(op, case, backend):
    given = arguments(op, backend)
    for name, change in BROKEN[case].items():
        given[name] = change(given[name])
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        getattr(ops, op)(**given)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens_q": torch.tensor([0, 60, 500])},
        {"cu_seqlens_q": torch.tensor([60, 0, 140])},
        {"cu_seqlens_k": torch.tensor([0, 200])},
        {"cu_seqlens_q": torch.tensor([0.0, 140.0])},
        {"causal_align": "center"},
        {"value": torch.randn(150, 2, 16)},
        {"key": torch.randn(200, 3, 16), "value": torch.randn(200, 3, 16)},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_broken_packs_raise(changes):
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors())
    cuts = {"cu_seqlens_q": torch.tensor([0, 60, 140]), "cu_seqlens_k": torch.tensor([0, 90, 200])}
    facts = {"is_causal": True, "causal_align": "top_left", "scale": 0.25, "recipe": EXACT}
    given = {"query": q, "key": k, "value": v, **cuts, **facts}
    assert ops.attention_varlen(**given, return_lse=False, backend="cpu")[0].shape == q.shape
    with pytest.raises((ValueError, TypeError)):
        ops.attention_varlen(**{**given, **changes}, return_lse=False, backend="cpu")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_plan_attends_or_raises(data):
    """Whatever three integer tensors hold."""
    given = arguments("attend")
    numbers = st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 1000, 2**31 - 1])
    for name in ("counts", "indices", "allowed"):
        flat = given[name].flatten()
        for at in data.draw(st.lists(st.integers(0, flat.numel() - 1), max_size=4)):
            flat[at] = data.draw(numbers)
    try:
        out, _, _ = ops.attend(**given)
    except ValueError:
        return
    assert out.isfinite().all()
