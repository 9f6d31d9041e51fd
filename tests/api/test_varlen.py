"""Packed sequences: each gets, bit for bit, what `attention` gives it alone."""

from __future__ import annotations

import pytest
import torch

import sparge
from packs import Q_LENGTHS, cuts, identical, one_by_one, packed
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe, attention_varlen

EXACT = Recipe(keep=KeepFraction(0.5), precision="exact")
RECIPES = {
    "default": Recipe(),
    "int8 mean": Recipe(KeepMass(0.7), "mean", min_similarity=0.05, pv_skip=2.0),
    "int8-fast": Recipe(KeepFraction(0.5), precision="int8-fast"),
    "half": Recipe(KeepFraction(0.5), precision="half", pv_skip=1.0),
    "exact": EXACT,
    "pool": Recipe(KeepFraction(0.5), skipped="pool", pool_group=16),
    "keep all": Recipe(KeepAll(), pv_skip=1.5),
    "int8-fast pool": Recipe(KeepFraction(0.4), "mean", precision="int8-fast", skipped="pool"),
    "protected": Recipe(KeepFraction(0.1), "mean", precision="half", protect=((3, 9), (-4, None))),
    "budget": Recipe(KeepError(0.05)),
    "budget, raised": Recipe(KeepError(0.002), precision="int8-fast"),
    "exact per head": Recipe(KeepMass((0.3, 0.6, 0.9, 1.0)), "rows", precision="exact"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_sequence_is_as_it_is_alone(backend, name):
    pack = packed()
    options = {"recipe": RECIPES[name], "backend": backend}
    out, lse = attention_varlen(*pack, enable_gqa=True, return_lse=True, **options)
    want, want_lse = one_by_one(*pack, **options)
    identical(out, want)
    identical(lse, want_lse)
    assert out.shape == (sum(Q_LENGTHS), 4, 24)
    assert lse.shape == (4, sum(Q_LENGTHS))


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("name", ["default", "exact"])
def test_every_sequence_has_its_own_diagonal(backend, name, align):
    pack = packed()
    options = {"recipe": RECIPES[name], "backend": backend}
    options |= {"is_causal": True, "causal_align": align, "scale": 0.3}
    out, lse = attention_varlen(*pack, enable_gqa=True, return_lse=True, **options)
    want, want_lse = one_by_one(*pack, **options)
    identical(out, want)
    identical(lse, want_lse)
    # The second sequence has 130 queries for 64 keys: at the bottom right, 66 see nothing.
    empty = (out[5:135] == 0).all(-1).all(-1).sum()
    assert int(empty) == (66 if align == "bottom_right" else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    pack = packed((20, 130), (70, 30), Hq=2, dtype=dtype)
    options = {"recipe": Recipe(KeepAll(), precision="exact"), "backend": "reference"}
    out, lse = attention_varlen(*pack, return_lse=True, **options)
    want, want_lse = one_by_one(*pack, **options)
    identical(out, want)
    identical(lse, want_lse)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_sequences_do_not_see_each_other(backend):
    query, key, value, cu_q, cu_k = packed()
    options = {"enable_gqa": True, "backend": backend}
    before = attention_varlen(query, key, value, cu_q, cu_k, **options)
    key[:70], value[:70], query[:5] = 9.0, -9.0, 1.0
    after = attention_varlen(query, key, value, cu_q, cu_k, **options)
    identical(after[5:], before[5:])
    assert not torch.equal(after[:5], before[:5])


def test_one_sequence_is_attention():
    query, key, value, *_ = packed((150,), (100,))
    one = attention_varlen(query, key, value, cuts((150,)), cuts((100,)), enable_gqa=True)
    alone = [x.transpose(0, 1)[None] for x in (query, key, value)]
    identical(one, sparge.attention(*alone, enable_gqa=True)[0].transpose(0, 1))


def test_boundaries_may_be_int64_and_tensors_strided(backend):
    query, key, value, cu_q, cu_k = packed()
    options = {"enable_gqa": True, "backend": backend, "recipe": EXACT}
    want = attention_varlen(query, key, value, cu_q, cu_k, **options)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    assert not strided[0].is_contiguous()
    identical(attention_varlen(*strided, cu_q.long(), cu_k.long(), **options), want)


def test_auto_is_dense_attention_of_each_sequence():
    pack = packed()
    with sparge.record() as runs:
        out, lse = attention_varlen(*pack, enable_gqa=True, is_causal=True, return_lse=True)
    want, want_lse = one_by_one(*pack, is_causal=True, backend="dense")
    identical(out, want)
    identical(lse, want_lse)
    assert runs[0].routed_to_dense
    assert "no sparse backend is faster" in runs[0].reason


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reference", "auto"])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_gradients_are_those_of_separate_calls(align, where):
    *tensors, cu_q, cu_k = packed((5, 130), (70, 64), Hq=2, Hk=1, D=8, Dv=8)
    for x in tensors:
        x.requires_grad_()
    options = {"recipe": EXACT, "backend": where, "is_causal": True, "causal_align": align}
    out, lse = attention_varlen(*tensors, cu_q, cu_k, enable_gqa=True, return_lse=True, **options)
    want, want_lse = one_by_one(*tensors, cu_q, cu_k, **options)
    identical(out, want)
    identical(lse, want_lse)
    g = torch.Generator().manual_seed(4)
    weight, lse_weight = torch.randn(out.shape, generator=g), torch.randn(lse.shape, generator=g)

    def grads(out, lse):
        loss = (out * weight).sum() + (lse.masked_fill(lse == -torch.inf, 0) * lse_weight).sum()
        return torch.autograd.grad(loss, tensors)

    for got, expected in zip(grads(out, lse), grads(want, want_lse), strict=True):
        identical(got, expected)
        assert float(got.abs().max()) > 0
        assert bool(torch.isfinite(got).all())


def test_no_gradient_is_asked_of_inference():
    *tensors, cu_q, cu_k = packed()
    for x in tensors:
        x.requires_grad_()
    with torch.no_grad():
        out = attention_varlen(*tensors, cu_q, cu_k, enable_gqa=True)
    assert not out.requires_grad


# --- records ----------------------------------------------------------------------------------


def test_one_record_for_a_call_with_a_part_for_each_sequence(backend):
    pack = packed()
    recipe = Recipe(KeepFraction(0.4), precision="exact", sink_blocks=0)
    options = {"recipe": recipe, "backend": backend}
    with sparge.record() as runs:
        attention_varlen(*pack, enable_gqa=True, **options)
    with sparge.record() as alone:
        one_by_one(*pack, **options)
    (run,) = runs
    assert run.what == "attention_varlen"
    assert run.call.startswith("3 sequences")
    assert run.backend == backend
    assert "asked for" in run.reason
    assert len(run.parts) == 3
    for part, other in zip(run.parts, alone, strict=True):
        assert (part.kept, part.allowed, part.density) == (other.kept, other.allowed, other.density)
    assert run.kept == sum(part.kept for part in run.parts)
    assert run.allowed == sum(part.allowed for part in run.parts)
    assert run.density == run.kept / run.allowed
    assert 0 < run.density < 1
    for stage in ("prepare", "predict", "select", "attend", "total"):
        assert run.seconds[stage] == pytest.approx(sum(p.seconds[stage] for p in run.parts))


def test_skipped_products_of_a_pack_are_counted_in_their_own_units(backend):
    # Of 4 key blocks the first is far above the rest for 5 rows of the one sequence and half the
    # rows of the other: there the 3 others are skipped, in 1 row group and in 4 of 8.
    query, key = torch.zeros(5 + 128, 1, 16), torch.zeros(512, 1, 16)
    query[: 5 + 64, 0, 0] = 8.0
    key[:64, 0, 0] = key[256:320, 0, 0] = 8.0
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=4.0)
    options = {"recipe": recipe, "backend": backend}
    with sparge.record() as runs:
        attention_varlen(query, key, key, cuts((5, 128)), cuts((256, 256)), **options)
    (run,) = runs
    assert [part.pv_skipped for part in run.parts] == [3 / 4, 12 / 32]
    assert run.pv_skipped == pytest.approx((3 + 12) / (4 + 32))
    assert run.sparsity == pytest.approx((3 / 1 + 12 / 8) / (2 * 8))


def test_one_record_also_with_a_gradient():
    *tensors, cu_q, cu_k = packed((5, 130), (70, 64), Hq=2)
    tensors[0].requires_grad_()
    with sparge.record() as runs:
        attention_varlen(*tensors, cu_q, cu_k, recipe=EXACT, backend="reference")
    assert [run.what for run in runs] == ["attention_varlen"]
    assert len(runs[0].parts) == 2


def test_nothing_is_recorded_outside():
    with sparge.record() as runs:
        pass
    attention_varlen(*packed((5,), (6,)), enable_gqa=True)
    assert runs == []


# --- compiled ---------------------------------------------------------------------------------


def test_a_compiled_call_gives_the_same():
    pack = packed()
    options = {"enable_gqa": True, "is_causal": True, "return_lse": True, "backend": "reference"}

    @torch.compile(fullgraph=True)
    def compiled(query, key, value, cu_q, cu_k):
        return attention_varlen(query * 2, key, value, cu_q, cu_k, **options)

    query, *rest = pack
    out, lse = compiled(*pack)
    want, want_lse = attention_varlen(query * 2, *rest, **options)
    identical(out, want)
    identical(lse, want_lse)
    # Other boundaries over the same tokens are data, not another graph.
    moved = cuts((60, 75, 64)), cuts((64, 70, 129))
    with torch.compiler.set_stance("fail_on_recompile"):
        out, lse = compiled(*pack[:3], *moved)
    want, want_lse = attention_varlen(query * 2, *rest[:2], *moved, **options)
    identical(out, want)
    identical(lse, want_lse)


def test_a_compiled_call_checks_its_boundaries():
    query, key, value, *_ = packed()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="eager")
    bad = cuts((10, 10))
    with pytest.raises(ValueError, match=r"cu_seqlens_q.*199.*\[0, 10, 20\]"):
        compiled(query, key, value, bad, bad, enable_gqa=True)


def test_a_gradient_inside_a_compiled_graph_is_refused():
    *tensors, cu_q, cu_k = packed((5, 30), (7, 20), Hq=2)
    tensors[1].requires_grad_()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="no gradient inside a compiled graph"):
        compiled(*tensors, cu_q, cu_k, recipe=EXACT)
    with torch.no_grad():
        out = compiled(*tensors, cu_q, cu_k, recipe=EXACT)
    assert not out.requires_grad
