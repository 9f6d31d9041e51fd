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
