"""Properties over inputs nobody picked: Hypothesis draws shapes, masks, recipes and numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from interpreted import examples
from oracle import (
    allowed_blocks,
    clustered_qkv,
    dense,
    make_qkv,
    pairs,
    predicted_mean,
    predicted_rows,
)
from sparge import KeepAll, KeepFraction, KeepMass, Recipe

lengths = st.integers(1, 280)
aligns = st.sampled_from(["top_left", "bottom_right"])


@st.composite
def calls(draw):
    """Shapes, masks and diagonals of one call, with its tensors."""
    Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Lq, Lk = draw(lengths), draw(lengths)
    q, k, v = make_qkv(
        B=draw(st.integers(1, 2)), Hq=Hk * group, Hk=Hk, Lq=Lq, Lk=Lk,
        D=draw(st.integers(1, 33)), Dv=draw(st.integers(1, 33)),
        seed=draw(st.integers(0, 1000)), sharp=draw(st.sampled_from([0.1, 1.0, 4.0])),
    )  # fmt: skip
    options = {"is_causal": draw(st.booleans()), "causal_align": draw(aligns)}
    kind = draw(st.sampled_from(["none", "none", "bool", "bias"]))
    if kind != "none":
        g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        shape = [draw(st.sampled_from([1, n])) for n in (*q.shape[:3], Lk)]
        mask = torch.rand(shape, generator=g) < draw(st.sampled_from([0.02, 0.5, 0.98]))
        if kind == "bias":
            mask = torch.randn(shape, generator=g).masked_fill(~mask, -math.inf)
        options["attn_mask"] = mask
    return q, k, v, options


@settings(max_examples=examples(60), deadline=None)
@given(call=calls())
def test_keep_all_exact_is_dense(backend, call):
    q, k, v, options = call
    out, lse = sparge.attention(
        q, k, v, enable_gqa=q.shape[1] != k.shape[1], backend=backend, return_lse=True,
        recipe=Recipe(KeepAll(), precision="exact"), **options,
    )  # fmt: skip
    truth, truth_lse = dense(q, k, v, **options)
    assert (out - truth).abs().max() < 1e-5 * max(1.0, v.abs().max().item())
    nothing = truth_lse == -math.inf
    assert torch.equal(lse == -math.inf, nothing)
    assert torch.allclose(lse[~nothing].double(), truth_lse[~nothing], atol=1e-4, rtol=1e-5)


@pytest.mark.rule("3.5", "3.12")
@settings(max_examples=examples(40), deadline=None)
@given(
    call=calls(),
    mass=st.floats(0.01, 1.0),
    predictor=st.sampled_from(["mean", "rows", "blend"]),
)
def test_the_kept_set_is_the_smallest_that_reaches_the_mass(backend, call, mass, predictor):
    q, k, _, options = call
    gqa = q.shape[1] != k.shape[1]
    recipe = Recipe(KeepMass(mass), predictor=predictor, precision="exact", sink_blocks=0)
    plan = sparge.make_plan(q, k, enable_gqa=gqa, recipe=recipe, backend=backend, **options)
    plan.validate()
    allowed, bias = pairs((*q.shape[:3], k.shape[2]), **options)
    may = allowed_blocks(allowed)
    p = {
        "mean": lambda: predicted_mean(q, k, allowed),
        "rows": lambda: predicted_rows(q, k, allowed, bias),
        "blend": lambda: (predicted_mean(q, k, allowed) + predicted_rows(q, k, allowed, bias)) / 2,
    }[predictor]()
    kept = plan.to_mask()
    assert not (kept & ~may).any()
    whole, has = p.sum(-1), (p * kept).sum(-1)
    assert (has >= mass * whole - 1e-5).all(), "the mass is not reached"
    if not options["is_causal"]:  # nothing forced: no smaller set would do
        said = whole > 0
        smallest = torch.where(kept, p, math.inf).amin(-1)
        assert (has - smallest <= mass * whole + 1e-5)[said].all(), "a smaller set would do"
        largest_left = torch.where(may & ~kept, p, -math.inf).amax(-1)
        assert (smallest >= largest_left - 1e-5)[said].all(), "not the largest first"


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 1000),
    amounts=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=4).map(sorted),
    keep=st.sampled_from([KeepMass, KeepFraction]),
    predictor=st.sampled_from(["mean", "rows", "blend"]),
    is_causal=st.booleans(),
)
def test_more_never_keeps_fewer(backend, seed, amounts, keep, predictor, is_causal):
    q, k, _ = clustered_qkv(Hq=2, L=400, D=12, seed=seed, noise=1.0)
    masks = [
        sparge.make_plan(
            q, k, is_causal=is_causal, backend=backend,
            recipe=Recipe(keep(amount), predictor=predictor, precision="exact"),
        ).to_mask()
        for amount in amounts
    ]  # fmt: skip
    for less, more in pairwise(masks):
        assert not (less & ~more).any()


@settings(max_examples=examples(25), deadline=None)
@given(
    call=calls(),
    cut=st.floats(0.0, 1.0),
    precision=st.sampled_from(["exact", "half"]),
)
def test_merge_of_two_halves_is_the_whole(backend, call, cut, precision):
    """Keys cut at a block boundary; each half attends with its own mask, and merge joins them."""
    q, k, v, options = call
    Lk, n_k = k.shape[2], -(-k.shape[2] // 64)
    if n_k < 2:
        return
    at = 64 * max(1, min(n_k - 1, round(cut * n_k)))
    allowed, bias = pairs((*q.shape[:3], Lk), **options)
    bias = bias.masked_fill(~allowed, -math.inf).float()
    recipe = Recipe(KeepAll(), precision=precision)
    common = {"enable_gqa": q.shape[1] != k.shape[1], "recipe": recipe, "backend": backend}

    def part(keys):
        mask = bias[..., keys]
        return sparge.attention(
            q, k[:, :, keys], v[:, :, keys], attn_mask=mask, return_lse=True, **common
        )

    out, lse = sparge.merge(*part(slice(0, at)), *part(slice(at, Lk)))
    truth, truth_lse = dense(q, k, v, **options)
    tolerance = 1e-5 if precision == "exact" else 0.05
    assert (out - truth).abs().max() < tolerance * max(1.0, v.abs().max().item())
    nothing = truth_lse == -math.inf
    assert torch.equal(lse == -math.inf, nothing)
    if precision == "exact":
        assert torch.allclose(lse[~nothing].double(), truth_lse[~nothing], atol=1e-4, rtol=1e-5)


@settings(max_examples=examples(40), deadline=None)
@given(
    call=calls(),
    precision=st.sampled_from(["int8", "int8-fast", "half", "exact"]),
    predictor=st.sampled_from(["mean", "rows", "blend"]),
    keep=st.sampled_from([KeepAll(), KeepMass(0.7), KeepFraction(0.4)]),
    pv_skip=st.sampled_from([None, 3.0]),
    forced=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_any_call_gives_numbers_of_the_right_kind(
    backend, call, precision, predictor, keep, pv_skip, forced
):
    """Whatever is asked: every output is written, finite, and within the range of the values."""
    q, k, v, options = call
    predictor = "blend" if isinstance(keep, KeepAll) else predictor  # KeepAll predicts nothing
    recipe = Recipe(
        keep, predictor=predictor, precision=precision, pv_skip=pv_skip,
        sink_blocks=forced[0], local_blocks=forced[1],
    )  # fmt: skip
    out, lse = sparge.attention(
        q, k, v, enable_gqa=q.shape[1] != k.shape[1], recipe=recipe, backend=backend,
        return_lse=True, **options,
    )  # fmt: skip
    assert torch.isfinite(out).all()
    assert not lse.isnan().any()
    # An average of values lies between them, up to rounding.
    assert out.abs().max() <= v.abs().max() * 1.02
    allowed, _ = pairs((*q.shape[:3], k.shape[2]), **options)
    assert (lse[~allowed.any(-1)] == -math.inf).all()
