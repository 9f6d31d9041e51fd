"""`output_error` against fp64 on all rows, and on the rows it takes."""

from __future__ import annotations

import pytest
import torch

import oracle
import sparge
from oracle import make_qkv
from sparge.api.accuracy import spread_rows


def truth(out, exact, rows=None):
    """Relative L1 of each head, fp64."""
    rows = slice(None) if rows is None else rows
    wrong = (out.double() - exact)[:, :, rows].abs().sum((2, 3))
    return wrong / exact[:, :, rows].abs().sum((2, 3))


def bias(shape, seed=3):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return mask.masked_fill(mask > 1.2, -torch.inf)


def some(shape, seed=3):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3


CALLS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal, more keys": ({"Lq": 70, "Lk": 150}, {"is_causal": True}),
    "causal, last of the keys": (
        {"Lq": 70, "Lk": 150},
        {"is_causal": True, "causal_align": "bottom_right"},
    ),
    "causal, rows of nothing": (
        {"Lq": 150, "Lk": 70},
        {"is_causal": True, "causal_align": "bottom_right"},
    ),
    "bool": ({"Lq": 70, "Lk": 90}, {"attn_mask": some((2, 1, 70, 90))}),
    "bool and causal": ({"Lq": 90}, {"attn_mask": some((1, 4, 90, 90)), "is_causal": True}),
    "padding": ({"Lq": 90}, {"attn_mask": some((2, 1, 1, 90))}),
    "two dimensions": ({"Lq": 70, "Lk": 90}, {"attn_mask": some((70, 90))}),
    "float": ({"Lq": 70, "Lk": 90}, {"attn_mask": bias((1, 4, 70, 90))}),
    "scale": ({}, {"scale": 0.7}),
    "other values": ({"Dv": 24}, {}),
}


@pytest.mark.rule("3.17")
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("name", CALLS)
def test_all_rows_against_fp64(name, heads):
    sizes, facts = CALLS[name]
    q, k, v = make_qkv(**{"B": 2, "Hq": 4, "Hk": heads, "Lq": 110, "D": 16, **sizes})
    exact, _ = oracle.dense(q, k, v, **facts)
    out = exact.float() + 0.1 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    gqa = {"enable_gqa": heads != 4}
    error = sparge.output_error(q, k, v, out, **facts, **gqa, rows=q.shape[2])
    assert error.shape == (2, 4)
    assert error.dtype == torch.float32
    torch.testing.assert_close(error.double(), truth(out, exact), rtol=1e-5, atol=0.0)
    right = sparge.output_error(q, k, v, exact.float(), **facts, **gqa, rows=q.shape[2])
    assert right.max() < 1e-6


def test_the_sampled_rows_and_no_others():
    q, k, v = make_qkv(B=2, Hq=2, Lq=300)
    exact, _ = oracle.dense(q, k, v, is_causal=True)
    rows = spread_rows(300, 7)
    out = exact.float()
    out[:, :, rows] *= 1.25
    error = sparge.output_error(q, k, v, out, is_causal=True, rows=7)
    torch.testing.assert_close(error, torch.full((2, 2), 0.25), rtol=1e-5, atol=0.0)
    others = torch.ones(300, dtype=torch.bool).index_fill(0, rows, False)
    out = torch.where(others[:, None], torch.nan, exact.float())
    assert sparge.output_error(q, k, v, out, is_causal=True, rows=7).max() < 1e-6


@pytest.mark.parametrize("L, n", [(1, 64), (5, 64), (64, 64), (1000, 64), (1000, 1)])
def test_rows_come_one_from_each_part(L, n):
    rows = spread_rows(L, n)
    assert torch.equal(rows, spread_rows(L, n))
    assert len(rows) == min(L, n)
    for i, row in enumerate(rows.tolist()):
        assert i * L // len(rows) <= row < (i + 1) * L // len(rows)


def test_many_keys_are_taken_in_parts(monkeypatch):
    monkeypatch.setattr("sparge.api.accuracy._SCORES", 1000)
    q, k, v = make_qkv(Lq=90, Lk=300)
    exact, _ = oracle.dense(q, k, v)
    out = exact.float() * 1.5
    error = sparge.output_error(q, k, v, out, rows=90)
    torch.testing.assert_close(error, torch.full((1, 2), 0.5), rtol=1e-5, atol=0.0)


def test_rows_that_attend_nothing_must_be_zero():
    q, k, v = make_qkv(Lq=20)
    nothing = torch.zeros(20, 20, dtype=torch.bool)
    out = torch.zeros_like(q)
    assert sparge.output_error(q, k, v, out, attn_mask=nothing).tolist() == [[0.0, 0.0]]
    out[0, 1, 3] = 1.0
    error = sparge.output_error(q, k, v, out, attn_mask=nothing)
    assert error.tolist() == [[0.0, torch.inf]]


def test_a_nan_in_the_output_is_seen():
    q, k, v = make_qkv(Lq=20)
    out, _ = oracle.dense(q, k, v)
    out[0, 1, 3, 4] = torch.nan
    error = sparge.output_error(q, k, v, out.float())
    assert error[0, 0] < 1e-6
    assert error[0, 1].isnan()


def test_16_bits_and_gradients_and_autocast():
    q, k, v = (x.bfloat16().requires_grad_() for x in make_qkv(Lq=100))
    exact, _ = oracle.dense(q, k, v)
    out = exact.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        error = sparge.output_error(q, k, v, out, rows=100)
    assert not error.requires_grad
    torch.testing.assert_close(error.double(), truth(out, exact.detach()), rtol=1e-3, atol=0.0)


def test_it_finds_what_skipping_and_8_bits_cost():
    q, k, v = oracle.clustered_qkv()
    recipe = sparge.Recipe(sparge.KeepFraction(0.3), precision="int8")
    out = sparge.attention(q, k, v, recipe=recipe, backend="cpu")
    exact, _ = oracle.dense(q, k, v)
    error = sparge.output_error(q, k, v, out, rows=q.shape[2])
    torch.testing.assert_close(error.double(), truth(out, exact), rtol=1e-4, atol=0.0)
    assert error.min() > 1e-3


BAD = {
    "out must be": {"out": torch.zeros(1, 2, 19, 32)},
    "out must be .*20, 32": {"out": torch.zeros(1, 20, 2, 32)},
    "rows must be a whole number": {"rows": 0},
    "rows must be a whole number of at least 1, got True": {"rows": True},
    "rows must be a whole number of at least 1, got 2.5": {"rows": 2.5},
    "causal_align must be": {"causal_align": "middle"},
}


@pytest.mark.parametrize("message", BAD)
def test_mistakes(message):
    q, k, v = make_qkv(Lq=20)
    arguments = {"out": q, **BAD[message]}
    with pytest.raises(ValueError, match=message):
        sparge.output_error(q, k, v, **arguments)


def test_out_must_be_a_tensor():
    q, k, v = make_qkv(Lq=20)
    with pytest.raises(TypeError, match="out must be a tensor"):
        sparge.output_error(q, k, v, q.tolist())
    with pytest.raises(TypeError, match="query"):
        sparge.output_error(q.tolist(), k, v, q)
