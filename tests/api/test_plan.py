"""The first filter, rule by rule, through the public `make_plan` of every backend."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from oracle import (
    allowed_blocks,
    clustered_qkv,
    dense,
    fewest,
    make_qkv,
    pairs,
    predicted_mean,
    predicted_rows,
    relative_l1,
    similarities,
    smoothed,
)
from sparge import BlockPlan, KeepAll, KeepFraction, KeepMass, Recipe

BARE = {"sink_blocks": 0, "local_blocks": 0, "precision": "exact"}


@pytest.mark.rule("3.5")
@pytest.mark.parametrize("predictor", ["mean", "rows", "blend"])
def test_the_whole_mass_is_every_block(backend, predictor):
    """Also of blocks so far below that fp32 gives them nothing."""
    query, key, _ = clustered_qkv(L=640)
    recipe = Recipe(KeepMass(1.0), predictor=predictor)
    plan = sparge.make_plan(query * 20, key, is_causal=True, recipe=recipe, backend=backend)
    assert plan.density == 1.0
    less = Recipe(KeepMass(0.9999), predictor=predictor)
    assert (
        sparge.make_plan(query * 20, key, is_causal=True, recipe=less, backend=backend).density < 1
    )


def plan_mask(q, k, recipe, backend, **options):
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    return sparge.make_plan(q, k, recipe=recipe, backend=backend, **options).to_mask()


def smallest_sets(p, may, mass):
    """The oracle's kept sets as a bool map."""
    kept = torch.zeros_like(may)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in p.shape[:3])).tolist():
        row = tuple(index)
        if may[row].any():
            for j in fewest(p[row].tolist(), may[row].tolist(), mass):
                kept[(*row, j)] = True
    return kept


@pytest.mark.rule("3.1", "3.5", "1.3")
@pytest.mark.parametrize("scale", [None, 0.02, 1.0])
def test_mean_keeps_what_the_formula_says(backend, scale):
    """Also: the caller's scale, the smoothed keys and the log term of a short tail block."""
    q, k, _ = clustered_qkv(Hq=4, Hk=2, L=640 + 10, noise=0.5)
    k += 2.0
    allowed, _ = pairs((1, 4, 650, 650))
    p = predicted_mean(q, k, allowed, scale=scale)
    for mass in (0.3, 0.9, 0.99):
        recipe = Recipe(KeepMass(mass), predictor="mean", **BARE)
        found = plan_mask(q, k, recipe, backend, scale=scale)
        assert torch.equal(found, smallest_sets(p, allowed_blocks(allowed), mass))


@pytest.mark.rule("3.1")
def test_a_short_tail_block_counts_for_what_it_holds(backend):
    """All keys equal: a tail of 4 keys holds 4/64 of a whole block's mass, and loses to it."""
    q, k, _ = make_qkv(Hq=1, Lq=128, Lk=132, D=8)
    k[:] = 1.0
    recipe = Recipe(KeepFraction(0.5), predictor="mean", **BARE)
    assert plan_mask(q, k, recipe, backend)[0, 0, 0].tolist() == [True, True, False]
    # Two blocks of the three hold 128/132 = 97 % of the mass.
    recipe = Recipe(KeepMass(0.96), predictor="mean", **BARE)
    assert plan_mask(q, k, recipe, backend)[0, 0, 0].tolist() == [True, True, False]
    recipe = Recipe(KeepMass(0.98), predictor="mean", **BARE)
    assert plan_mask(q, k, recipe, backend)[0, 0, 0].tolist() == [True, True, True]


