"""Edges by name: shapes, strides and numbers at the rim of what is allowed."""

from __future__ import annotations

import pytest
import torch

import sparge
from calls import limit
from oracle import dense, make_qkv, relative_l1, same_bits
from sparge import KeepAll, KeepFraction, KeepMass, Recipe

PRECISIONS = ["int8", "int8-fast", "half", "exact"]
TOLERANCE = {"exact": 1e-5, "half": 0.01, "int8": 0.025, "int8-fast": 0.035, "fp8": 0.045}


def check(q, k, v, backend, precision="exact", tolerance=None, **options):
    recipe = Recipe(KeepAll(), precision=precision)
    gqa = q.shape[1] != k.shape[1]
    out = sparge.attention(q, k, v, enable_gqa=gqa, recipe=recipe, backend=backend, **options)
    truth, _ = dense(q, k, v, **options)
    assert out.shape == truth.shape
    assert relative_l1(out, truth) < (tolerance or limit(TOLERANCE, precision, backend))
    return out


@pytest.mark.rule("5.8")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("Lq", "Lk"), [(1, 1), (1, 5), (5, 1), (15, 63), (16, 64), (17, 65), (127, 129), (129, 127)]
)
def test_short_and_tail_lengths(backend, Lq, Lk, precision):
    q, k, v = make_qkv(B=2, Hq=2, Lq=Lq, Lk=Lk, D=16)
    check(q, k, v, backend, precision)


@pytest.mark.rule("5.8")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("D", [1, 8, 40, 64, 72, 80, 96, 128, 160, 192, 256])
def test_head_dims(backend, D, precision):
    q, k, v = make_qkv(Hq=2, Hk=1, Lq=130, Lk=70, D=D)
    check(q, k, v, backend, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("D", "Dv"), [(24, 16), (16, 24), (192, 128), (1, 256)])
