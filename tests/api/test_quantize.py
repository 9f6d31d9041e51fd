"""Codes and scales, smoothing, and the granularities that the reference can do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from calls import call_of, operands_of
from oracle import dense, make_qkv, relative_l1
from sparge import KeepAll, QTensor, Recipe
from sparge.backends.reference import prepare as slow
from sparge.backends.reference import stages
from sparge.backends.reference.rotation import rotate
from sparge.values.blockplan import plan_from_mask
from sparge.values.stages import Prepared, PreparedKeys, PreparedQueries, working
from sparge.values.tokenmask import TokenMask


@pytest.mark.rule("1.1")
def test_the_mean_is_per_batch_and_key_head(backend):
    q, k, v = make_qkv(B=2, Hq=4, Hk=2, Lq=150, D=16)
    k += torch.arange(4.0).reshape(2, 2, 1, 1)
    done = operands_of(q, k, v, "int8", backend, scale=0.25)
    expected = rotate((k.double() - k.double().mean(2, keepdim=True)).float())
    step = done.key.row_scale().unsqueeze(-1)
    assert ((done.key.dequantize() - expected).abs() <= 0.5 * step + 1e-6).all()
    assert done.key.dequantize().mean(2).abs().max() < 0.05


@pytest.mark.rule("1.1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_is_fp32_for_16_bit_keys(dtype):
    k = torch.full((1, 1, 5000, 4), 300.0, dtype=dtype)
    mean = slow.mean_key(k)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, torch.full((1, 1, 4), 300.0))


@pytest.mark.rule("1.2")
def test_smoothing_changes_nothing_but_the_error(backend):
    """Keys with a common offset 20 times their spread: int8 must not feel it."""
    q, k, v = make_qkv(Lq=200, D=64)
    k += 20.0
    recipe = Recipe(KeepAll(), precision="int8")
    truth, _ = dense(q, k, v)
    error = relative_l1(sparge.attention(q, k, v, recipe=recipe, backend=backend), truth)
    rough = slow.quantize_rows(k)
    unsmoothed, _ = dense(slow.quantize_rows(q).dequantize(), rough.dequantize(), v)
    assert error < 0.02
    assert relative_l1(unsmoothed, truth) > 3 * error


@pytest.mark.rule("1.4")
def test_lse_shift_is_what_smoothing_took(backend):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=100, D=16)
    done = operands_of(q, k, v, "int8", backend, scale=0.3)
    mean = k.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    expected = (q.double() * mean).sum(-1) * 0.3
    assert torch.allclose(done.lse_shift.double(), expected, atol=1e-5)


@pytest.mark.rule("1.5")
@pytest.mark.parametrize("precision", ["half", "exact"])
def test_unquantized_precisions_read_the_tensors_as_they_are(backend, precision):
    q, k, v = make_qkv(Lq=100, D=16)
    done = operands_of(q, k, v, precision, backend, scale=0.3)
    # As they are, or already in the type that they are multiplied in.
    for held, x in zip((done.query, done.key, done.value), (q, k, v), strict=True):
        assert held is x or torch.equal(held.float(), working(x, precision))
    assert done.lse_shift is None


@pytest.mark.rule("5.5")
def test_round_to_nearest_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5]).reshape(1, 1, 1, 8)
    found = slow.code_rows(x)
    assert found.scale.item() == 1.0
    assert found.codes.flatten().tolist() == [127, 0, 2, 2, 0, -2, -127, 126]


@pytest.mark.rule("5.5")
@settings(max_examples=60, deadline=None)
@given(
    size=st.floats(1e-30, 1e30), L=st.integers(1, 40), rows=st.sampled_from([1, 16, 32, 64, 128])
)
def test_codes_are_within_half_a_step(size, L, rows):
    x = make_qkv(Hq=1, Lq=L, D=8, seed=L)[0] * size
    found = slow.code_rows(x, rows)
    for start in range(0, L, rows):
        group = x[0, 0, start : start + rows]
        scale = found.scale[0, 0, start // rows]
        assert scale == group.abs().max() / 127
        codes = found.codes[0, 0, start : start + rows]
        assert ((codes * scale - group).abs() <= scale * 0.5001).all()


def as_codes(x, dtype):
    """Codes of numbers that were divided by their scale, in fp32: the nearest ones."""
    if dtype == torch.int8:
        return x.round().clamp(-127, 127)
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).float()


@pytest.mark.rule("5.5")
@pytest.mark.parametrize("size", [1.0, 3.0, 1e-3, 1e30, 1e-37, 1e-43], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_those_of_a_division(backend, dtype, size):
    """Also at ties and beside them, and where one over the scale is infinite."""
    g = torch.Generator().manual_seed(2)
    halves = torch.arange(-126.5, 127.0) / 127 * size
    x = torch.stack([halves[torch.randperm(254, generator=g)][:40] for _ in range(300)])
    x[1::3] = torch.nextafter(x[1::3], torch.tensor(math.inf))
    x[2::3] = torch.nextafter(x[2::3], torch.tensor(-math.inf))
    x[:, 17] = size * torch.rand(300, generator=g).clamp(min=0.3)  # the largest of some rows
    x = x.to(dtype).view(1, 1, 300, 40)
    done = operands_of(x, x, x, "int8-fast", backend, scale=1.0)
    for numbers, coded in ((rotate(x.float()), done.query), (x.float(), done.value)):
        scale = coded.row_scale() if coded.per_channel else coded.row_scale()[..., None]
        expected = as_codes(numbers / scale, coded.codes.dtype)
        assert torch.equal(coded.codes.float(), torch.where(scale > 0, expected, 0.0))


@pytest.mark.rule("5.5")
def test_an_all_zero_group_has_scale_zero(backend):
    q, k, v = make_qkv(Lq=70, D=8)
    q[:, :, 3] = 0
    v[..., 2] = 0
    for precision in ("int8", "int8-fast"):
        done = operands_of(q, k, v, precision, backend, scale=1.0)
        assert (done.query.row_scale()[:, :, 3] == 0).all()
        assert (done.query.dequantize()[:, :, 3] == 0).all()
    if done.value.per_channel:
        assert (done.value.scale[..., 2] == 0).all()
    assert (done.value.dequantize()[..., 2] == 0).all()


@pytest.mark.rule("5.5")
def test_an_all_zero_block_of_values_is_zero(backend):
    q, k, v = make_qkv(Lq=150, D=8)
    v[:, :, 64:128] = 0
    value = operands_of(q, k, v, "int8-fast", backend).value.dequantize()
    assert (value[:, :, 64:128] == 0).all()
    assert (value != 0).any(-1).sum() == 2 * (150 - 64)


@pytest.mark.rule("5.6")
@pytest.mark.parametrize("rows", [1, 32, 64, 128])
def test_every_granularity_attends(rows):
    """The reference can do each granularity; per token is the most accurate."""
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=200, D=32)
    q *= torch.logspace(-1, 1, 200).reshape(1, 1, 200, 1)
    query = slow.quantize_rows(q, rows)
    key = slow.quantize_rows(slow.smooth_keys(k), min(rows, 64))
    assert query.rows_per_scale == rows
    assert query.scale.shape == (1, 4, math.ceil(200 / rows))
    tokens = TokenMask(200, 200)
    plan = plan_from_mask(torch.ones(1, 4, 2, 4, dtype=torch.bool), tokens)
    call = call_of(q, k, v, scale=0.2, recipe=Recipe(precision="int8"))
    prepared = Prepared(PreparedQueries(query), PreparedKeys(key, v))
    done = stages.attend(call, prepared, plan, tokens)
    truth, _ = dense(query.dequantize(), key.dequantize(), v, scale=0.2)
    assert relative_l1(done.out, truth) < 6e-3


@pytest.mark.rule("5.6")
def test_a_qtensor_says_its_granularity():
    x = torch.randn(1, 2, 100, 8)
    assert slow.quantize_rows(x).granularity == "one scale per token"
    assert slow.quantize_rows(x, 32).granularity == "one scale per 32 tokens"
    assert slow.quantize_channels(x).granularity == "one scale per 64 tokens and channel"
    with pytest.raises(ValueError, match=r"scale must have shape \(1, 2, 4\)"):
        QTensor(slow.quantize_rows(x).codes, torch.ones(1, 2, 5), 32)
    with pytest.raises(TypeError, match="codes must be int8"):
        QTensor(x, torch.ones(1, 2, 100))


@pytest.mark.rule("5.11")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_has_no_plausible_scale(bad):
    x = torch.randn(1, 1, 70, 8)
    x[0, 0, 5, 3] = bad
    rows = slow.quantize_rows(x)
    assert rows.scale.isnan().nonzero().tolist() == [[0, 0, 5]]
    assert (rows.codes[0, 0, 5] == 0).all()
    channels = slow.quantize_channels(x)
    assert channels.scale.isnan().nonzero().tolist() == [[0, 0, 0, 3]]
