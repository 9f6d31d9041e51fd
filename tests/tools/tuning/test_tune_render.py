"""Tuning a pipeline to a bound on its renders, in Python and by `sparge tune --min-psnr`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("skimage")
pytest.importorskip("flip_evaluator")
pytest.importorskip("rich")

import tiny_pipelines
from cli_runs import complaint
from sparge import KeepMass, Profile, Schedule, accelerate
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge_tools.commands import tune_command
from sparge_tools.renders import compare_renders
from sparge_tools.tuning import TargetNotMet, schedule_of, tune_renders
from sparge_tools.tuning.render_target import Level, Renderer, Verified, _distinct, search_levels

OURS = "cpu" if native.why_missing() is None else "reference"
MASSES, SHARES, TARGET = (0.95, 0.8, 0.6), (0.0, 0.25, 0.5), 53.6


@pytest.fixture(scope="module")
def flux():
    torch.manual_seed(0)  # the encoders are made of the global seed
    tiny = tiny_pipelines.flux()
    call = {name: x for name, x in tiny.arguments.items() if name != "prompt"}
    return tiny.pipe, {**call, "num_inference_steps": 4}


def tuned(flux, **changes):
    pipe, call = flux
    asked = {"min_psnr": TARGET, "masses": MASSES, "dense_first": SHARES, "backend": OURS}
    return tune_renders(pipe, ["a cat"], **{**asked, "call": call, **changes})


@pytest.fixture(scope="module")
def profile(flux):
    return tuned(flux)


def walk(target):
    """The levels tried on a surface where both a lower mass and a shorter dense part cost dB."""

    def evaluate(mass, share):
        density = share + (1 - share) * mass
        return Level(mass, share, 20 + 20 * mass + 20 * share, density)

    return search_levels(evaluate, (0.9, 0.7, 0.5, 0.3), (0.0, 0.2, 0.4, 0.6), target)


def test_the_search_finds_the_sparsest_level_of_the_grid():
    for target in (27, 30, 33, 37, 45):
        tried = walk(target)
        met = [each.density for each in tried if each.psnr >= target]
        every = [
            share + (1 - share) * mass
            for mass in (0.9, 0.7, 0.5, 0.3)
            for share in (0.0, 0.2, 0.4, 0.6)
            if 20 + 20 * mass + 20 * share >= target
        ]
        assert min(met) == min(every)
        assert len(tried) < 8


def test_a_bound_that_nothing_meets_tries_the_densest_mass_only():
    assert {each.mass for each in walk(99)} == {0.9}


def test_a_dense_part_longer_than_the_best_density_is_not_tried():
    assert max(each.dense_first for each in walk(26)) < 0.6  # mass 0.3 alone is sparser


def test_shares_with_the_same_steps_are_tried_once():
    assert _distinct([0.0, 0.1, 0.2, 0.3], 5) == [0.0, 0.2, 0.3]
    assert _distinct([0.0, 0.1, 0.2, 0.3], None) == [0.0, 0.1, 0.2, 0.3]


def test_the_profile_promises_what_was_measured_on_held_out_seeds(profile, flux):
    held = profile.output["held_out"]
    assert (profile.output["measure"], profile.output["target"]) == ("psnr", TARGET)
    assert held["psnr"] - held["psnr_error"] >= TARGET
    assert held["psnr_worst"] <= held["psnr"]
    assert held["seeds"] == [1000, 1001, 1002]
    pipe, call = flux
    again = compare_renders(
        pipe,
        ["a cat"],
        seeds=held["seeds"],
        call=call,
        profile=profile,
        schedule=schedule_of(profile),
        backend=OURS,
    )
    # Torch's products may round otherwise in another process state, and pixels follow.
    assert again.mean("psnr") == pytest.approx(held["psnr"], abs=0.5)
    assert again.density == pytest.approx(held["density"], abs=0.01)
    assert again.density < 0.95


def test_it_is_the_sparsest_of_the_levels_that_met_the_bound(profile):
    levels = profile.output["calibrated_on"]["levels"]
    met = [each for each in levels if each["psnr"] >= TARGET]
    chosen = (profile.default.keep.mass, schedule_of(profile).dense_first)
    best = min(met, key=lambda each: each["density"])
    assert chosen == (best["mass"], best["dense_first"])
    assert min(each["psnr"] for each in levels) < TARGET  # the bound cut something off


def test_a_level_that_fails_on_held_out_seeds_gives_way_to_a_denser_one(flux, monkeypatch):
    real, tries = Renderer.verify, []

    def verify(self, profile, level, seeds):
        tries.append((level.density, profile.default.keep.mass))
        found = real(self, profile, level, seeds)
        worse = {**found.figures, "psnr": TARGET}  # and an error that is not 0
        return replace(found, figures=worse) if len(tries) == 1 else found

    monkeypatch.setattr(Renderer, "verify", verify)
    found = tuned(flux)
    assert len(tries) == 2
    assert tries == sorted(tries)
    assert found.default.keep.mass == tries[1][1]
    monkeypatch.setattr(
        Renderer, "verify", lambda *_: Verified({"psnr": 9, "psnr_error": 1}, {}, {})
    )
    with pytest.raises(TargetNotMet, match=r"held-out ones have 9.00 ± 1.00 dB, 9.00"):
        tuned(flux)


def test_heads_have_their_density_and_error(profile):
    for layer in profile.layers.values():
        assert len(layer.heads) == 2
        for head in layer.heads:
            assert head.mass == profile.default.keep.mass
            assert 0 < head.density < 1
            assert 0 < head.error < 1
    assert not profile.untuned


def test_the_file_is_read_back(profile, tmp_path):
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == profile
    assert schedule_of(again) == Schedule(dense_first=schedule_of(profile).dense_first)


def test_layers_that_were_not_chosen_stay_dense(flux):
    found = tuned(flux, layers=["transformer_blocks.*"], min_psnr=30.0)
    pipe, call = flux
    names = list(found.layers)
    assert found.recipe_for("single_transformer_blocks.0.attn") is None
    assert isinstance(found.recipe_for(names[0]).keep, KeepMass)
    with accelerate(pipe, profile=found, schedule=schedule_of(found), backend=OURS) as handle:
        pipe("a cat", **call, output_type="latent")
        ran = {layer.name: layer.sparse_calls for layer in handle.report().layers}
    assert {name for name, n in ran.items() if n} == {names[0]}


def test_a_bound_that_cannot_be_met_says_the_best(flux):
    with pytest.raises(TargetNotMet, match=r"99 dB cannot be met .* mass 0.95, dense_first 0.5"):
        tuned(flux, min_psnr=99.0)


def test_a_level_that_gains_nothing_is_no_result(flux):
    with pytest.raises(TargetNotMet, match="which gains nothing"):
        tuned(flux, masses=(0.999,), dense_first=(0.75,), min_psnr=20.0)


def test_a_state_file_resumes_also_with_another_bound(flux, tmp_path):
    first, second, state = [], [], tmp_path / "state.json"
    tuned(flux, state=state, done=first.append)
    tuned(flux, state=state, done=second.append, min_psnr=TARGET)
    assert len(first) > 4
    assert second == []
    tuned(flux, state=state, done=second.append, min_psnr=TARGET - 8)
    assert not {*second} & {*first}
    with pytest.raises(ValueError, match="another request: other order"):
        tuned(flux, state=state, order="row")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"min_psnr": 0}, "min_psnr must be a number of dB"),
        ({"min_psnr": True}, "min_psnr must be a number of dB"),
        ({"seeds": []}, "at least 1"),
        ({"held_out": [5]}, "at least 2"),
        ({"held_out": [0, 7]}, "is in both"),
        ({"masses": [1.0]}, "masses must be numbers between 0 and 1"),
        ({"dense_first": []}, "dense_first must be numbers"),
        ({"layers": ["nothing*"]}, "match no attention module"),
        ({"call": {"output_type": "latent"}}, "min_psnr needs pictures"),
    ],
)
def test_mistakes(changes, message, flux):
    with pytest.raises(ValueError, match=message):
        tuned(flux, **changes, done=pytest.fail)


@pytest.fixture
def argv(flux, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARGE_BACKEND", OURS)
    flux[0].save_pretrained("flux")
    monkeypatch.setattr(tune_command, "MASSES", MASSES)
    call = {name: x for name, x in flux[1].items() if name != "num_inference_steps"}
    made = ["tune", "--model", "flux", "--prompt", "a cat", "--call", json.dumps(call)]
    return [*made, "--steps", "4", "--dtype", "fp32", "-o", "p.json"]


def test_the_command_writes_a_profile_and_eval_reproduces_it(argv, capsys, tmp_path):
    given = [*argv, "--min-psnr", "40", "--dense-first", "0.25", "--held-out", "2"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    held = found["held_out"]
    assert found["format"] == "sparge.tuned.renders/1"
    assert held["psnr"] - held["psnr_error"] >= 40
    assert held["seeds"] == [2, 3]
    assert not (tmp_path / "p.json.state").exists()
    evaluate = ["eval", *argv[1:-2], "--profile", "p.json", "--seed", "2", "--seeds", "2"]
    assert main([*evaluate, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["figures"]["psnr"]["mean"] == pytest.approx(held["psnr"], abs=1e-9)
    assert again["settings"]["schedule"]["dense_first"] == 0.25  # of the profile
    assert main(["profile", "show", "p.json"]) == 0
    shown = capsys.readouterr().out
    assert "PSNR of renders at least 40 dB" in shown
    assert f"PSNR {held['psnr']:.2f}" in shown


def test_a_bound_that_is_not_met_writes_nothing_but_the_state(argv, capsys, tmp_path):
    assert main([*argv, "--min-psnr", "95", "--dense-first", "0", "--seeds", "1"]) == 1
    assert "95 dB cannot be met" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
    assert (tmp_path / "p.json.state").is_file()


def test_an_interrupt_writes_no_profile(argv, capsys, tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparge_tools.tuning.render_target.psnr", stopped)
    assert main([*argv, "--min-psnr", "40"]) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (["--min-psnr", "30", "--l1", "0.1"], "--min-psnr cannot be combined with --l1"),
        (["--min-psnr", "30", "--max-kl", "0.1"], "cannot be combined with --max-kl"),
        (["--min-psnr", "30", "--length", "64"], "cannot be combined with --length"),
        (["--min-psnr", "30", "--held-out", "1"], "--held-out must be at least 2"),
        (["--min-psnr", "300"], "min_psnr must be a number of dB"),
        (["--max-kl", "0.1"], "--max-kl is not for a diffusers pipeline"),
        (["--preset", "flux", "--text", "essays"], "--text is not for a diffusers pipeline"),
        ([], "--min-psnr 30"),
    ],
)
def test_options_that_do_not_go_together(more, message, argv, capsys, monkeypatch):
    monkeypatch.setattr(tune_command, "open_given", pytest.fail)
    assert message in complaint([*argv, *more], capsys)


def test_the_bound_is_for_pipelines(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["tune", "--model", "smollm2-135m-instruct", "-o", "p.json"]
    assert "of a diffusers pipeline" in complaint([*argv, "--min-psnr", "30"], capsys)
    words = "--prompt is not for a language model"
    assert words in complaint([*argv, "--l1", "0.1", "--prompt", "x"], capsys)