def test_value_dim_differs(backend, D, Dv, precision):
    q, k, v = make_qkv(Hq=2, Lq=130, Lk=70, D=D, Dv=Dv)
    assert check(q, k, v, backend, precision).shape[-1] == Dv


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "odd-offset", "backwards"])
def test_any_strides(backend, layout, precision):
    """A view gives, bit for bit, what its contiguous copy gives."""
    q, k, v = make_qkv(B=2, Hq=2, Lq=140, D=16)
    if layout == "transposed":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "strided":
        views = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v)]
    elif layout == "expanded":
        views = [q, k[:1].expand(2, -1, -1, -1), v[:, :1].expand(-1, 2, -1, -1)]
    elif layout == "odd-offset":
        views = [torch.cat([x.flatten(), x.flatten()[:1]])[1:].reshape(x.shape) for x in (q, k, v)]
    else:
        views = [x.mT.contiguous().mT for x in (q, k, v)]
    recipe = Recipe(KeepMass(0.9), precision=precision)
    options = {"is_causal": True, "recipe": recipe, "backend": backend, "return_lse": True}
    found = sparge.attention(*views, **options)
    plain = sparge.attention(
        *(x.clone(memory_format=torch.contiguous_format) for x in views), **options
    )
    assert same_bits(found[0], plain[0])
    assert same_bits(found[1], plain[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_are_left_alone(backend, precision):
    q, k, v = make_qkv(Hq=2, Lq=140, D=16)
    copies = [x.clone() for x in (q, k, v)]
    recipe = Recipe(KeepMass(0.9), precision=precision, pv_skip=3.0)
    sparge.attention(q, k, v, recipe=recipe, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zero_queries_and_keys_attend_evenly(backend, precision):
    q, k, v = make_qkv(Hq=1, Lq=70, Lk=100, D=16)
    check(torch.zeros_like(q), k, v, backend, precision)
    check(q, torch.zeros_like(k), v, backend, precision)
    check(q, k, torch.ones_like(v), backend, precision)
    zero_rows = q.clone()
    zero_rows[:, :, ::3] = 0
    check(zero_rows, k, v, backend, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_constant_keys_attend_evenly(backend, precision):
    q, k, v = make_qkv(Hq=1, Lq=70, Lk=200, D=16)
    k[:] = k[:, :, :1] * 50
    even = dict.fromkeys(PRECISIONS, 0.01) | {"fp8": TOLERANCE["fp8"]}
    check(q, k, v, backend, precision, limit(even, precision, backend))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_huge_channel(backend, precision):
    """A channel 100 times the others, the same in all keys, as models have them."""
    q, k, v = make_qkv(Hq=2, Lq=140, Lk=200, D=64)
    k[..., 5] += 100.0
    check(q, k, v, backend, precision, 0.03 if precision == "half" else None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_up_to_the_dtype_s_max(backend, precision, dtype):
    q, k, v = make_qkv(Hq=1, Lq=70, Lk=300, D=16, dtype=dtype)
    v[:] = torch.finfo(dtype).max
    v[..., ::2] *= -1
    out = sparge.attention(q, k, v, recipe=Recipe(KeepAll(), precision=precision), backend=backend)
    assert torch.isfinite(out).all()
    assert ((out.double() / v[:, :, :1].double() - 1).abs() < 0.01).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_at_the_dtype_s_max_are_one_hot_or_nan(backend, dtype):
    """Products that overflow fp32: the row is one-hot, infinite or NaN, never a made-up mix."""
    q, k, v = make_qkv(Hq=1, Lq=4, Lk=70, D=4, dtype=dtype)
    q[:], k[:] = 0, 0
    q[..., 0] = torch.finfo(dtype).max
    k[0, 0, 7, 0] = torch.finfo(dtype).max
    for precision in PRECISIONS:
        recipe = Recipe(KeepAll(), precision=precision)
        out = sparge.attention(q, k, v, recipe=recipe, backend=backend)
        one_hot = (out - v[:, :, 7:8]).abs() < 0.02 * v.abs().max()
        assert (one_hot | ~torch.isfinite(out)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiny_numbers(backend, precision):
    q, k, v = make_qkv(Hq=1, Lq=70, Lk=100, D=16)
    check(q * 1e-20, k * 1e-20, v * 1e-20, backend, precision)


@pytest.mark.parametrize("precision", ["int8", "exact"])
@pytest.mark.parametrize("scale", [0.0, -0.3, 5.0, 1])
def test_any_scale(backend, precision, scale):
    q, k, v = make_qkv(Hq=1, Lq=70, Lk=100, D=16)
    check(q, k, v, backend, precision, 1e-5 if precision == "exact" else 0.1, scale=scale)


def test_long_and_thin(backend):
    """One query over many keys, and many queries over one key."""
    for Lq, Lk in ((1, 5000), (1500, 1)):
        q, k, v = make_qkv(Hq=1, Lq=Lq, Lk=Lk, D=8)
        check(q, k, v, backend, is_causal=True, causal_align="bottom_right")


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half"])
def test_fp64_numbers_beyond_fp32_are_never_plausible(fp64_backend, precision):
    """The lower precisions compute in fp32; what that cannot hold is infinite or NaN."""
    q, k, v = make_qkv(Hq=1, Lq=20, Lk=70, D=8, dtype=torch.float64)
    recipe = Recipe(KeepAll(), precision=precision)
    out = sparge.attention(q, k, torch.full_like(v, 1e300), recipe=recipe, backend=fp64_backend)
    assert not torch.isfinite(out).any()
    exact = Recipe(KeepAll(), precision="exact")
    out = sparge.attention(q, k, torch.full_like(v, 1e300), recipe=exact, backend=fp64_backend)
    assert torch.allclose(out, torch.full_like(v, 1e300)[:, :, :20])


@pytest.mark.rule("3.12")
def test_a_tiny_fraction_keeps_one_block(backend):
    """Also without a sink block: rounding must not leave a row with none."""
    q, k, _ = make_qkv(Hq=2, Lq=300, D=16)
    recipe = Recipe(KeepFraction(1e-10), sink_blocks=0, predictor="mean")
    plan = sparge.make_plan(q, k, recipe=recipe, backend=backend)
    assert (plan.counts == 1).all()
