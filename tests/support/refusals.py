"""What the tests of bad input share: a right call to make mistakes in, and a watch on all work."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge import BlockPlan, Recipe

B, Hq, Hk, Lq, Lk, D, Dv = 2, 4, 2, 130, 100, 16, 24


n_q, n_k = 2, 2


EXACT = Recipe(precision="exact")


def q(*shape, **options):
    return torch.zeros(shape or (B, Hq, Lq, D), **options)


def k(*shape, **options):
    return torch.zeros(shape or (B, Hk, Lk, D), **options)


def v(*shape, **options):
    return torch.zeros(shape or (B, Hk, Lk, Dv), **options)


def blocks(*shape):
    return torch.ones(shape or (B, Hq, n_q, n_k), dtype=torch.bool)


PLAN = BlockPlan.from_mask(blocks(), Lq=Lq, Lk=Lk)


CAUSAL_PLAN = BlockPlan.from_mask(blocks(), Lq=Lq, Lk=Lk, is_causal=True)


OPEN = torch.ones(1, 1, Lq, Lk, dtype=torch.bool)


MASKED_PLAN = BlockPlan.from_mask(blocks(), Lq=Lq, Lk=Lk, attn_mask=OPEN)


def refused(call, error, *says):
    with sparge.record() as runs, pytest.raises(error) as caught:
        call()
    assert caught.type is error
    for words in says:
        assert words in str(caught.value)
    assert runs == []


def attention(query, key, value, **options):
    return sparge.attention(query, key, value, **options)


def reference(query, key, value, **options):
    return sparge.attention(query, key, value, **{"backend": "reference", **options})


def explain(query, key, value, **options):
    return sparge.explain(query, key, value, **options)


def make_plan(query, key, value, **options):
    return sparge.make_plan(query, key, **options)


def attend(query, key, value, **options):
    return sparge.attend(query, key, value, **{"plan": PLAN, **options})


def each(*functions):
    return pytest.mark.parametrize("function", functions, ids=lambda f: f.__name__)


WITH_VALUE = (attention, reference, explain, attend)


EVERY = (*WITH_VALUE, make_plan)


SAYS_CAUSAL = (attention, reference, explain, make_plan)
