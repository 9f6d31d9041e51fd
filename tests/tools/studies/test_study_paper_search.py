"""The paper's search beside ours: how it counts, what it returns, and the figures of both."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge import Recipe
from sparge.synthetic import structured_qkv
from sparge.values.fingerprint import Fingerprint
from sparge_tools.studies import paper_search
from sparge_tools.studies.paper_search import (
    THETAS,
    compare_searches,
    held_out_errors,
    search_as_the_paper,
    searches_table,
    within_share,
)
from sparge_tools.studies.profile_quality import (
    Quality,
    bench_traces,
    compare_quality,
    density_at,
    quality_table,
    summary,
)
from sparge_tools.tuning import Trace, captures_of, trace_model, tune
from sparge_tools.tuning.tracing import TracedInput, write
from tiny_llama import Letters, tiny_llama, token_inputs

LAYER = "a.attn"


def trace_of(path, seeds):
    inputs = []
    for seed in seeds:
        q, k, v = structured_qkv(Hq=2, Hk=1, L=384, D=32, seed=seed)
        (capture,) = captures_of(q, k, v, {"is_causal": True}, blocks=2)
        entry = write(path, f"input-{seed}/layer-000.safetensors", capture)
        inputs.append(TracedInput(str(seed), "", None, {LAYER: [entry]}))
    model = Fingerprint("Tiny", {"heads": 2}, "")
    return Trace(path, model, "tiny", 2, (LAYER,), tuple(inputs), {})


def test_a_bisection_is_counted_run_by_run():
    asked = []

    def run(x):
        asked.append(x)
        return (0.0, 0.7) if x >= 0.6 else (1.0, 0.9)

    x, sparsity = paper_search._bisect(run, (0.0, 1.0, 0.1, 0.001), 0.05)
    assert asked[:3] == [0.1, pytest.approx(0.55), pytest.approx(0.775)]
    assert x == pytest.approx(0.6, abs=0.001)
    assert sparsity in (0.7, 0.9)
    assert 8 <= len(asked) <= 11
    assert x not in asked  # as there: what is returned was never run


def test_half_of_the_similarities_switch_the_judge_off():
    assert len(THETAS) == 32
    assert (
        sum(paper_search._recipe(theta, 0.9, 5.0).min_similarity is None for theta in THETAS) == 16
    )


def test_records_are_chosen_by_bins_of_two():
    records = [(-1.0, 0.9, 5.0, 0.5), (-15 / 16, 0.8, 9.0, 0.5), (-14 / 16, 0.99, 1.0, 0.7)]
    assert paper_search._choose(records) == (-15 / 16, 0.9, 9.0)
    assert paper_search._choose([(0.0, 1.0, 1.0, 0.05)]) is None


def test_ours_takes_fewer_evaluations_and_is_not_denser(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_search, "THETAS", THETAS[14:20])
    trace = trace_of(tmp_path, [0, 1])
    bare = Recipe(local_blocks=0)  # as the other search; few blocks, so that a window would show
    document = compare_searches(trace, l1=0.08, l2=0.09, held_out=trace, heads=2, recipe=bare)
    assert document["evaluations_per_head"] * 5 < document["paper_evaluations_per_head"]
    assert document["sample_density"] <= document["paper_sample_density"] + 0.02
    for row in document["sample"]:
        assert row["error"] <= 0.09
    # What was tuned on is held.
    assert document["held_out"]["within"] == 1.0
    assert document["held_out"]["worst"] <= 0.09
    assert {row["head"] for row in document["sample"]} == {0, 1}
    table = searches_table(document)
    assert len(table.cells()) == 2
    assert "held-out text: 100.0% of 2 heads" in table.notes[-1]


def test_the_papers_answer_is_run_before_it_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_search, "THETAS", [-1.0, 0.25])
    captures = trace_of(tmp_path, [3]).captures(LAYER)
    found = search_as_the_paper(captures, 1, l1=0.08, l2=0.09)
    assert found.met == (found.error < 0.09)
    assert 2 * (8 + 9) <= found.evaluations <= 2 * (11 + 10)


def test_within_counts_heads_and_inputs(tmp_path):
    errors = {(0, 0): 0.05, (0, 1): 0.1, (1, 0): 0.116, (1, 1): 0.11, (2, 0): 0.2, (2, 1): 0.01}
    rows = [{"layer": "a", "head": h, "input": i, "error": e} for (h, i), e in errors.items()]
    assert within_share(rows, 0.1) == 1.0
    assert within_share(rows, 0.1, each_input=True) == pytest.approx(4 / 6)
    assert within_share(rows, 0.09) == pytest.approx(1 / 3)
    trace = trace_of(tmp_path, [0])
    document = compare_searches(trace, l1=0.9, l2=0.95, heads=0)
    assert document["sample"] == []
    profile = paper_search.Profile.from_dict(document["profile"])
    rows = held_out_errors(profile, trace)
    assert [(row["layer"], row["head"]) for row in rows] == [(LAYER, 0), (LAYER, 1)]
    assert torch.tensor([row["error"] for row in rows]).max() <= 0.95


def test_one_recipe_is_read_off_at_the_same_perplexity():
    curve = [Quality(f"mass {d}", d, p) for d, p in ((0.2, 14.0), (0.4, 12.0), (0.6, 10.0))]
    assert density_at(curve, 11.0) == pytest.approx(0.5)
    assert density_at(curve, 9.0) is None
    document = summary([*curve, Quality("dense", 1.0, 9.9), Quality("tuned profile", 0.3, 11.0)])
    assert document["same_perplexity"] == pytest.approx(0.5)
    assert document["saved"] == pytest.approx(0.4)
    assert "40% lower" in quality_table(document).notes[0]
    assert "does not reach" in quality_table(summary(curve)).notes[0]


def test_perplexities_of_a_model_and_its_attention_afterwards(tmp_path):
    pytest.importorskip("transformers")
    model, inputs = tiny_llama(), token_inputs(n=1, L=600)
    profile = tune(trace_model(model, inputs, tmp_path), l1=0.4)
    document = compare_quality(model, inputs, profile, masses=(0.2, 0.999))
    sparse, nearly, tuned, dense = document["rows"]
    assert sparse["density"] < 0.8 < nearly["density"] <= dense["density"] == 1.0
    assert nearly["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-2)
    assert 30 < dense["perplexity"] < 130  # of random weights over 64 words
    assert tuned["what"] == "tuned profile"
    assert tuned["density"] == pytest.approx(density_of_profile(model, profile, inputs[0]))
    assert model.config._attn_implementation == "sdpa"


def density_of_profile(model, profile, tokens):
    with sparge.accelerate(model, profile=profile, backend="cpu") as handle, torch.no_grad():
        model(tokens)
        report = handle.report()
    layers = report.layers
    assert all(layer.recipe == profile.recipe_for(layer.name) for layer in layers)
    assert min(layer.density for layer in layers) < 1.0
    return report.density


def test_tuning_and_checking_take_other_windows(tmp_path):
    pytest.importorskip("transformers")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    facts = {"name": "tiny", "length": 260, "inputs": 2, "held_out": 2, "texts": [str(text)]}
    mine, others, seconds = bench_traces(tiny_llama(), Letters(), tmp_path, **facts)
    assert {each.digest for each in mine.inputs}.isdisjoint(e.digest for e in others.inputs)
    assert len(mine.inputs) == len(others.inputs) == 2
    assert seconds > 0
