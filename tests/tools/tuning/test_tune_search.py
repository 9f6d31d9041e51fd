"""The search against brute force, the second filter against the kernel, blocks against calls."""

from __future__ import annotations

import pytest
import torch

import sparge
from oracle import dense, make_qkv, relative_l1
from sparge import KeepMass, Recipe
from sparge.synthetic import structured_qkv
from sparge.values.profile import HeadSettings
from sparge_tools.tuning import layer
from sparge_tools.tuning.capture import backend_for, captures_of, exact_output, run_captured
from sparge_tools.tuning.layer import (
    CaptureScorer,
    LayerScorer,
    Runner,
    find_ladder,
    find_pv_ladder,
    kept_sets,
    tune_layer,
)

EXACT = Recipe(precision="exact", predictor="mean")


def whole(seed=0, L=512, Hq=2, Hk=1, is_causal=True):
    """A call, and its capture with every query block in it."""
    q, k, v = structured_qkv(Hq=Hq, Hk=Hk, L=L, D=32, seed=seed)
    (capture,) = captures_of(q, k, v, {"is_causal": is_causal}, blocks=100)
    return (q, k, v), capture


def layer_scorer(captures, recipe=EXACT):
    scorers = [CaptureScorer(c, recipe, backend_for(c, recipe)) for c in captures]
    return LayerScorer(scorers)


@pytest.mark.parametrize(
    ("Lq", "blocks", "chosen"),
    [
        (4096, 8, [3, 7, 11, 15, 19, 23, 27, 31]),
        (300, 8, [0, 1, 2]),
        (1, 8, [0]),
        (1100, 2, [3, 8]),
    ],
)
def test_blocks_are_spread_and_the_last_is_among_them(Lq, blocks, chosen):
    q = torch.zeros(1, 1, Lq, 8)
    (capture,) = captures_of(q, q, q, {}, blocks=blocks)
    assert capture.starts == tuple(128 * i for i in chosen)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(predictor="mean", min_similarity=0.2)])
def test_a_kept_block_is_the_block_of_the_whole_call(backend, is_causal, recipe):
    """Bit for bit: only then do errors of kept blocks say anything of the model."""
    q, k, v = structured_qkv(Hq=4, Hk=2, L=700, D=32, seed=3)
    recipe = Recipe(KeepMass(0.8), recipe.predictor, recipe.min_similarity, pv_skip=3.0)
    (capture,) = captures_of(q, k, v, {"is_causal": is_causal}, blocks=3)
    assert capture.starts == (128, 384, 640)
    with sparge.record() as runs:
        out = sparge.attention(
            q, k, v, is_causal=is_causal, enable_gqa=True, recipe=recipe, backend=backend
        )
    rows = torch.cat([torch.arange(s, min(s + 128, 700)) for s in capture.starts])
    truth = dense(q, k, v, is_causal=is_causal)[0][0, :, rows]
    exact = exact_output(capture)
    assert relative_l1(exact, truth) < 1e-5
    engine = backend_for(capture, recipe, backend)
    # Against the call's own output nothing is wrong, so nothing differs.
    assert (
        run_captured(capture, recipe, out[0][:, rows], backend=engine).error.tolist() == [0.0] * 4
    )
    measured = run_captured(capture, recipe, truth, backend=engine)
    wrong = (out[0][:, rows].double() - truth).abs().sum((1, 2)) / truth.abs().sum((1, 2))
    torch.testing.assert_close(measured.error, wrong)
    plan = sparge.make_plan(
        q, k, is_causal=is_causal, enable_gqa=True, recipe=recipe, backend=backend
    )
    assert measured.kept.tolist() == plan.counts[0, :, [1, 3, 5]].sum(-1).tolist()
    assert 0 < int(measured.pv_skips.sum()) < runs[0].pv_skips