@pytest.mark.rule("3.14", "3.15")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sample_rows", [1, 4, 7])
def test_rows_keep_what_the_sampled_rows_say(backend, sample_rows, is_causal):
    q, k, _ = clustered_qkv(Hq=4, Hk=2, L=450, noise=0.5)
    allowed, bias = pairs((1, 4, 450, 450), is_causal=is_causal)
    p = predicted_rows(q, k, allowed, bias, r=sample_rows)
    recipe = Recipe(KeepMass(0.8), predictor="rows", sample_rows=sample_rows, **BARE)
    found = plan_mask(q, k, recipe, backend, is_causal=is_causal)
    expected = smallest_sets(p, allowed_blocks(allowed), 0.8)
    if is_causal:
        expected |= diagonal(4, 8, 450)
    assert torch.equal(found, expected)


@pytest.mark.rule("3.15")
def test_rows_are_scored_in_the_run_s_own_precision(backend):
    """One channel so large that int8 loses the others: the quantized rows see another map."""
    q, k, _ = clustered_qkv(Hq=1, L=640, noise=0.3, seed=2)
    q[..., 0], k[..., 0] = 0.0, torch.linspace(-3000, 3000, 640)
    maps = {
        precision: plan_mask(
            q,
            k,
            Recipe(KeepMass(0.9), predictor="rows", sink_blocks=0, precision=precision),
            backend,
        )
        for precision in ("exact", "int8")
    }
    assert not torch.equal(maps["exact"], maps["int8"])


@pytest.mark.rule("3.16")
def test_blend_averages_the_two(backend):
    q, k, _ = clustered_qkv(Hq=4, Hk=2, L=640, noise=0.8)
    allowed, bias = pairs((1, 4, 640, 640))
    p = (predicted_mean(q, k, allowed) + predicted_rows(q, k, allowed, bias)) / 2
    recipe = Recipe(KeepMass(0.9), predictor="blend", **BARE)
    expected = smallest_sets(p, allowed_blocks(allowed), 0.9)
    assert torch.equal(plan_mask(q, k, recipe, backend), expected)


@pytest.mark.rule("3.2")
def test_each_query_head_has_its_own_map(backend):
    q, k, _ = clustered_qkv(Hq=4, Hk=1, L=640)
    recipe = Recipe(KeepMass(0.8), predictor="mean", **BARE)
    found = plan_mask(q, k, recipe, backend)
    for h in range(4):
        alone = plan_mask(q[:, h : h + 1], k, recipe, backend)
        assert torch.equal(found[:, h : h + 1], alone)
    assert not torch.equal(found[:, 0], found[:, 1])


@pytest.mark.rule("3.3", "6.3")
def test_excluded_blocks_are_never_kept_nor_counted(backend):
    q, k, _ = make_qkv(Hq=2, Lq=300, Lk=300, D=16)
    plan = sparge.make_plan(q, k, is_causal=True, recipe=Recipe(KeepAll()), backend=backend)
    allowed, _ = pairs((1, 2, 300, 300), is_causal=True)
    may = allowed_blocks(allowed)
    assert torch.equal(plan.to_mask(), may)
    assert torch.equal(plan.allowed, may.sum(-1).int())
    assert plan.density == 1.0


@pytest.mark.rule("3.4", "3.8", "3.9")
def test_the_similarity_judge(backend):
    q, k, _ = clustered_qkv(Hq=2, L=640, noise=0.2)
    g = torch.Generator().manual_seed(9)
    k[:, 0, 128:192] = torch.randn(64, 32, generator=g) * 2  # a key block that is not one thing
    q[:, 1, 256:384] = torch.randn(128, 32, generator=g) * 2  # and a query block
    s_q, s_k = similarities(q, 128), similarities(smoothed(k), 64)
    least = 0.2
    assert (s_k[0] < least).nonzero().tolist() == [[0, 2]]
    assert (s_q[0] < least).nonzero().tolist() == [[1, 2]]
    allowed, _ = pairs((1, 2, 640, 640))
    p = predicted_mean(q, k, allowed, min_similarity=least)
    expected = smallest_sets(p, (p > 0), 0.7)
    expected[:, 0, :, 2] = True
    expected[:, 1, 2, :] = True
    recipe = Recipe(KeepMass(0.7), predictor="mean", min_similarity=least, **BARE)
    assert torch.equal(plan_mask(q, k, recipe, backend), expected)
    per_head = Recipe(KeepMass(0.7), predictor="mean", min_similarity=(least, -1.0), **BARE)
    found = plan_mask(q, k, per_head, backend)
    assert torch.equal(found[:, 0], expected[:, 0])
    assert not found[:, 1, 2].all()


