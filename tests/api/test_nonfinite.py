"""NaN and infinities: where they reach, where they must not, and nothing plausible instead."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from oracle import make_qkv
from sparge import BlockPlan, KeepAll, KeepMass, Recipe

PRECISIONS = ["int8", "int8-fast", "half", "exact"]
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.rule("5.9")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", BAD)
def test_a_query_that_is_not_finite_is_alone(backend, precision, bad):
    q, k, v = make_qkv(Hq=2, Lq=300, D=16)
    for recipe in (
        Recipe(KeepAll(), precision=precision, pv_skip=2.0),
        Recipe(KeepMass(0.9), precision=precision),
    ):
        dirty = q.clone()
        dirty[0, 1, 140, 3] = bad
        options = {"is_causal": True, "backend": backend, "recipe": recipe, "return_lse": True}
        out, lse = sparge.attention(dirty, k, v, **options)
        wrong = torch.zeros(1, 2, 300, dtype=torch.bool)
        wrong[0, 1, 140] = True
        assert torch.equal(out.isnan().all(-1), wrong)
        assert torch.equal(out.isnan().any(-1), wrong)
        assert torch.equal(lse.isnan(), wrong)


@pytest.mark.rule("5.10")
@pytest.mark.parametrize("precision", ["half", "exact"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("pv_skip", [None, 0.1])
def test_rows_that_keep_a_bad_block_are_nan_and_no_others(backend, precision, bad, where, pv_skip):
    q, k, v = make_qkv(Hq=2, Lq=300, D=16)
    (k if where == "key" else v)[0, 0, 70, 5] = bad
    blocks = torch.ones(1, 2, 3, 5, dtype=torch.bool)
    blocks[0, 0, 1, 1] = False
    plan = BlockPlan.from_mask(blocks, Lq=300, Lk=300)
    recipe = Recipe(precision=precision, pv_skip=pv_skip)
    out, lse = sparge.attend(q, k, v, plan, recipe=recipe, backend=backend)
    wrong = torch.zeros(1, 2, 300, dtype=torch.bool)
    wrong[0, 0, :128] = True
    wrong[0, 0, 256:] = True
    assert torch.equal(out.isnan().all(-1), wrong)
    assert torch.equal(out.isnan().any(-1), wrong)
    assert torch.equal(lse.isnan(), wrong)


@pytest.mark.rule("5.11")
@pytest.mark.parametrize("precision", ["int8", "int8-fast"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["key", "value"])
def test_quantized_precisions_spread_it_within_the_head_only(backend, precision, bad, where):
    q, k, v = make_qkv(B=2, Hq=4, Hk=2, Lq=300, D=16)
    clean = sparge.attention(
        q, k, v, enable_gqa=True, recipe=Recipe(KeepAll(), precision=precision), backend=backend
    )
    (k if where == "key" else v)[1, 0, 70, 5] = bad
    for keep in (KeepAll(), KeepMass(0.9)):
        recipe = Recipe(keep, precision=precision)
        out = sparge.attention(q, k, v, enable_gqa=True, recipe=recipe, backend=backend)
        if isinstance(keep, KeepAll):
            assert out[1, :2].isnan().all()
            assert torch.equal(out[0], clean[0])
            assert torch.equal(out[1, 2:], clean[1, 2:])
        else:
            # A row may only be a number if it does not keep the block.
            plan = sparge.make_plan(q, k, enable_gqa=True, recipe=recipe, backend=backend)
            keeps = plan.to_mask()[1, :2, :, 1].repeat_interleave(128, -1)[:, :300]
            assert out[1, :2].isnan().all(-1)[keeps].all()


@pytest.mark.rule("5.9", "5.11")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", BAD)
def test_everything_bad_is_all_nan(backend, precision, bad):
    q, k, v = make_qkv(Hq=1, Lq=150, D=8)
    recipe = Recipe(KeepMass(0.5), precision=precision, pv_skip=1.0)
    for dirty in ((q * bad, k, v), (q, k * bad, v), (q, k, v * bad)):
        assert sparge.attention(*dirty, recipe=recipe, backend=backend).isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_bias_is_not_hidden(backend, bad):
    q, k, v = make_qkv(Hq=1, Lq=150, D=8)
    bias = torch.zeros(150, 150)
    bias[100, 70] = bad
    recipe = Recipe(KeepAll(), precision="exact")
    out = sparge.attention(q, k, v, attn_mask=bias, recipe=recipe, backend=backend)
    assert out[0, 0].isnan().any(-1).nonzero().flatten().tolist() == [100]


def test_scores_that_all_overflow_are_not_an_empty_row(backend):
    """Every score is -inf by overflow: zeros would say that the row attends nothing."""
    q = torch.full((1, 1, 3, 4), 1e30)
    k = torch.full((1, 1, 70, 4), -1e30)
    v = torch.ones(1, 1, 70, 4)
    for precision in ("half", "exact"):
        recipe = Recipe(KeepAll(), precision=precision)
        assert sparge.attention(q, k, v, recipe=recipe, backend=backend).isnan().all()
