"""Partial results over disjoint keys, put together, are the result over all of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from sparge import KeepAll, Recipe, merge

B, H, L, Lk, D, Dv = 2, 2, 7, 30, 8, 5


def problem(dtype=torch.float64, seed=0, gain=1.0):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, H, L, Lk, generator=g, dtype=torch.float64) * gain
    value = torch.randn(B, H, Lk, Dv, generator=g, dtype=torch.float64)
    return scores.to(dtype).double(), value.to(dtype).double()


def dense(scores, value):
    """Softmax attention in fp64; rows of -inf, and no keys at all, give zeros and -inf."""
    if scores.shape[-1] == 0:
        shape = scores.shape[:-1]
        return torch.zeros(*shape, value.shape[-1]).double(), torch.full(shape, -math.inf).double()
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return weights @ value, lse


def part(scores, value, keys, dtype=torch.float64):
    out, lse = dense(scores[..., keys], value[..., keys, :])
    return out.to(dtype), lse.to(torch.promote_types(torch.float32, dtype))


def close(got, want, tolerance=1e-12):
    torch.testing.assert_close(
        got, want, rtol=tolerance, atol=tolerance, equal_nan=False, check_dtype=False
    )


@settings(deadline=None, max_examples=60)
@given(
    cut=st.integers(0, Lk),
    seed=st.integers(0, 1000),
    gain=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_two_parts_are_the_whole(cut, seed, gain):
    scores, value = problem(seed=seed, gain=gain)
    a, b = part(scores, value, slice(0, cut)), part(scores, value, slice(cut, Lk))
    out, lse = merge(*a, *b)
    want, want_lse = dense(scores, value)
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_dtype_is_kept(dtype):
    scores, value = problem(dtype)
    a, b = part(scores, value, slice(0, 11), dtype), part(scores, value, slice(11, Lk), dtype)
    out, lse = merge(*a, *b)
    want, want_lse = dense(scores, value)
    assert out.dtype == dtype
    assert lse.dtype == a[1].dtype
    # Each part was rounded to its dtype once, and the result once more.
    close(out.double(), want, 2 * torch.finfo(dtype).eps * float(value.abs().max()))
    close(lse.double(), want_lse, 8 * torch.finfo(lse.dtype).eps)


def test_three_parts_in_any_order():
    scores, value = problem()
    parts = [part(scores, value, slice(*cut)) for cut in ((0, 4), (4, 19), (19, Lk))]
    want, want_lse = dense(scores, value)
    for a, b, c in itertools.permutations(parts):
        for out, lse in (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))):
            close(out, want)
            close(lse, want_lse)


def test_the_parts_may_be_exchanged():
    scores, value = problem(torch.float32)
    a = part(scores, value, slice(0, 11), torch.float32)
    b = part(scores, value, slice(11, Lk), torch.float32)
    for one, other in zip(merge(*a, *b), merge(*b, *a), strict=True):
        assert torch.equal(one, other)


@settings(deadline=None, max_examples=40)
@given(keys=st.lists(st.integers(0, 3), min_size=Lk, max_size=Lk), seed=st.integers(0, 100))
def test_any_split_into_four_parts(keys, seed):
    scores, value = problem(seed=seed)
    owner = torch.tensor(keys)
    parts = [part(scores, value, owner == i) for i in range(4)]
    out, lse = parts[0]
    for other in parts[1:]:
        out, lse = merge(out, lse, *other)
    want, want_lse = dense(scores, value)
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_part_that_attended_nothing_changes_nothing(dtype):
    scores, value = problem(dtype)
    out, lse = part(scores, value, slice(0, Lk), dtype)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for got, got_lse in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(got, out)
        assert torch.equal(got_lse, lse)


def test_two_parts_that_attended_nothing():
    out, lse = torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf)
    got, got_lse = merge(out, lse, out, lse)
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)


def test_rows_are_each_their_own():
    out_a, out_b = torch.full((3, 2), 1.0), torch.full((3, 2), 5.0)
    inf = math.inf
    lse_a, lse_b = torch.tensor([0.0, -inf, 2.0]), torch.tensor([0.0, 1.0, -inf])
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    close(out, torch.tensor([[3.0, 3.0], [5.0, 5.0], [1.0, 1.0]]))
    close(lse, torch.tensor([math.log(2), 1.0, 2.0]), 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("level", [1e4, -1e4, 3e38, -3e38])
def test_large_lse(level, dtype):
    """The weights are shares: they add up to one also where the lse has no digits to spare."""
    ones, lse = torch.ones(1, 4, dtype=dtype), torch.tensor([level], dtype=dtype)
    for factor in (1, 3):
        out, got_lse = merge(ones, lse, factor * ones, lse)
        close(out, (1 + factor) / 2 * ones, 1e-6)
        close(got_lse, lse + math.log(2), 1e-7)


@pytest.mark.parametrize("far", [1e4, 1e30])
def test_the_larger_lse_wins_when_they_are_far_apart(far):
    a, b = torch.full((1, 2), 7.0), torch.full((1, 2), -3.0)
    high, low = torch.tensor([far]), torch.tensor([-far])
    assert torch.equal(merge(a, high, b, low)[0], a)
    assert torch.equal(merge(a, low, b, high)[0], b)
    assert torch.equal(merge(a, low, b, high)[1], high)


def test_shifting_every_lse_shifts_the_lse_alone():
    scores, value = problem()
    a, b = part(scores, value, slice(0, 9)), part(scores, value, slice(9, Lk))
    out, lse = merge(*a, *b)
    for shift in (-1e4, 1e4):
        moved, moved_lse = merge(a[0], a[1] + shift, b[0], b[1] + shift)
        close(moved, out, 1e-10)
        close(moved_lse - shift, lse, 1e-10)


def test_a_nan_stays_in_its_row():
    out, lse = torch.ones(3, 2), torch.zeros(3)
    broken, broken_lse = out.clone(), lse.clone()
    broken[1], broken_lse[1] = math.nan, math.nan
    got, got_lse = merge(broken, broken_lse, out, lse)
    assert torch.isnan(got).all(-1).tolist() == [False, True, False]
    assert torch.isnan(got_lse).tolist() == [False, True, False]


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_keys_in_two_halves_by_attention(precision):
    g = torch.Generator().manual_seed(5)
    query, key = torch.randn(1, 2, 40, 16, generator=g), torch.randn(1, 2, 150, 16, generator=g)
    value = torch.randn(1, 2, 150, 8, generator=g)
    recipe = Recipe(keep=KeepAll(), precision=precision)
    options = {"recipe": recipe, "backend": "reference", "return_lse": True}

    def over(keys):
        return sparge.attention(query, key[:, :, keys], value[:, :, keys], **options)

    out, lse = merge(*over(slice(0, 70)), *over(slice(70, 150)))
    scores = query.double() @ key.double().mT / 4
    want, want_lse = dense(scores, value.double())
    tolerance = {"exact": 1e-5, "int8": 0.03}[precision]
    close(out.double(), want, tolerance)
    close(lse.double(), want_lse, tolerance)


def test_gradients_flow_through_both_parts():
    scores, value = problem()
    scores.requires_grad_()
    value.requires_grad_()
    a, b = part(scores, value, slice(0, 11)), part(scores, value, slice(11, Lk))
    weight = torch.randn(B, H, L, Dv, generator=torch.Generator().manual_seed(1)).double()
    got = torch.autograd.grad((merge(*a, *b)[0] * weight).sum(), (scores, value))
    want = torch.autograd.grad((dense(scores, value)[0] * weight).sum(), (scores, value))
    for one, other in zip(got, want, strict=True):
        close(one, other)


def test_gradients_are_finite_where_parts_attended_nothing():
    inf = math.inf
    lse_a = torch.tensor([0.0, 0.0, -inf, -inf], requires_grad=True)
    lse_b = torch.tensor([0.0, -inf, 0.0, -inf], requires_grad=True)
    out_a, out_b = torch.ones(4, 2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
    out, _ = merge(out_a, lse_a, out_b, lse_b)
    grads = torch.autograd.grad(out.sum(), (out_a, lse_a, out_b, lse_b))
    # d out / d lse_a = w_a · w_b · (out_a - out_b), summed over two channels
    shares = torch.tensor([0.5, 1.0, 0.0, 0.0]), torch.tensor([0.5, 0.0, 1.0, 0.0])
    slope = torch.tensor([0.5, 0.0, 0.0, 0.0])
    wants = (shares[0][:, None].expand(4, 2), slope, shares[1][:, None].expand(4, 2), -slope)
    for got, want in zip(grads, wants, strict=True):
        close(got, want, 1e-6)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 2, 4)])
def test_any_leading_dimensions(shape):
    out, lse = torch.ones(shape), torch.zeros(shape[:-1])
    got, got_lse = merge(out, lse, 3 * out, lse)
    assert got.shape == shape
    assert got_lse.shape == shape[:-1]
    close(got, 2 * out, 1e-6)


@pytest.mark.parametrize(
    "shapes, says",
    [
        (((3, 4), (4,), (3, 4), (3,)), r"lse_a.*\[4\].*\[3, 4\]"),
        (((3, 4), (3,), (3, 4), (3, 1)), r"lse_b.*\[3, 1\].*\[3, 4\]"),
        (((3, 4), (3,), (2, 4), (2,)), r"one shape.*\[3, 4\].*\[2, 4\]"),
        (((3, 4), (3,), (1, 3, 4), (1, 3)), r"one shape.*\[3, 4\].*\[1, 3, 4\]"),
    ],
)
def test_shapes_that_do_not_fit(shapes, says):
    with pytest.raises(ValueError, match=says):
        merge(*(torch.zeros(shape) for shape in shapes))


def test_a_part_that_attended_nothing_changes_nothing_whatever_it_holds():
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    junk, nothing = torch.full((2, 3, 4), math.nan), torch.full((2, 3), -math.inf)
    for parts in ((out, lse, junk, nothing), (junk, nothing, out, lse)):
        merged, merged_lse = sparge.merge(*parts)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    assert (sparge.merge(junk, nothing, junk, nothing)[0] == 0).all()
