"""Gradients of the unquantized precisions, the plan being constant."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from oracle import make_qkv, over_tokens, pairs
from sparge import KeepAll, KeepMass, Recipe
from sparge.backends.reference import stages as reference_stages


def textbook(q, k, v, kept, **options):
    """Differentiable fp64 attention over a block map."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    Lq, Lk = q.shape[2], k.shape[2]
    allowed, bias = pairs((*q.shape[:2], Lq, Lk), **options)
    allowed = allowed & over_tokens(kept, Lq, Lk)
    s = (q @ k.mT * q.shape[-1] ** -0.5 + bias.nan_to_num(neginf=0.0)).masked_fill(
        ~allowed, -math.inf
    )
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return p @ v, lse


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("through", ["attention", "attend"])
@pytest.mark.parametrize("kind", ["full", "causal", "bottom_right", "mask"])
def test_gradients_are_those_of_the_kept_blocks(backend, kind, through, widest):
    q, k, v = make_qkv(B=2, Hq=4, Hk=2, Lq=150, Lk=200, D=12, Dv=20, dtype=widest)
    options = {"is_causal": kind in ("causal", "bottom_right")}
    if kind == "bottom_right":
        options["causal_align"] = kind
    if kind == "mask":
        g = torch.Generator().manual_seed(1)
        mask = torch.randn(150, 200, generator=g, dtype=torch.float64).to(widest)
        options["attn_mask"] = mask.masked_fill(mask > 1, -math.inf)
        options["attn_mask"][7] = -math.inf
    recipe = Recipe(KeepMass(0.6), precision="exact", sink_blocks=0)
    common = {"enable_gqa": True, "recipe": recipe, "backend": backend}
    plan = sparge.make_plan(q, k, **options, **common)
    assert plan.density < 1 or kind == "causal"  # where so few rows see the last blocks
    ours, truth = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    if through == "attention":
        out, lse = sparge.attention(*ours, return_lse=True, **options, **common)
    else:
        out, lse = sparge.attend(*ours, plan, attn_mask=options.get("attn_mask"), **common)
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(out.shape, generator=g, dtype=torch.float64)
    weight_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64)

    def objective(out, lse):
        return (out * weight).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * weight_lse).sum()

    objective(out, lse).backward()
    objective(*textbook(*truth, plan.to_mask(), **options)).backward()
    for x, y in zip(ours, truth, strict=True):
        atol = 1e-10 if widest == torch.float64 else 1e-4
        assert torch.allclose(x.grad.double(), y.grad.nan_to_num(0.0), atol=atol)


def sharp_inputs(dtype):
    q, k, v = make_qkv(Hq=1, Lq=20, Lk=130, D=3, dtype=torch.float64, sharp=3.0)
    return q.to(dtype), (k * torch.linspace(2, 0.05, 130)[:, None]).to(dtype), v.to(dtype)


def test_gradients_with_the_second_filter_are_the_reference_s(backend, widest):
    """Which the next test holds to finite differences."""
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=1.5)
    ours, truth = leaves(*sharp_inputs(widest)), leaves(*sharp_inputs(torch.float64))
    for inputs, name in ((ours, backend), (truth, "reference")):
        with sparge.record() as runs:
            out = sparge.attention(*inputs, recipe=recipe, backend=name)
        assert runs[0].pv_skipped > 0
        out.square().sum().backward()
    for x, y in zip(ours, truth, strict=True):
        assert torch.allclose(x.grad.double(), y.grad, atol=1e-4)


