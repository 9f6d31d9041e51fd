"""Geometry and block statistics, against means and cosines taken pair by pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from oracle import block_means, make_qkv, similarities
from sparge.backends.reference.prepare import block_statistics
from sparge.values.call import sampled_rows


@pytest.mark.rule("0.1")
def test_blocks_are_128_by_64(backend):
    assert (sparge.BLOCK_Q, sparge.BLOCK_K) == (128, 64)
    for Lq, Lk, n_q, n_k in [(1, 1, 1, 1), (128, 64, 1, 1), (129, 65, 2, 2), (300, 257, 3, 5)]:
        q, k, _ = make_qkv(Hq=1, Lq=Lq, Lk=Lk, D=8)
        plan = sparge.make_plan(q, k, backend=backend)
        assert plan.indices.shape == (1, 1, n_q, n_k)


@pytest.mark.rule("2.1", "2.2", "2.3")
@settings(max_examples=30, deadline=None)
@given(L=st.integers(1, 200), D=st.integers(1, 40), block=st.sampled_from([64, 128]))
def test_pooled_and_similarity(L, D, block):
    x = make_qkv(Hq=2, Lq=L, D=D, seed=L * 64 + D)[1]
    pooled, similarity = block_statistics(x, block)
    assert torch.allclose(pooled.double(), block_means(x, block), atol=1e-6, rtol=1e-5)
    assert torch.allclose(similarity.double(), similarities(x, block), atol=1e-5)
    assert (similarity >= 0).all()
    assert (similarity <= 1 + 1e-6).all()


@pytest.mark.rule("2.3")
def test_similarity_of_equal_opposite_and_orthogonal_rows():
    equal = torch.ones(1, 1, 64, 4)
    opposite = equal.clone()
    opposite[:, :, ::2] *= -3.0
    orthogonal = torch.eye(64)[None, None]
    for x, expected in ((equal, 1.0), (opposite, 0.0), (orthogonal, 1 / 64)):
        assert block_statistics(x, 64)[1].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.rule("2.4")
def test_a_zero_row_is_a_zero_unit_vector():
    x = torch.ones(1, 1, 4, 8)
    x[:, :, 1] = 0
    assert block_statistics(x, 64)[1].item() == pytest.approx((3 / 4) ** 2)
    assert block_statistics(torch.zeros(1, 1, 4, 8), 64)[1].item() == 0


@pytest.mark.rule("2.3")
@pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
def test_similarity_does_not_overflow_or_vanish(size):
    x = torch.ones(1, 1, 64, 8) * size
    pooled, similarity = block_statistics(x, 64)
    assert similarity.item() == pytest.approx(1.0, abs=1e-5)
    assert torch.allclose(pooled, x[:, :, :1])


@pytest.mark.rule("3.14")
@pytest.mark.parametrize(
    ("n", "r", "expected"),
    [
        (128, 4, [31, 63, 95, 127]),
        (100, 4, [24, 49, 74, 99]),
        (3, 4, [0, 1, 2]),
        (1, 4, [0]),
        (128, 1, [127]),
    ],
)
def test_sampled_rows_are_even_and_end_with_the_last(n, r, expected):
    assert sampled_rows(n, r) == expected