@pytest.mark.rule("3.6")
def test_ties_go_to_the_smaller_index(backend):
    q, k, _ = make_qkv(Hq=1, Lq=256, Lk=640, D=8)
    k[:] = 1.0  # all blocks predict the same
    for predictor in ("mean", "rows", "blend"):
        half = Recipe(KeepMass(0.5), predictor=predictor, **BARE)
        found = plan_mask(q, k, half, backend)
        assert found[0, 0].tolist() == [[True] * 5 + [False] * 5] * 2
        fraction = Recipe(KeepFraction(0.3), predictor=predictor, **BARE)
        found = plan_mask(q, k, fraction, backend)
        assert found[0, 0].tolist() == [[True] * 3 + [False] * 7] * 2


@pytest.mark.rule("3.7")
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.7, 1.0])
def test_fraction_counts_only_what_a_row_may_attend(backend, fraction):
    q, k, _ = clustered_qkv(Hq=2, L=1280)
    recipe = Recipe(KeepFraction(fraction), predictor="mean", **BARE)
    full = sparge.make_plan(q, k, recipe=recipe, backend=backend)
    assert (full.counts == math.ceil(fraction * 20 - 1e-9)).all()
    causal = sparge.make_plan(q, k, is_causal=True, recipe=recipe, backend=backend)
    needed = torch.ceil(fraction * causal.allowed.double() - 1e-9)
    assert causal.allowed[0, 0].tolist() == [2 * (i + 1) for i in range(10)]
    # The diagonal is kept besides, where it is not among the largest.
    assert (causal.counts >= needed).all()
    assert (causal.counts <= needed + 2).all()


@pytest.mark.rule("3.7")
def test_per_head_fractions(backend):
    q, k, _ = clustered_qkv(Hq=4, Hk=2, L=640)
    recipe = Recipe(KeepFraction((0.1, 0.2, 0.5, 1.0)), predictor="mean", **BARE)
    counts = sparge.make_plan(q, k, enable_gqa=True, recipe=recipe, backend=backend).counts
    assert counts[0].tolist() == [[1] * 5, [2] * 5, [5] * 5, [10] * 5]