def test_gradcheck_with_the_second_filter(fp64_backend):
    """Skipped row groups are constants: finite differences agree away from the thresholds."""
    q, k, v = sharp_inputs(torch.float64)
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=1.5)
    with sparge.record() as runs:
        sparge.attention(q, k, v, recipe=recipe, backend=fp64_backend)
    assert runs[0].pv_skipped > 0
    assert torch.autograd.gradcheck(
        lambda *x: sparge.attention(*x, recipe=recipe, backend=fp64_backend, return_lse=True),
        leaves(q, k, v),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("precision", ["half", "exact"])
def test_gradients_in_every_dtype(backend, precision, dtype):
    q, k, v = make_qkv(Hq=2, Lq=140, D=16, dtype=dtype)
    recipe = Recipe(KeepAll(), precision=precision)
    ours, truth = leaves(q, k, v), leaves(q.double(), k.double(), v.double())
    sparge.attention(*ours, is_causal=True, recipe=recipe, backend=backend).sum().backward()
    torch.nn.functional.scaled_dot_product_attention(*truth, is_causal=True).sum().backward()
    for x, y in zip(ours, truth, strict=True):
        assert x.grad.dtype == dtype
        wrong = (x.grad.double() - y.grad).abs().sum() / y.grad.abs().sum()
        exact = precision == "exact" and dtype == torch.float32
        assert wrong < (1e-5 if exact else 0.03)


@pytest.mark.parametrize("precision", ["int8", "int8-fast"])
def test_quantized_precisions_refuse_and_say_which_to_use(backend, precision):
    q, k, v = leaves(*make_qkv(Hq=1, Lq=20, D=8))
    recipe = Recipe(precision=precision)
    with pytest.raises(ValueError, match=r"'half'.*'exact'.*no_grad"):
        sparge.attention(q, k, v, recipe=recipe, backend=backend)
    with torch.no_grad():
        assert sparge.attention(q, k, v, recipe=recipe, backend=backend).shape == q.shape
    # A plan is a constant, so planning takes them in any precision.
    plan = sparge.make_plan(q, k, recipe=recipe, backend=backend)
    with pytest.raises(ValueError, match="requires grad"):
        sparge.attend(q, k, v, plan, recipe=recipe, backend=backend)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", ["auto", "reference", "cpu"])
def test_pooled_blocks_refuse_before_any_work_and_say_what_to_use(name):
    q, k, v = leaves(*make_qkv(Hq=1, Lq=20, D=8))
    recipe = Recipe(precision="exact", skipped="pool")
    with pytest.raises(ValueError, match=r"'pool' has no gradient.*skipped='drop'.*no_grad"):
        sparge.attention(q, k, v, recipe=recipe, backend=name)


def test_pooled_blocks_without_a_gradient_and_dense_attention_with_one(backend):
    q, k, v = leaves(*make_qkv(Hq=1, Lq=20, D=8))
    recipe = Recipe(precision="exact", skipped="pool")
    with torch.no_grad():
        assert sparge.attention(q, k, v, recipe=recipe, backend=backend).shape == q.shape
    sparge.attention(q, k, v, recipe=recipe, backend="dense").sum().backward()
    assert v.grad.isfinite().all()
    plan = sparge.make_plan(q, k, recipe=recipe, backend=backend)
    with pytest.raises(ValueError, match="'pool' has no gradient"):
        sparge.attend(q, k, v, plan, recipe=recipe, backend=backend)


def test_the_op_itself_has_a_gradient_or_says_why_not():
    """`torch.ops.sparge.attention` called by hand, also where it routes to dense attention."""
    q, k, v = leaves(*make_qkv(Hq=2, Lq=20, D=8))

    def op(recipe, backend):
        facts = (True, 0, 0.3, recipe.to_json(), False, True, backend)
        return torch.ops.sparge.attention(q, k, v, None, None, *facts)[0]

    with pytest.raises(ValueError, match="'int8' has no gradient"):
        op(Recipe(), "reference").sum().backward()
    with pytest.raises(ValueError, match="'pool' has no gradient"):
        op(Recipe(precision="half", skipped="pool"), "reference").sum().backward()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    truth = torch.autograd.grad(dense.square().sum(), (q, k, v))
    for backend in ("dense", "auto"):
        found = torch.autograd.grad(op(Recipe(), backend).square().sum(), (q, k, v))
        for a, b in zip(found, truth, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("function", ["attention", "attend"])
def test_second_derivatives_raise(backend, function):
    """They came back silently wrong: the first gradient was taken for a constant."""
    q, k, v = leaves(*make_qkv(Hq=1, Lq=20, D=8))
    options = {"recipe": Recipe(precision="exact"), "backend": backend}
    if function == "attend":
        plan = sparge.make_plan(q, k, **options)
        out, _ = sparge.attend(q, k, v, plan, **options)
    else:
        out = sparge.attention(q, k, v, **options)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.square().sum().backward()


def test_second_derivatives_of_the_dense_route_are_torchs():
    q, k, v = leaves(*make_qkv(Hq=1, Lq=20, D=8))
    # With an LSE dense attention is computed in plain torch, which differentiates it twice.
    out, _ = sparge.attention(q, k, v, recipe=Recipe(precision="exact"), return_lse=True)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (twice,) = torch.autograd.grad(grad.square().sum(), q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    (first,) = torch.autograd.grad(plain.square().sum(), q, create_graph=True)
    (truth,) = torch.autograd.grad(first.square().sum(), q)
    torch.testing.assert_close(twice, truth, rtol=1e-4, atol=1e-5)


def test_the_backward_runs_on_the_backend_of_the_environment(add_backend, monkeypatch):
    """With `backend="auto"` the forward obeyed it and the backward ran on another."""
    ran = []

    def backward(*args):
        ran.append("mine")
        return reference_stages.backward(*args)

    add_backend("mine", backward=backward)
    monkeypatch.setenv("SPARGE_BACKEND", "mine")
    q, k, v = leaves(*make_qkv(Hq=1, Lq=20, D=8))
    sparge.attention(q, k, v, recipe=Recipe(precision="exact")).sum().backward()
    assert ran == ["mine"]
    monkeypatch.setenv("SPARGE_BACKEND", "reference")
    sparge.attention(q, k, v, recipe=Recipe(precision="exact")).sum().backward()
    assert ran == ["mine"]
