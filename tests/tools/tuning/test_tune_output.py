"""Tuning to a target of the model's output: measured, allocated, verified on held-out inputs."""

from __future__ import annotations

import json
import math

import pytest
import torch

import sparge
from sparge import KeepMass, Profile, Recipe
from sparge.values.recipe import DEFAULT
from sparge_tools.evaluate.logits import compare, outputs_of
from sparge_tools.tuning import TargetNotMet, levels, output_target, sensitivity, tune_output
from sparge_tools.tuning.levels import (
    MASSES,
    HeadCurves,
    Option,
    TunedModel,
    attention_layers,
    levels_of,
)
from sparge_tools.tuning.output_measure import LanguageMeasure, _standard_error
from sparge_tools.tuning.output_target import Checked, scale_to_target
from sparge_tools.tuning.sensitivity import Prefix, Sensitivity
from tiny_llama import sharp_llama, token_inputs

pytest.importorskip("transformers")
L, TARGET = 640, 0.03


@pytest.fixture
def model():
    return sharp_llama()


@pytest.fixture
def texts():
    return token_inputs(n=1, L=L), token_inputs(n=2, L=L, seed=5)


_known: dict[str, bytes] = {}


@pytest.fixture
def state(model, texts, tmp_path):
    """A state file with the measurements of `texts`, made once."""
    path = tmp_path / "state.json"
    if not _known:
        tune_output(model, *texts, max_kl=TARGET, state=path)
        _known["state"] = path.read_bytes()
    path.write_bytes(_known["state"])
    return path


def measured(model, profile, windows, **others):
    """Mean KL over all positions of some windows, and the density."""
    kl, density = [], []
    for tokens in windows:
        dense = outputs_of(model, tokens, split=True)
        with sparge.accelerate(model, profile=profile, backend="cpu", **others) as handle:
            sparse = outputs_of(model, tokens, split=True)
            density.append(handle.report().density)
        kl.append(compare(dense, sparse, tokens).kl)
    return float(torch.cat(kl).mean()), sum(density) / len(density)


def test_the_promise_is_what_the_profile_does_on_held_out_text(model, texts, state, tmp_path):
    told_about = {"name": "tiny", "about": {"a": 1}}
    profile = tune_output(model, *texts, max_kl=TARGET, state=state, **told_about)
    told = profile.output["held_out"]
    assert told["kl"] + told["kl_error"] <= TARGET
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again.to_dict() == profile.to_dict()
    assert again.to_dict()["format"] == "sparge.profile/3"
    again.check(model)
    kl, density = measured(model, again, texts[1])
    assert kl == pytest.approx(told["kl"], rel=1e-5)
    assert density == pytest.approx(told["density"], rel=1e-6)
    assert density < 0.95
    heads = [head for layer in profile.layers.values() for head in layer.heads]
    assert any(head.error > 0 for head in heads)
    assert profile.calibration["a"] == 1
    assert profile.output["target"] == TARGET
    assert len(told["digests"]) == 2
    assert not {*told["digests"]} & {*profile.output["calibrated_on"]}
    assert set(profile.output["sensitivity"]) == set(profile.layers)


