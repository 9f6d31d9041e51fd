"""`KeepError` with pooled blocks, the default of image and video models: every size of group."""

from __future__ import annotations

import pytest
import torch

import sparge
from oracle import clustered_qkv
from sparge import KeepAll, KeepError, Recipe
from sparge.values.recipe import POOL_GROUPS

BF16 = 2.5e-3
"""Rounding the output itself, which is no error of attention, and is not told."""


def planned(backend, D, precision, *, group, budget):
    """`(inputs, recipe, plan, its run)`."""
    q, k, v = clustered_qkv(Hq=1, Hk=1, L=200, D=D, dtype=torch.bfloat16)
    pools = {"skipped": "pool", "pool_group": group, "sample_rows": 8}
    recipe = Recipe(KeepError(budget), precision=precision, **pools)
    with sparge.record() as runs:
        plan = sparge.make_plan(q, k, value=v, recipe=recipe, backend=backend)
    return (q, k, v), recipe, plan, runs[0]


def relative_l1(out, truth):
    return float((out.double() - truth.double()).abs().sum() / truth.double().abs().sum())


def dense(inputs):
    return torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in inputs))


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("group", POOL_GROUPS)
def test_groups_of_every_size(backend, group, D, precision):
    """The Triton backend raised for groups of fewer than 64 keys."""
    inputs, recipe, plan, run = planned(backend, D, precision, group=group, budget=0.1)
    out, _ = sparge.attend(*inputs, plan, recipe=recipe, backend=backend)
    true = relative_l1(out, dense(inputs))
    assert true < 0.1 * 1.25
    assert run.error_by_head[0] == pytest.approx(true, rel=0.5, abs=BF16)
    # The same plan by the reference: what is left is rounding, of 8 bits by coarser scales on GPUs.
    same, _ = sparge.attend(*inputs, plan, recipe=recipe, backend="reference")
    assert relative_l1(out, same) < (2 * BF16 if precision == "half" else 0.05)


@pytest.mark.parametrize("group", [8, 16])
def test_heads_that_8_bits_cannot_serve_are_raised_and_told_so(backend, group):
    """fp8 on GPUs rounds more than the 8 bits of the reference, so the same budget may raise a head
    there only. What is told is then the error of that head in its own precision."""
    inputs, recipe, plan, run = planned(backend, 64, "int8-fast", group=group, budget=0.012)
    out, _ = sparge.attend(*inputs, plan, recipe=recipe, backend=backend)
    true = relative_l1(out, dense(inputs))
    assert run.error_by_head[0] == pytest.approx(true, rel=0.5, abs=BF16)
    if run.precision_by_head is None:
        assert true > BF16
        return
    assert run.precision_by_head == ("half",)
    own = Recipe(KeepAll(), precision="half", skipped="pool", pool_group=group)
    half, _ = sparge.attend(*inputs, plan, recipe=own, backend=backend)
    assert torch.equal(out, half)
