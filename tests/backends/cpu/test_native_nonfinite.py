"""Rows that are not finite and have nothing to attend: found by `make fuzz`."""

from __future__ import annotations

import pytest
import torch

import sparge
from oracle import make_qkv
from sparge import KeepAll, Recipe


@pytest.mark.rule("5.9")
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_a_broken_query_that_attends_nothing_is_nan(backend, precision):
    q, k, v = make_qkv(Hq=1, Lq=2, Lk=1, D=2)
    q[0, 0, 0, 0] = torch.nan  # bottom right: the first row stands before every key
    options = {"is_causal": True, "causal_align": "bottom_right", "backend": backend}
    recipe = Recipe(KeepAll(), precision=precision)
    out, lse = sparge.attention(q, k, v, recipe=recipe, return_lse=True, **options)
    assert out[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert torch.isfinite(out[0, 0, 1]).all()


@pytest.mark.rule("4.5")
@pytest.mark.parametrize("key", [70, 127, 140], ids=lambda key: f"key {key}")
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_a_broken_bias_is_not_skipped_by_the_second_filter(backend, precision, key):
    """The block that holds it lies far below the row's maximum, as do the ones behind it."""
    q, k, v = make_qkv(Hq=1, Lq=20, Lk=200, D=16)
    bias = torch.zeros(20, 200)
    bias[:, 64:] = -50.0
    bias[3, key] = torch.nan
    recipe = Recipe(KeepAll(), precision=precision, pv_skip=5.0)
    with sparge.record() as runs:
        out, lse = sparge.attention(
            q, k, v, attn_mask=bias, recipe=recipe, return_lse=True, backend=backend
        )
    broken = torch.arange(20) == 3
    assert torch.equal(out.isnan().all(-1)[0, 0], broken)
    assert torch.equal(out.isnan().any(-1)[0, 0], broken)
    assert torch.equal(lse.isnan()[0, 0], broken)
    # Two row groups, four blocks: that row keeps its group's block and all that follow.
    skipped = {70: 3, 127: 3, 140: 4}[key]
    assert runs[0].pv_skipped == pytest.approx(skipped / 8)