def test_kept_blocks_stand_at_their_place_with_masks_and_a_cache():
    q, k, v = make_qkv(B=2, Hq=2, Hk=1, Lq=300, Lk=500, D=16)
    bias = torch.randn(2, 1, 300, 500).masked_fill(torch.rand(2, 1, 300, 500) < 0.3, -torch.inf)
    facts = {"is_causal": True, "causal_align": "bottom_right", "scale": 0.3, "attn_mask": bias}
    captures = captures_of(q, k, v, facts, blocks=2)
    truth, _ = dense(q, k, v, **facts)
    rows = [*range(128), *range(256, 300)]
    for b, capture in enumerate(captures):
        assert relative_l1(exact_output(capture), truth[b][:, rows]) < 1e-5
        everything = Recipe(sparge.KeepAll(), precision="exact")
        engine = backend_for(capture, everything)
        error = run_captured(capture, everything, truth[b][:, rows], backend=engine).error
        assert error.max() < 1e-5
        alone = capture.head(1)
        assert relative_l1(exact_output(alone)[0], truth[b, 1][rows]) < 1e-5


@pytest.mark.parametrize("predictor", ["mean", "blend"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_sets_are_those_of_the_planner(predictor, is_causal):
    (q, k, _), capture = whole(L=700, is_causal=is_causal)
    recipe = Recipe(precision="exact", predictor=predictor)
    similarities = [None, 0.15, 0.3] if predictor == "mean" else [None]
    masses = [0.3, 0.7, 0.9, 0.97]
    scored, differ, blocks = layer_scorer([capture], recipe), 0, 0
    for h in range(2):
        made = kept_sets(scored.head(h)[0], predictor, similarities, torch.tensor(masses).double())
        for i, similarity in enumerate(similarities):
            for j, mass in enumerate(masses):
                own = Recipe(KeepMass(mass), predictor, similarity, precision="exact")
                plan = sparge.make_plan(
                    q, k, is_causal=is_causal, enable_gqa=True, recipe=own, backend="reference"
                )
                differ += int((plan.to_mask()[0, h] != made[:, i, j]).sum())
                blocks += made[:, i, j].numel()
    assert differ <= blocks // 1000  # where a mass lies on the edge, rounding decides


@pytest.mark.parametrize("l1", [0.03, 0.1])
@pytest.mark.parametrize("predictor", ["mean", "blend"])
def test_the_sparsest_of_the_whole_grid_is_found(monkeypatch, predictor, l1):
    """Every setting, planned by the reference and measured in fp64 token by token."""
    monkeypatch.setattr(layer, "MASSES", (0.3, 0.6, 0.75, 0.85, 0.9, 0.94, 0.98))
    monkeypatch.setattr(layer, "SIMILARITIES", (None, 0.1, 0.3))
    monkeypatch.setattr(layer, "AT_ONCE", 4)
    calls = [whole(seed=seed) for seed in (1, 2)]
    scored = layer_scorer([capture for _, capture in calls])
    similarities = layer.SIMILARITIES if predictor == "mean" else (None,)
    truths = [dense(*tensors, is_causal=True)[0] for tensors, _ in calls]
    tried = [[], []]
    for similarity in similarities:
        for mass in layer.MASSES:
            recipe = Recipe(KeepMass(mass), predictor, similarity, precision="exact")
            errors, kept, allowed = [], 0, 0
            for ((q, k, v), _), truth in zip(calls, truths, strict=True):
                plan = sparge.make_plan(q, k, is_causal=True, enable_gqa=True, recipe=recipe)
                out, _ = dense(q, k, v, is_causal=True, kept=plan.to_mask())
                wrong = (out - truth).abs().sum((0, 2, 3)) / truth.abs().sum((0, 2, 3))
                errors.append(wrong)
                kept, allowed = kept + plan.counts.sum((0, 2)), allowed + plan.allowed.sum((0, 2))
            for h in range(2):
                density = float(kept[h] / allowed[h])
                tried[h].append((float(torch.stack(errors)[:, h].max()), density))
    for h in range(2):
        ladder = find_ladder(scored.head(h), predictor, l1)
        best = min(density for error, density in tried[h] if error <= l1)
        assert ladder[0].density == pytest.approx(best)
        assert ladder[0].error <= l1
        assert any(ladder[0].error == pytest.approx(error, rel=1e-3) for error, _ in tried[h])
        errors = [setting.error for setting in ladder]
        densities = [setting.density for setting in ladder]
        assert errors == sorted(errors, reverse=True)
        assert densities == sorted(densities)


def test_an_impossible_bound_has_no_setting():
    _, capture = whole(L=256)
    assert find_ladder(layer_scorer([capture]).head(0), "mean", 1e-7) == []


@pytest.mark.parametrize("thin", [1, 2])
def test_the_emulated_filter_skips_what_the_kernel_skips(thin):
    """Counts and errors, at every threshold, for a kept set of the planner's."""
    _, capture = whole(L=700, seed=5)
    scorer = CaptureScorer(capture, EXACT, backend_for(capture, EXACT))
    runner = Runner([scorer], EXACT, "mean", backend_for(capture, EXACT))
    setting = HeadSettings(mass=0.98)
    for h in range(2):
        scored = [scorer.score(h, thin)]
        kept = kept_sets(scored[0], "mean", [None], torch.tensor([0.98]).double())
        seen = set()
        for pv_skip in (0.25, 1.0, 3.0, 8.0):
            both = [HeadSettings(mass=0.98, pv_skip=pv_skip)] * 2
            ran = runner.run(both)[h]
            skips = groups = 0
            for block, own in zip(scored[0].blocks, kept[:, 0, 0], strict=True):
                skip = layer.pv_skips(block.only(own).maxima, [pv_skip])
                skips, groups = skips + int(skip.sum()), groups + skip[0].numel()
            if thin == 1:
                assert skips / groups == pytest.approx(ran.pv_skipped)
            seen.add(skips)
        assert len(seen) > 2, "the example shows nothing"
        ladder = find_pv_ladder(scored, "mean", setting, l2=0.2)
        assert ladder
        for found in ladder if thin == 1 else ():
            ran = runner.run([found] * 2)[h]
            assert found.error == pytest.approx(ran.error, rel=1e-3)
            assert found.pv_skipped == pytest.approx(ran.pv_skipped)


def test_int8_errors_are_foreseen():
    """Scores are those of the 8-bit codes, so what is found holds at the first run."""
    q, k, v = structured_qkv(Hq=2, Hk=1, L=1024, D=64, seed=5)
    (capture,) = captures_of(q, k, v, {"is_causal": True}, blocks=4)
    base = Recipe(precision="int8")
    engine = backend_for(capture, base)
    scorer = CaptureScorer(capture, base, engine)
    ladders = [find_ladder([scorer.score(h)], "blend", 0.05) for h in range(2)]
    runner = Runner([scorer], base, "blend", engine)
    for h, ran in enumerate(runner.run([ladder[0] for ladder in ladders])):
        assert ran.error == pytest.approx(ladders[h][0].error, rel=0.02)
        assert ran.density == pytest.approx(ladders[h][0].density, abs=0.02)


@pytest.mark.parametrize("thin", [1, 3, 8])
def test_a_layer_too_large_to_hold_is_thinned_and_still_tuned(monkeypatch, thin):
    """Fewer rows are scored, every block by some, and heads again when they are needed again."""
    _, capture = whole(L=386)
    size = 4 * 386 * 386 * 32 // 64
    monkeypatch.setattr(layer, "MOST_BYTES", -(-size // thin))
    scored = layer_scorer([capture])
    assert scored.thin == thin
    rows = [len(block.truth) for block in scored.head(0)[0].blocks]
    assert rows == [sum(r // 16 % thin == i % thin for r in range(128)) for i in range(3)] + [2]
    scored.head(0)
    assert scored.scored == (1 if thin == 1 else 2)
    tuned = tune_layer([capture], l1=0.1, l2=0.12, base=EXACT)
    assert tuned.settings.density < 1.0
    assert all(head.error <= 0.12 for head in tuned.settings.heads)
