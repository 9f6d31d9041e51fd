"""What `handle.report()` says is what ran: densities of the plans, errors by fp64, every reason."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

import oracle
import sparge
import tiny_models as tiny
from sparge import DEFAULT, KeepFraction, KeepMass, Recipe
from sparge.api.accuracy import ROWS, spread_rows
from tiny_models import ids_of, padded, same

SPARSE = Recipe(KeepFraction((0.3, 0.5, 0.7, 0.9)), precision="int8", pv_skip=2.0, local_blocks=0)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tapped(model, run, **options):
    """What each layer's calls were, and the handle."""
    calls = {}
    with sparge.accelerate(model, SPARSE, backend="cpu", **options) as handle:
        for layer in handle.report().layers:
            calls[layer.name] = []
            handle.tap(layer.name, lambda *call, to=calls[layer.name]: to.append(call))
        run(model)
    return calls, handle


def two_prefills(model):
    model(ids_of(2, 500))
    ids, mask = padded(ids_of(2, 300, seed=7), "left", (0, 70))
    model(ids, attention_mask=mask)


def test_density_of_each_head_is_that_of_the_plans():
    model = tiny.llama()
    calls, handle = tapped(model, two_prefills)
    for layer in handle.report().layers:
        kept, allowed = torch.zeros(4), torch.zeros(4)
        for query, key, _, facts in calls[layer.name]:
            plan = sparge.make_plan(query, key, **facts, recipe=SPARSE, backend="cpu")
            kept, allowed = kept + plan.counts.sum((0, 2)), allowed + plan.allowed.sum((0, 2))
        assert layer.calls == layer.sparse_calls == len(calls[layer.name]) == 2
        assert layer.density_by_head == tuple((kept.double() / allowed.double()).tolist())
        assert layer.density == pytest.approx((kept.sum() / allowed.sum()).item())
        assert layer.density < 0.95
        assert len(set(layer.density_by_head)) == 4


def test_pv_skipped_is_that_of_the_runs():
    model = tiny.llama()
    with sparge.accelerate(model, SPARSE, backend="cpu") as handle, sparge.record() as runs:
        model(ids_of(1, 500))
    for layer, run in zip(handle.report().layers, runs, strict=True):
        assert layer.pv_skipped == run.pv_skips / run.pv_groups
        assert layer.seconds == run.seconds["total"] > 0
    assert any(layer.pv_skipped > 0 for layer in handle.report().layers)


