"""`torch.ops.sparge.*`: opcheck, and compiled graphs without a break that give the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

import sparge
from oracle import clustered_qkv, make_qkv
from sparge import KeepFraction, KeepMass, Recipe
from sparge.api.attention import attention_and_run

ops = torch.ops.sparge
RECIPES = {p: Recipe(KeepMass(0.7), precision=p) for p in ("int8", "int8-fast", "half", "exact")}


def facts(precision):
    return True, 0, 0.25, RECIPES[precision].to_json()


def all_pass(results):
    assert results, "opcheck ran nothing"
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_opcheck_of_every_stage(backend, precision):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=200, D=16)
    call = facts(precision)
    mask = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    all_pass(opcheck(ops.plan, (q, k, mask, None, *call, backend)))
    *plan, _ = ops.plan(q, k, None, None, *call, backend)
    all_pass(opcheck(ops.attend, (q, k, v, mask, *plan, *call, backend)))
    if precision in ("half", "exact"):
        wanting = [x.clone().requires_grad_() for x in (q, k, v)]
        all_pass(opcheck(ops.attend, (*wanting, mask, *plan, *call, backend)))
        all_pass(opcheck(ops.attention, (*wanting, mask, None, *call, True, True, backend)))
        out, lse, _ = ops.attend(q, k, v, mask, *plan, *call, backend)
        grads = (torch.ones_like(out), torch.ones_like(lse))
        saved = (q, k, v, out, mask, *plan)
        all_pass(opcheck(ops.attend_backward, (*grads, *saved, *call, backend)))
    all_pass(opcheck(ops.attention, (q, k, v, mask, None, *call, True, False, backend)))


def test_opcheck_of_the_dense_route_and_of_varlen():
    q, k, v = make_qkv(Hq=2, Lq=200, D=16)
    for lse in (True, False):
        all_pass(
            opcheck(
                ops.attention,
                (q, k, v, None, None, *facts("exact"), lse, False, "dense"),
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )
        )
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    cuts = torch.tensor([0, 60, 200])
    by_name = (True, "bottom_right", *facts("int8")[2:])
    all_pass(opcheck(ops.attention_varlen, (*packed, cuts, cuts, *by_name, True, "reference")))


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda f, **options: torch.compile(f, fullgraph=True, backend="aot_eager", **options)
    torch._dynamo.reset()


def test_protected_ranges_are_an_argument_of_the_op(compiled):
    """In place of the recipe's own; a graph gives them as numbers and makes no recipe."""
    q, k, v = make_qkv(Hq=2, Lq=700, D=16)
    recipe = Recipe(KeepFraction(0.1), precision="exact", sink_blocks=0, protect=((0, 10),))
    ranges = ((300, 330), (690, 700))
    want, lse = sparge.attention(
        q, k, v, recipe=replace(recipe, protect=ranges), backend="cpu", return_lse=True
    )
    assert not torch.equal(want, sparge.attention(q, k, v, recipe=recipe, backend="cpu"))
    given = (q, k, v, None, None, False, 0, 0.25, recipe.to_json(), True, False, "cpu", "")
    numbers = [300, 330, 690, 700]
    out, found, *_ = ops.attention(*given, numbers)
    assert torch.equal(out, want)
    assert torch.equal(found, lse)
    all_pass(opcheck(ops.attention, (*given, numbers)))

    @compiled
    def call(q, k, v):
        out, *_ = attention_and_run(q, k, v, recipe=recipe, backend="cpu", protect=ranges)
        return out

    assert torch.equal(call(q, k, v), want)
    with sparge.record() as runs:
        eager, _, run = attention_and_run(q, k, v, recipe=recipe, backend="cpu", protect=ranges)
    assert torch.equal(eager, want)
    assert runs == [run]
    assert run.recipe.protect == ranges
    *_, unwanted = attention_and_run(q, k, v, recipe=recipe, backend="cpu")
    *_, wanted = attention_and_run(q, k, v, recipe=recipe, backend="cpu", recorded=True)
    assert unwanted is None
    assert wanted.recipe == recipe


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_attention_compiles_whole(backend, precision, compiled):
    q, k, v = clustered_qkv(Hq=4, Hk=2, L=300)
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)

    def f(q, k, v):
        x = sparge.attention(
            q * 1.5, k, v, is_causal=True, attn_mask=mask, enable_gqa=True,
            recipe=RECIPES[precision], backend=backend,
        )  # fmt: skip
        return x + 1

    with sparge.record() as runs:
        found = compiled(f)(q, k, v)
    assert torch.equal(found, f(q, k, v))
    assert [run.backend for run in runs] == [backend], "a compiled call is recorded too"
    assert runs[0].density < 1


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "exact"])
def test_the_two_halves_compile_whole(backend, precision, compiled):
    q, k, v = clustered_qkv(Hq=4, Hk=2, L=300)
    recipe = RECIPES[precision]

    def f(q, k, v):
        common = {"enable_gqa": True, "recipe": recipe, "backend": backend}
        plan = sparge.make_plan(q, k, is_causal=True, **common)
        out, lse = sparge.attend(q, k, v, plan, **common)
        return sparge.merge(out, lse, out, lse)

    for found, eager in zip(compiled(f)(q, k, v), f(q, k, v), strict=True):
        assert torch.equal(found, eager)