def diagonal(n_q, n_k, L, offset=0):
    """Blocks that hold the position of any of the query block's rows."""
    found = torch.zeros(n_q, n_k, dtype=torch.bool)
    for i in range(L):
        if 0 <= i + offset < n_k * 64:
            found[i // 128, min((i + offset) // 64, n_k - 1)] = True
    return found


@pytest.mark.rule("3.10", "3.20")
@pytest.mark.parametrize(
    ("Lq", "Lk", "align"),
    [(640, 640, "top_left"), (300, 640, "top_left"), (300, 650, "bottom_right"),
     (640, 300, "top_left"), (200, 77, "bottom_right")],
)  # fmt: skip
def test_the_diagonal_is_kept(backend, Lq, Lk, align):
    q, k, _ = make_qkv(Hq=2, Lq=Lq, Lk=Lk, D=16, sharp=4.0)
    recipe = Recipe(KeepMass(0.01), predictor="mean", **BARE)
    found = plan_mask(q, k, recipe, backend, is_causal=True, causal_align=align)
    offset = Lk - Lq if align == "bottom_right" else 0
    on = torch.zeros(found.shape[2:], dtype=torch.bool)
    for i in range(Lq):
        if 0 <= i + offset < Lk:
            on[i // 128, (i + offset) // 64] = True
    assert found[:, :, on].all()
    allowed, _ = pairs((1, 2, Lq, Lk), is_causal=True, causal_align=align)
    assert not (found & ~allowed_blocks(allowed)).any()


@pytest.mark.rule("3.11")
def test_sink_and_local_blocks(backend):
    q, k, _ = make_qkv(Hq=2, Lq=768, D=16, sharp=4.0)
    little = {"keep": KeepMass(0.01), "predictor": "mean", "precision": "exact"}
    bare = plan_mask(q, k, Recipe(**little, sink_blocks=0), backend)
    sink = plan_mask(q, k, Recipe(**little, sink_blocks=2), backend)
    expected = bare.clone()
    expected[..., :2] = True
    assert torch.equal(sink, expected)
    local = plan_mask(q, k, Recipe(**little, sink_blocks=0, local_blocks=1), backend)
    window = torch.zeros(6, 12, dtype=torch.bool)
    for i in range(6):
        window[i, max(0, 2 * i - 1) : 2 * i + 3] = True
    assert torch.equal(local, bare | window)
    by_default = [
        plan_mask(q, k, Recipe(**little, **named), backend, is_causal=True)
        for named in ({}, {"local_blocks": 1}, {"local_blocks": 0})
    ]
    assert torch.equal(by_default[0], by_default[1])
    assert not torch.equal(by_default[0], by_default[2])


@pytest.mark.rule("3.11")
def test_protected_tokens_are_kept_as_keys_and_as_queries(backend):
    q, k, _ = make_qkv(Hq=2, Lq=768, D=16, sharp=4.0)
    little = {"keep": KeepMass(0.01), "predictor": "mean", "sink_blocks": 0, "precision": "exact"}
    bare = plan_mask(q, k, Recipe(**little), backend)
    found = plan_mask(q, k, Recipe(**little, protect=((100, 130), (-1, None))), backend)
    expected = bare.clone()
    expected[..., [1, 2, 11]] = True
    expected[:, :, [0, 1, 5]] = True
    assert torch.equal(found, expected)


@pytest.mark.rule("3.11")
def test_protected_queries_stand_at_key_positions(backend):
    """Chunked prefill: the last 128 of 640 tokens ask; token 600 is query 88 of the chunk."""
    q, k, _ = make_qkv(Hq=1, Lq=128, Lk=640, D=16, sharp=4.0)
    little = {"keep": KeepMass(0.01), "predictor": "mean", "sink_blocks": 0, "precision": "exact"}
    chunk = {"is_causal": True, "causal_align": "bottom_right"}
    found = plan_mask(q, k, Recipe(**little, protect=((600, 601),)), backend, **chunk)
    assert found.all()
    before = plan_mask(q, k, Recipe(**little, protect=((0, 64),)), backend, **chunk)
    assert before[..., 0].all()
    assert not before.all()


@pytest.mark.rule("3.12")
@pytest.mark.parametrize("predictor", ["mean", "rows", "blend"])
def test_every_row_keeps_at_least_one_block(backend, predictor):
    q, k, _ = make_qkv(Hq=2, Lq=400, Lk=300, D=16, sharp=8.0)
    g = torch.Generator().manual_seed(4)
    mask = torch.rand(1, 2, 400, 300, generator=g) < 0.002
    recipe = Recipe(KeepMass(1e-9), predictor=predictor, **BARE)
    plan = sparge.make_plan(q, k, attn_mask=mask, recipe=recipe, backend=backend)
    assert (plan.counts[plan.allowed > 0] >= 1).all()
    assert (plan.counts[plan.allowed == 0] == 0).all()


@pytest.mark.rule("3.13")
def test_a_block_mask_is_obeyed_exactly(backend):
    q, k, v = make_qkv(Hq=2, Lq=300, D=16)
    g = torch.Generator().manual_seed(5)
    blocks = torch.rand(3, 5, generator=g) < 0.5
    blocks[2] = False
    recipe = Recipe(sink_blocks=3, local_blocks=2, protect=((0, 300),), precision="exact")
    for is_causal in (False, True):
        plan = sparge.make_plan(
            q, k, block_mask=blocks, is_causal=is_causal, recipe=recipe, backend=backend
        )
        allowed, _ = pairs((1, 2, 300, 300), is_causal=is_causal)
        assert torch.equal(plan.to_mask(), blocks & allowed_blocks(allowed))
        out = sparge.attention(
            q, k, v, block_mask=blocks, is_causal=is_causal, recipe=recipe, backend=backend
        )
        truth, _ = dense(q, k, v, is_causal=is_causal, kept=plan.to_mask())
        assert relative_l1(out, truth) < 1e-5


@pytest.mark.rule("3.13")
@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 1, 1), (1, 2, 3, 5), (2, 1, 3, 5)])
def test_a_block_mask_broadcasts(backend, shape):
    q, k, _ = make_qkv(B=2, Hq=2, Lq=300, D=8)
    blocks = torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.6
    plan = sparge.make_plan(q, k, block_mask=blocks, backend=backend)
    assert torch.equal(plan.to_mask(), blocks.expand(2, 2, 3, 5))


