"""Dense attention as one of the backends, and autocast around all of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import sparge
from calls import EXACT, HALF, only, tensors
from oracle import dense, make_qkv, relative_l1
from sparge import KeepAll, KeepFraction, Recipe

# --- dense attention --------------------------------------------------------------------------


def dense64(q, k, v, *, allowed=None, bias=None, scale=None):
    """fp64 attention by the formula: `(out, lse)`; rows without a key give zeros and -inf."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(group, 1),
        v.double().repeat_interleave(group, 1),
    )
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias.double()
    scores = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, lse


def diagonal(Lq, Lk, align):
    offset = Lk - Lq if align == "bottom_right" else 0
    return torch.arange(Lk) <= torch.arange(Lq)[:, None] + offset


def token_mask(Lq=140, Lk=200, seed=1):
    return torch.rand(Lq, Lk, generator=torch.Generator().manual_seed(seed)) < 0.6


SPARSE_ROWS = token_mask()
SPARSE_ROWS[3] = SPARSE_ROWS[139] = False
BIAS = torch.randn(2, 1, 140, 200, generator=torch.Generator().manual_seed(2))
CASES = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"Lq": 200}, {"is_causal": True}, id="causal"),
    pytest.param({}, {"is_causal": True}, id="causal top left, more keys"),
    pytest.param({"Lq": 250}, {"is_causal": True}, id="causal top left, more queries"),
    pytest.param({}, {"is_causal": True, "causal_align": "bottom_right"}, id="bottom right"),
    pytest.param(
        {"Lq": 250}, {"is_causal": True, "causal_align": "bottom_right"}, id="rows before the keys"
    ),
    pytest.param(
        {"Lq": 1}, {"is_causal": True, "causal_align": "bottom_right"}, id="one query at the end"
    ),
    pytest.param({}, {"attn_mask": token_mask()}, id="mask"),
    pytest.param({}, {"attn_mask": token_mask()[:1]}, id="mask of the keys"),
    pytest.param({}, {"attn_mask": SPARSE_ROWS}, id="rows without a key"),
    pytest.param({}, {"attn_mask": SPARSE_ROWS, "is_causal": True}, id="mask and causal"),
    pytest.param(
        {},
        {"attn_mask": SPARSE_ROWS, "is_causal": True, "causal_align": "bottom_right"},
        id="mask and bottom right",
    ),
    pytest.param({"B": 2}, {"attn_mask": BIAS}, id="bias"),
    pytest.param(
        {"B": 2},
        {"attn_mask": BIAS.masked_fill(~SPARSE_ROWS, -math.inf), "is_causal": True},
        id="bias with -inf rows and causal",
    ),
    pytest.param({"Hq": 4, "Hk": 2}, {"enable_gqa": True}, id="shared heads"),
    pytest.param(
        {"Hq": 4, "Hk": 1},
        {"enable_gqa": True, "is_causal": True, "causal_align": "bottom_right"},
        id="one key head, bottom right",
    ),
    pytest.param({"D": 16, "Dv": 40}, {}, id="Dv larger"),
    pytest.param({"D": 32, "Dv": 8}, {"is_causal": True}, id="Dv smaller"),
    pytest.param({}, {"scale": 0.7}, id="scale"),
    pytest.param({}, {"scale": -0.2}, id="negative scale"),
]


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("sizes, options", CASES)
def test_dense_attention(sizes, options, with_lse):
    q, k, v = tensors(**sizes)
    with sparge.record() as runs:
        result = sparge.attention(q, k, v, **options, return_lse=with_lse)
    assert only(runs).routed_to_dense
    out, lse = result if with_lse else (result, None)
    want, want_lse = wanted(q, k, v, **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    if with_lse:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        empty = want_lse == -math.inf
        assert bool((out[empty] == 0).all())


def wanted(q, k, v, *, attn_mask=None, is_causal=False, causal_align="top_left", scale=None, **_):
    allowed, bias = None, None
    if is_causal:
        allowed = diagonal(q.shape[2], k.shape[2], causal_align)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = attn_mask if allowed is None else attn_mask & allowed
    elif attn_mask is not None:
        bias = attn_mask
    return dense64(q, k, v, allowed=allowed, bias=bias, scale=scale)


def test_the_cases_hold_rows_without_a_key():
    q, k, v = tensors()
    assert int((wanted(q, k, v, attn_mask=SPARSE_ROWS)[1] == -math.inf).sum()) == 2 * 2
    options = {"is_causal": True, "causal_align": "bottom_right"}
    q, k, v = tensors(Lq=250)
    assert int((wanted(q, k, v, **options)[1] == -math.inf).sum()) == 2 * 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": token_mask()}])
def test_dense_attention_is_torch_s_own(dtype, options):
    q, k, v = tensors(dtype=dtype)
    out = sparge.attention(q, k, v, **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **options))
    with_lse, lse = sparge.attention(q, k, v, return_lse=True, **options)
    assert with_lse.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), wanted(q, k, v, **options)[1], rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(with_lse, out, rtol=16 * eps, atol=16 * eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_bias_as_low_as_it_goes_is_no_mask(dtype):
    q, k, v = tensors(dtype=dtype)
    low = torch.full((140, 200), torch.finfo(torch.float32).min)
    low[:, :7] = -math.inf
    for with_lse in (False, True):
        out = sparge.attention(q, k, v, attn_mask=low, return_lse=with_lse)
        out = out[0] if with_lse else out
        assert bool(torch.isfinite(out).all())
        assert bool((out != 0).any(-1).all())
        # However the scores are rounded so far down, the result is an average of the open values.
        assert bool((out <= v[:, :, 7:].amax(2, keepdim=True)).all())
        assert bool((out >= v[:, :, 7:].amin(2, keepdim=True)).all())


def test_long_queries_go_in_slices():
    q, k, v = tensors(Hq=1, Hk=1, Lq=1100, Lk=1130, D=8, Dv=8)
    options = {"is_causal": True, "causal_align": "bottom_right"}
    want, want_lse = wanted(q, k, v, **options)
    options["backend"] = "dense"
    out, lse = sparge.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    alone = sparge.attention(q, k, v, **options)
    torch.testing.assert_close(alone.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("sizes, options", CASES)
def test_the_gradient_flows_through_the_dense_route(sizes, options, with_lse):
    q, k, v = (x.requires_grad_() for x in tensors(**sizes))
    result = sparge.attention(q, k, v, **options, recipe=HALF, return_lse=with_lse)
    out, lse = result if with_lse else (result, None)
    _, want_lse = wanted(q.detach(), k.detach(), v.detach(), **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))

    def loss(out, lse):
        total = (out * weight).sum()
        return total + lse.masked_fill(lse == -math.inf, 0.0).sum() if with_lse else total

    got = torch.autograd.grad(loss(out, lse), (q, k, v))
    # Rows without a key have no gradient; the formula's own would be NaN there.
    expected = formula_gradient(q, k, v, weight, want_lse == -math.inf, with_lse, options)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        assert float(one.abs().max()) > 0


def formula_gradient(q, k, v, weight, empty, with_lse, options):
    """fp64, written out: dv = pᵀ·do, ds = p·(do·vᵀ - rowsum(do·o) + dlse)."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k_all, v_all = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    p, _ = wanted(q, k, eye, **options)
    do = weight.double()
    o = p @ v_all
    dlse = (~empty).double() if with_lse else torch.zeros_like(empty, dtype=torch.float64)
    ds = p * (do @ v_all.mT - (do * o).sum(-1, keepdim=True) + dlse[..., None]) * scale
    dk, dv = ds.mT @ q, p.mT @ do
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return ds @ k_all, dk, dv


# --- autocast ---------------------------------------------------------------------------------


@pytest.fixture
def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_autocast_gives_what_sdpa_gives(autocast):
    q, k, v = tensors()
    with autocast:
        out = sparge.attention(q, k, v)
        want = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_autocast_of_the_reference_is_that_of_cast_inputs(autocast, precision):
    q, k, v = tensors()
    options = {"backend": "reference", "return_lse": True, "recipe": Recipe(precision=precision)}
    with autocast:
        out, lse = sparge.attention(q, k, v, **options)
    want, want_lse = sparge.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_autocast_does_not_touch_the_dense_lse(autocast):
    q, k, v = tensors()
    with autocast:
        out, lse = sparge.attention(q, k, v, return_lse=True)
    want, want_lse = sparge.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_autocast_of_the_stages(autocast):
    q, k, v = tensors()
    halves = [x.bfloat16() for x in (q, k, v)]
    recipe = Recipe(keep=KeepFraction(0.5))
    with autocast:
        plan = sparge.make_plan(q, k, recipe=recipe)
        out, lse = sparge.attend(q, k, v, plan, recipe=recipe)
    assert plan.equal(sparge.make_plan(*halves[:2], recipe=recipe))
    want, want_lse = sparge.attend(*halves, plan, recipe=recipe)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_autocast_leaves_float64_alone(autocast):
    q, k, v = tensors(dtype=torch.float64)
    with autocast:
        out = sparge.attention(q, k, v, backend="reference", recipe=EXACT)
    assert out.dtype == torch.float64
    assert torch.equal(out, sparge.attention(q, k, v, backend="reference", recipe=EXACT))


def test_autocast_of_varlen(autocast):
    q, k, v = (x[0].transpose(0, 1) for x in tensors(Lq=200))
    cuts = torch.tensor([0, 70, 200])
    with autocast:
        out = sparge.attention_varlen(q, k, v, cuts, cuts, backend="reference")
    halves = [x.bfloat16() for x in (q, k, v)]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, sparge.attention_varlen(*halves, cuts, cuts, backend="reference"))


def test_autocast_does_not_touch_the_gradient(autocast):
    grads = []
    for inside in (False, True):
        leaves = [x.bfloat16().requires_grad_() for x in tensors()]
        out = sparge.attention(*leaves, recipe=EXACT, backend="reference")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            out.float().square().sum().backward()
        grads.append([x.grad for x in leaves])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_gradients_under_autocast_come_back_in_float32(autocast):
    leaves = [x.requires_grad_() for x in tensors()]
    with autocast:
        out = sparge.attention(*leaves, recipe=EXACT, backend="reference")
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    for x in leaves:
        assert x.grad.dtype == torch.float32
        assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_float32_bias_is_not_rounded_to_the_query_s_dtype(dtype, return_lse):
    """Positions as large as a long sequence's run together in 16 bits."""
    q, k, v = tensors(dtype=dtype)
    bias = 3000.0 + torch.rand(140, 200, generator=torch.Generator().manual_seed(0)) * 8
    found = sparge.attention(q, k, v, attn_mask=bias, return_lse=return_lse)
    found = found[0] if return_lse else found
    s = q.double() @ k.double().mT * 16**-0.5 + bias.double()
    truth = torch.softmax(s, -1) @ v.double()
    assert (found.double() - truth).abs().max() < 0.05
    exact = Recipe(keep=KeepAll(), precision="exact")
    sparse = sparge.attention(q, k, v, attn_mask=bias, recipe=exact, backend="reference")
    assert (sparse.double() - truth).abs().max() < 0.05


def test_a_float32_bias_beyond_float16_stays_a_number():
    q, k, v = tensors(dtype=torch.float16)
    high, low = torch.zeros(140, 200), torch.full((140, 200), -2e5)
    high[:, 7], low[:, 7] = 1e5, -1e5
    for bias in (high, low):
        found = sparge.attention(q, k, v, attn_mask=bias)
        assert torch.allclose(found, v[:, :, 7:8].expand_as(found), atol=1e-3)


@pytest.mark.parametrize("scale", [-0.5, 0.0, -1e-3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_that_are_not_positive_under_a_diagonal(dtype, scale):
    """torch's causal kernel gives NaN rows for them."""
    q, k, v = make_qkv(Hq=2, Lq=200, D=16, dtype=dtype)
    options = {"is_causal": True, "scale": scale}
    truth, _ = dense(q, k, v, **options)
    for backend in ("dense", "auto"):
        out = sparge.attention(q, k, v, **options, backend=backend)
        assert relative_l1(out, truth) < (1e-5 if dtype == torch.float32 else 0.02)
        packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        cuts = torch.tensor([0, 200])
        found = sparge.attention_varlen(*packed, cuts, cuts, **options, backend=backend)
        assert torch.equal(found.transpose(0, 1)[None], out)
    x = q.float().requires_grad_()
    recipe = sparge.Recipe(precision="exact")
    sparge.attention(x, k.float(), v.float(), **options, recipe=recipe).sum().backward()
    assert x.grad.isfinite().all()