def test_the_default_call_compiles_whole_and_takes_any_length(compiled):
    def f(q, k, v):
        return sparge.attention(q, k, v, is_causal=True)

    g = compiled(f, dynamic=True)
    for L in (100, 130, 257):
        q, k, v = make_qkv(Hq=2, Lq=L, D=16)
        assert torch.allclose(g(q, k, v), f(q, k, v), atol=1e-6)


def test_lengths_do_not_recompile(backend, compiled):
    recipe = RECIPES["exact"]
    g = compiled(
        lambda q, k, v: sparge.attention(q, k, v, recipe=recipe, backend=backend), dynamic=True
    )
    g(*make_qkv(Hq=2, Lq=300, D=16))  # one block alone would be a shape of its own
    with torch._dynamo.config.patch(error_on_recompile=True):
        for L in (130, 257, 400):
            q, k, v = make_qkv(Hq=2, Lq=L, D=16)
            eager = sparge.attention(q, k, v, recipe=recipe, backend=backend)
            assert torch.equal(g(q, k, v), eager)


def test_gradients_compile_whole(backend, compiled):
    recipe = RECIPES["exact"]

    def f(q, k, v):
        return sparge.attention(q, k, v, is_causal=True, recipe=recipe, backend=backend).square()

    grads = []
    for g in (compiled(f), f):
        x = [t.requires_grad_() for t in make_qkv(Hq=2, Lq=140, D=16)]
        g(*x).sum().backward()
        grads.append([t.grad for t in x])
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


def test_the_dense_route_keeps_torch_s_gradient(compiled):
    recipe = RECIPES["exact"]
    x = [t.requires_grad_() for t in make_qkv(Hq=2, Lq=140, D=16)]
    g = compiled(lambda q, k, v: sparge.attention(q, k, v, recipe=recipe))
    found = torch.autograd.grad(g(*x).square().sum(), x)
    dense = torch.nn.functional.scaled_dot_product_attention(*x)
    for a, b in zip(found, torch.autograd.grad(dense.square().sum(), x), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_inductor_compiles_it_too():
    torch._dynamo.reset()
    q, k, v = make_qkv(Hq=2, Lq=140, D=16)

    def f(q, k, v):
        return sparge.attention(q, k, v, recipe=RECIPES["int8"], backend="reference") * 2

    with torch.no_grad():
        assert torch.equal(torch.compile(f, fullgraph=True)(q, k, v), f(q, k, v))


def test_a_fake_call_runs_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), sparge.record() as runs:
        q = torch.empty(2, 4, 1000, 64, dtype=torch.bfloat16)
        out, lse = sparge.attention(q, q, q[..., :32], return_lse=True)
    assert out.shape == (2, 4, 1000, 32)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 1000)
    assert not runs


def test_a_scale_that_varies_compiles_whole(compiled):
    q, k, v = make_qkv(Hq=2, Lq=140, D=16)
    g = compiled(lambda q, k, v, s: sparge.attention(q, k, v, scale=s))
    for scale in (0.3, 0.4, 0.5):
        assert torch.allclose(g(q, k, v, scale), sparge.attention(q, k, v, scale=scale), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"causal_align": "bottom_right"}])
def test_dense_gradients_of_any_length_compile_few_times(options):
    torch._dynamo.reset()
    recipe = RECIPES["exact"]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def f(q, k, v):
        out = sparge.attention(q, k, v, is_causal=True, recipe=recipe, **options)
        return out[0] if isinstance(out, tuple) else out

    g = torch.compile(f, fullgraph=True, backend=counter, dynamic=True)
    for L in (130, 150, 170, 200, 257, 300):
        q, k, v = (x.requires_grad_() for x in make_qkv(Hq=2, Lq=L, Lk=L + 20, D=16))
        g(q, k, v).sum().backward()
        assert torch.isfinite(q.grad).all()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_where_the_op_chooses(return_lse):
    q, k, v = make_qkv(Hq=2, Lq=140, D=16)
    all_pass(
        opcheck(ops.attention, (q, k, v, None, None, *facts("int8"), return_lse, False, "auto"))
    )
    wanting = [x.clone().requires_grad_() for x in (q, k, v)]
    args = (*wanting, None, None, *facts("exact"), return_lse, True, "auto")
    all_pass(opcheck(ops.attention, args))