@pytest.mark.rule("3.18")
def test_a_plan_is_counts_and_ascending_lists(backend):
    q, k, v = clustered_qkv(Hq=2, L=640)
    recipe = Recipe(KeepMass(0.7), precision="exact")
    plan = sparge.make_plan(q, k, is_causal=True, recipe=recipe, backend=backend)
    plan.validate()
    assert plan.counts.dtype == plan.indices.dtype == torch.int32
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in plan.counts.shape)).tolist():
        n = plan.counts[b, h, i]
        kept = plan.indices[b, h, i, :n].tolist()
        assert kept == sorted(set(kept)) == plan.to_mask()[b, h, i].nonzero().flatten().tolist()
        assert (plan.indices[b, h, i, n:] == -1).all()
    # handed back in, and from the other half: the same result as the whole
    whole = sparge.attention(q, k, v, is_causal=True, recipe=recipe, backend=backend)
    out, _ = sparge.attend(q, k, v, plan, recipe=recipe, backend=backend)
    again = sparge.attention(
        q, k, v, is_causal=True, block_mask=plan.to_mask(), recipe=recipe, backend=backend
    )
    assert torch.equal(whole, out)
    assert torch.equal(whole, again)
    assert BlockPlan.from_mask(plan.to_mask(), Lq=640, Lk=640, is_causal=True).equal(plan)


@pytest.mark.rule("3.22")
@pytest.mark.parametrize("predictor", ["mean", "rows", "blend"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_prediction_that_is_not_finite_keeps_everything(backend, predictor, bad):
    q, k, _ = clustered_qkv(Hq=2, L=640)
    q[0, 0, 127, 3] = bad  # the last row of a block is always sampled
    recipe = Recipe(KeepMass(0.3), predictor=predictor, **BARE)
    found = plan_mask(q, k, recipe, backend)
    assert found[0, 0, 0].all()
    assert not found[0, 1, 0].all()
    assert not found[0, 0, 1].all()
    if predictor == "rows" and bad == math.inf:
        return  # a row may score an infinite key -inf, which is a finite mass: none
    k[0, 1, 5, 0] = bad
    assert plan_mask(q, k, recipe, backend)[0, 1].all()


@pytest.mark.rule("3.22")
def test_rows_that_say_nothing_keep_everything(backend):
    """No sampled row may attend anything: there is nothing to drop blocks by."""
    q, k, _ = make_qkv(Hq=1, Lq=128, Lk=300, D=8)
    mask = torch.ones(128, 300, dtype=torch.bool)
    mask[[31, 63, 95, 127]] = False
    recipe = Recipe(KeepMass(0.1), predictor="rows", **BARE)
    assert plan_mask(q, k, recipe, backend, attn_mask=mask).all()