def test_the_measured_error_is_that_of_fp64_on_the_same_rows():
    model = tiny.llama()
    calls, handle = tapped(model, two_prefills, measure_error=True)
    report = handle.report()
    for layer in report.layers:
        each = []
        for query, key, value, facts in calls[layer.name]:
            out = sparge.attention(query, key, value, **facts, recipe=SPARSE, backend="cpu")
            facts = {k: v for k, v in facts.items() if k != "enable_gqa"}
            exact, _ = oracle.dense(query, key, value, **facts)
            rows = spread_rows(query.shape[2], ROWS)
            wrong = (out.double() - exact)[:, :, rows].abs().sum((2, 3))
            each.append((wrong / exact[:, :, rows].abs().sum((2, 3))).mean(0))
        want = torch.stack(each).mean(0)
        got = torch.tensor(layer.error_by_head, dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
        assert layer.error == pytest.approx(want.mean().item(), rel=1e-3)
    assert report.error == pytest.approx(sum(x.error for x in report.layers) / 2)


def test_the_error_is_of_the_calls_that_ran_sparse():
    """Dense and own attention have none to speak of, and would hide what the others have."""
    model, ids = tiny.llama(), ids_of(1, 500)
    with sparge.accelerate(model, SPARSE, backend="cpu", measure_error=True) as handle:
        model(ids)
        alone = handle.report()
        model(ids[:, :1])
        assert handle.report().error == alone.error
    with sparge.accelerate(model, measure_error=True) as handle:
        model(ids[:, :20])
        report = handle.report()
    assert report.layers[0].ran == {"dense": 1}
    assert report.error is None


def test_exact_everything_has_no_error():
    model = tiny.gpt_oss()  # sinks come after what is measured
    with same(model, measure_error=True) as handle:
        model(ids_of(1, 150))
        assert 0.0 <= handle.report().error < 1e-6
        assert handle.report().density == 1.0


def test_every_reason_is_counted():
    model, ids = tiny.llama(), ids_of(1, 140)
    with same(model, layers=["*.0.*"]) as handle:
        model(ids)
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        with torch.enable_grad():
            model(ids)
        report = handle.report()
    first, second = report.layers
    (gradient,) = [why for why in first.fallbacks if "gradient" in why]
    decode = "one query (decode): dense attention is faster"
    assert first.fallbacks == {decode: 2, gradient: 1}
    assert first.sparse_calls == 2
    assert second.fallbacks == {"not among `layers`": 5}
    assert report.fallbacks == {decode: 2, gradient: 1, "not among `layers`": 5}
    assert first.calls == second.calls == 5


def test_it_prints_and_is_plain_json():
    model = tiny.llama()
    with sparge.accelerate(model, SPARSE, backend="cpu", measure_error=True) as handle:
        empty = str(handle.report())
        model(ids_of(1, 300))
        model(ids_of(1, 1))
        report = handle.report()
    assert "nothing" in empty
    text = str(report)
    for layer in report.layers:
        assert layer.name in text
    assert "own attention 1x" in text
    assert "not sparse 2x: one query" in text
    assert f"density {report.density:.3f}, error {report.error:.4f}" in text
    assert len({len(line.rstrip()) > 0 for line in text.splitlines()}) == 1
    data = json.loads(json.dumps(report.to_dict()))
    assert data["format"] == "sparge.report/3"
    assert data["density"] == report.density
    assert data["error"] == report.error
    assert [layer["name"] for layer in data["layers"]] == [x.name for x in report.layers]
    assert data["layers"][0]["density_by_head"] == list(report.layers[0].density_by_head)
    assert Recipe.from_dict(data["recipe"]) == SPARSE


def test_density_is_over_all_calls_and_sparse_density_over_the_sparse_ones():
    """One prefill of 500, one decode step over 501 keys, and a layer that is left out."""
    model, ids = tiny.llama(), ids_of(1, 500)
    with sparge.accelerate(model, SPARSE, backend="cpu", layers=["*.0.*"]) as handle:
        with sparge.record() as runs:
            cache = model(ids).past_key_values
        model(ids[:, :1], past_key_values=cache)
        report = handle.report()
    (run,) = runs
    # 500 causal rows: 2 + 4 + 6 + 8 key blocks of 64 in 4 heads; then 501 keys are 8 blocks.
    prefill, decode = 4 * (2 + 4 + 6 + 8), 4 * 8
    assert run.allowed == prefill
    first, second = report.layers
    assert (first.kept, first.allowed) == (run.kept + decode, prefill + decode)
    assert (second.kept, second.allowed) == (prefill + decode, prefill + decode)
    assert first.sparse_density == run.density < first.density < second.density == 1.0
    assert second.sparse_density == 1.0
    assert report.sparse_density == run.density
    assert report.density == (run.kept + 2 * decode + prefill) / (2 * (prefill + decode))
    assert report.to_dict()["sparse_density"] == report.sparse_density


def test_a_call_that_auto_sends_to_dense_keeps_all_its_blocks():
    with sparge.accelerate(tiny.llama()) as handle:
        handle.model(ids_of(2, 20))
        report = handle.report()
    assert report.layers[0].ran == {"dense": 1}
    assert (report.layers[0].kept, report.layers[0].allowed) == (8, 8)
    assert report.density == report.sparse_density == 1.0


@pytest.mark.parametrize("source, told", [("estimate", True), ("measured", False), ("", False)])
def test_choices_by_the_built_in_estimate_are_told(source, told):
    """What the record says of the costs reaches the report."""
    from sparge.models import Site

    with sparge.record() as runs:
        sparge.attention(*torch.randn(3, 1, 1, 70, 16).unbind(0), backend="cpu")
    site = Site("layer", Recipe())
    object.__setattr__(runs[0], "cost_source", source)
    site.note(runs[0])
    report = sparge.models.Report((site.report(),), None, {})
    assert ("1 calls were routed by the built-in cost estimate" in str(report)) == told
    assert report.to_dict()["layers"][0]["estimated"] == int(told)


def test_a_part_that_is_left_alone_is_named():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            from transformers import BloomConfig, BloomModel

            self.reads = tiny.llama()
            self.other = BloomModel(BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2))

    two = Two()
    with same(two) as handle:
        two.reads(ids_of())
        report = handle.report()
    assert list(report.left_alone) == ["other"]
    assert "BloomModel" in report.left_alone["other"]
    assert "left alone: other" in str(report)
    assert all(layer.sparse_calls == 1 for layer in report.layers)


def test_two_threads_count_into_one_report():
    model, ids = tiny.llama(), ids_of(1, 140)
    want = model(ids).logits
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(10):
                if (model(ids).logits - want).abs().max() > 2e-6:
                    wrong.append(1)
                model(ids[:, :1])

    with same(model, measure_error=True) as handle:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        layers = handle.report().layers
    assert not wrong
    for layer in layers:
        assert layer.calls == 40
        assert layer.sparse_calls == 20
        assert sum(layer.fallbacks.values()) == 20
        assert layer.error < 1e-6


def test_taps_are_named_and_end():
    model, seen = tiny.llama(), []
    with same(model) as handle:
        with pytest.raises(ValueError, match=r"no layer 'nowhere' here; there are model\.l"):
            handle.tap("nowhere", print)
        handle.tap("model.layers.1.self_attn", lambda *call: seen.append(call))
        model(ids_of())
        handle.tap("model.layers.1.self_attn", None)
        model(ids_of())
    ((query, key, value, facts),) = seen
    assert query.shape == (2, 4, 70, 8)
    assert key.shape == value.shape == (2, 2, 70, 8)
    assert facts["is_causal"]
    assert facts["enable_gqa"]


def test_a_default_recipe_is_reported_as_it_is():
    with sparge.accelerate(tiny.llama()) as handle:
        assert handle.report().recipe == DEFAULT
        assert handle.recipe == DEFAULT
    with sparge.accelerate(tiny.llama(), Recipe(KeepMass(0.9))) as handle:
        assert handle.recipe.keep == KeepMass(0.9)


def test_a_report_says_when_threads_had_to_wait():
    """Other programs kept them from running; a quiet machine says nothing of it."""
    _, handle = tapped(tiny.llama(), two_prefills)
    report = handle.report()
    assert 0.0 <= report.waited <= report.seconds
    assert report.to_dict()["waited"] == report.waited
    for share, says in ((0.05, False), (0.4, True)):
        layers = (replace(x, waited=share * x.seconds) for x in report.layers)
        assert ("waiting for threads" in str(replace(report, layers=tuple(layers)))) == says