def test_a_larger_target_keeps_fewer_blocks_and_a_state_serves_both(model, texts, tmp_path):
    state, steps = tmp_path / "state.json", []
    small = tune_output(model, *texts, max_kl=TARGET / 6, state=state, done=steps.append)
    measured_before = sum(step.startswith("measured") for step in steps)
    assert measured_before == len(small.layers)

    def no_more(*args):
        pytest.fail("a layer was measured again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "_change_of", no_more)
        patch.setattr(levels, "_score", no_more)
        large = tune_output(model, *texts, max_kl=TARGET * 2, state=state)
    assert large.output["held_out"]["density"] < small.output["held_out"]["density"]
    assert large.output["sensitivity"].keys() == small.output["sensitivity"].keys()


def test_perplexity_is_verified_itself(model, texts, state):
    # Of random text the loss may fall as well as rise; the bound has a standard error to spare.
    profile = tune_output(model, *texts, max_perplexity=0.05, state=state)
    told = profile.output["held_out"]
    assert told["relative"] + told["relative_error"] <= 0.05
    ratio = told["perplexity"] / told["dense_perplexity"] - 1
    assert told["relative"] == pytest.approx(ratio, abs=1e-9)


def test_a_target_that_nothing_meets_says_its_figures(model, texts, state):
    with pytest.raises(TargetNotMet, match=r"1e-07 cannot be met .*'int8' alone gives .* ± "):
        tune_output(model, *texts, max_kl=1e-7, state=state)


def test_an_interrupted_run_resumes(model, texts, state, tmp_path, monkeypatch):
    whole = tune_output(model, *texts, max_kl=TARGET, state=state)
    state = tmp_path / "interrupted.json"
    original, ran = sensitivity._change_of, []

    def interrupted(*args):
        ran.append(args[4])
        if len(ran) == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(sensitivity, "_change_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune_output(model, *texts, max_kl=TARGET, state=state)
    assert model.config._attn_implementation == "sdpa"
    assert all("forward" not in vars(block) for block in model.model.layers)
    resumed = tune_output(model, *texts, max_kl=TARGET, state=state)
    assert len(ran) == 1 + sum(len(of["errors"]) for of in whole.output["sensitivity"].values())
    assert resumed.output == whole.output
    assert resumed.layers == whole.layers


def test_the_state_of_another_request_is_refused(model, texts, state):
    inputs, held_out = texts
    half = Recipe(precision="half")
    with pytest.raises(ValueError, match=r"cannot be resumed: .*other recipe; remove it"):
        tune_output(model, inputs, held_out, max_kl=TARGET, state=state, recipe=half)
    with pytest.raises(ValueError, match="other inputs"):
        tune_output(model, token_inputs(n=1, L=L, seed=9), held_out, max_kl=TARGET, state=state)
    with pytest.raises(ValueError, match="other model"):
        tune_output(sharp_llama(seed=3), inputs, held_out, max_kl=TARGET, state=state)
    state.write_text(state.read_text()[:100])
    with pytest.raises(ValueError, match="cannot be resumed: it must be valid JSON"):
        tune_output(model, inputs, held_out, max_kl=TARGET, state=state)


@pytest.mark.parametrize(
    "given, why",
    [
        ({}, "max_kl or max_perplexity, one of them"),
        ({"max_kl": 0.1, "max_perplexity": 0.1}, "one of them"),
        ({"max_kl": 0.0}, r"max_kl must be .* got 0\.0"),
        ({"max_perplexity": -0.1}, "max_perplexity must be"),
        ({"max_kl": True}, "max_kl must be"),
        ({"max_kl": 0.1, "held_out": 1}, "held_out at least 2"),
        ({"max_kl": 0.1, "inputs": 0}, "inputs needs at least 1"),
    ],
)
def test_mistakes_are_found_before_any_work(model, texts, given, why, no_work):
    inputs, held_out = texts
    inputs, held_out = inputs[: given.pop("inputs", 9)], held_out[: given.pop("held_out", 9)]
    with pytest.raises(ValueError, match=why):
        tune_output(model, inputs, held_out, **given)


def test_held_out_text_is_other_text(model, texts):
    inputs, held_out = texts
    with pytest.raises(ValueError, match="one is in both"):
        tune_output(model, inputs, [*held_out, inputs[0].clone()], max_kl=0.1)
    with pytest.raises(ValueError, match=r"token ids \[1, L\], one text each; got \[2, 640\]"):
        tune_output(model, [torch.cat(held_out)], held_out, max_kl=0.1)


def test_the_rest_of_the_recipe_is_kept(model, texts):
    recipe = Recipe(KeepMass(0.5), predictor="mean", min_similarity=0.1, pv_skip=8.0, sink_blocks=2)
    profile = tune_output(model, *texts, max_kl=0.2, recipe=recipe)
    sparse = [layer for layer in profile.layers.values() if layer.recipe() is not None]
    assert sparse
    for layer in sparse:
        found = layer.recipe()
        assert (found.predictor, found.sink_blocks, found.precision) == ("mean", 2, "int8")
        assert {*found.min_similarity} <= {0.1, None}
        assert set(found.pv_skip) == {8.0}
        assert found.local_blocks == 1  # the window of a causal call, as a number


def test_skipping_blocks_changes_nothing_but_the_time(model, texts, state, monkeypatch):
    """The changes are those of whole runs."""
    quick = tune_output(model, *texts, max_kl=TARGET, state=state).output["sensitivity"]
    monkeypatch.setattr(sensitivity, "Prefix", lambda model, names: Prefix(model, []))
    slow = tune_output(model, *texts, max_kl=TARGET).output["sensitivity"]
    for name in slow:
        assert quick[name]["changes"] == pytest.approx(slow[name]["changes"], rel=1e-3)


def test_blocks_that_need_more_than_their_input_are_not_skipped(model, texts):
    """Here a block reads what the one before it left behind."""
    first, last = model.model.layers[0], model.model.layers[2]
    plain_first, plain_last = first.forward, last.forward
    left = []

    def leave(hidden, *args, **rest):
        left.append(hidden)
        return plain_first(hidden, *args, **rest)

    first.forward = leave
    last.forward = lambda hidden, *a, **k: plain_last(hidden + 0.1 * left.pop(), *a, **k)
    measure, prefix = LanguageMeasure(model), Prefix(model, attention_layers(model))
    tuned = TunedModel(model, measure, attention_layers(model), DEFAULT)
    assert prefix.block_of
    sensitivity._dense_run(tuned, prefix, texts[0][0])
    assert prefix.block_of == {}
    assert first.forward is leave


def test_attention_outside_of_one_list_of_blocks():
    assert Prefix(torch.nn.Sequential(torch.nn.Linear(2, 2)), ["0"]).blocks == []
    two = torch.nn.ModuleDict({n: torch.nn.ModuleList([torch.nn.Linear(2, 2)]) for n in "ab"})
    assert Prefix(two, ["a.0", "b.0"]).block_of == {}
    assert Prefix(two, ["a.0"]).block_of == {"a.0": 0}


def test_levels_spend_the_error_where_it_saves_most():
    """Head 0 has a half that it does not need; head 1 errs at once. Both see 100 blocks."""
    n = len(MASSES)
    wrong = [[0.0 if i else 4.0 for i in range(n)], [(1.0 - i / (n - 1)) ** 2 for i in range(n)]]
    kept = [[50.0 + 50.0 * (i == n - 1) for i in range(n)], [i * 100.0 / (n - 1) for i in range(n)]]
    curves = HeadCurves(wrong, kept, [1.0, 1.0], [100.0, 100.0])
    levels = levels_of(curves, errors=(0.05, math.inf))
    assert levels[0].masses == (1.0, 1.0)
    assert 0.03 < levels[1].error <= 0.05
    assert levels[1].masses[0] < 0.9 < levels[1].masses[1] < 1.0
    assert 0.5 < levels[1].density < 0.75
    assert levels[-1].density <= min(level.density for level in levels)


def test_between_anchors_the_change_is_linear_in_the_squared_error():
    of = Sensitivity((0.0, 0.1, 0.3), (0.001, 0.002, 0.010))
    assert of.change_at(0.0) == 0.0
    assert of.change_at(0.1) == pytest.approx(0.001)
    assert of.change_at(math.sqrt(0.05)) == pytest.approx(0.005)
    assert of.change_at(0.5) > of.change_at(0.3) == pytest.approx(0.009)
    # Noise below nothing counts as nothing, and the change never falls with the error.
    assert Sensitivity((0.0, 0.1, 0.3), (0.002, 0.001, 0.004)).change_at(0.1) == 0.0
    assert Sensitivity((0.0,), (0.002,)).change_at(0.1) == 0.0


class Pretended:
    """A model whose measured figure is a function of the sum of changes."""

    def __init__(self, figure):
        self.options = {i: [Option(100 - k, k * k * 1e-5) for k in range(100)] for i in range(5)}
        self.figure, self.checks = figure, 0

    def check(self, chosen):
        self.checks += 1
        change = sum(self.options[i][k].change for i, k in chosen.items())
        kept = sum(self.options[i][k].kept for i, k in chosen.items())
        return Checked(chosen, {}, {"value": self.figure(change)}, kept / 500)

    def scale(self, target, first):
        value = lambda found: found.figures["value"]  # noqa: E731
        return scale_to_target(self.options, self.check, value, target=target, first=first)


@pytest.mark.parametrize(
    "figure",
    [lambda x: x, lambda x: 3 * x, lambda x: 0.2 * x, lambda x: x**1.5, lambda x: 0.004 + 0.5 * x],
)
def test_an_allocation_is_scaled_until_the_target_is_met(figure):
    pretended = Pretended(figure)
    found = pretended.scale(target=0.01, first=0.01)
    assert found.figures["value"] <= 0.01
    assert found.figures["value"] >= 0.009, "and used up"
    assert pretended.checks <= output_target.CHECKS


def test_what_cannot_be_met_or_used_up():
    assert Pretended(lambda x: 0.02 + x).scale(target=0.01, first=0.01) is None
    assert Pretended(lambda x: 1e-9 * x).scale(target=0.01, first=0.01).density < 0.02


def test_standard_errors_are_over_parts():
    parts = [{"n": 4, "kl": 4.0}, {"n": 4, "kl": 8.0}, {"n": 4, "kl": 12.0}]
    # Means 1, 2, 3: a standard deviation of 1, over the root of 3.
    assert _standard_error(parts, "kl") == pytest.approx(1 / math.sqrt(3))
    assert _standard_error(parts[:1], "kl") == math.inf


def test_files_with_an_output_target_are_checked(model, texts, state, tmp_path):
    path = tmp_path / "p.json"
    tune_output(model, *texts, max_kl=TARGET, state=state).save(path)
    good = json.loads(path.read_text())
    for change, why in (
        ({"target": 0}, "output.target must be greater than 0"),
        ({"measure": 3}, "output.measure must be a string"),
        ({"held_out": None}, "output.held_out must be a JSON object"),
        ({"bands": [{}]}, r"output.bands\[0\] has no held_out"),
    ):
        path.write_text(json.dumps({**good, "output": {**good["output"], **change}}))
        with pytest.raises(ValueError, match=why):
            Profile.load(path)
    path.write_text(json.dumps({**good, "format": "sparge.profile/2"}))
    with pytest.raises(ValueError, match="unknown field 'output'"):
        Profile.load(path)
