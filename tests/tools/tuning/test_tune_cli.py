"""`sparge trace`, `sparge tune` and `sparge profile`, from the command line's side."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import sparge.cli
from sparge.cli import main
from sparge.values.profile import HeadSettings, Profile
from sparge_tools import tuning, zoo
from sparge_tools.tuning import Trace, trace_model
from tiny_llama import Letters, tiny_llama, token_inputs

pytest.importorskip("transformers")
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    for name in ("trace", "tune", "profile"):
        monkeypatch.setitem(sparge.cli.COMMANDS, name, name)
    monkeypatch.setattr(zoo, "load", lambda name, dtype=None: (tiny_llama(), Letters()))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture
def traced(tmp_path):
    trace_model(tiny_llama(), token_inputs(n=2, L=300), tmp_path / "trace", name="tiny")
    return tmp_path / "trace"


def test_trace_writes_a_trace_of_windows(text, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--model", "tiny", "--text", str(text), "--length", "300", "--inputs", "3"]
    assert main(["trace", *arguments, "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layers"] == 2
    trace = Trace.open(out)
    # A sixteenth into the text, then behind its middle and its first quarter: 9000 letters.
    assert [each.about for each in trace.inputs] == [
        f"{text} from token {round((9000 - 300) * place)}" for place in (1 / 16, 9 / 16, 5 / 16)
    ]
    assert document["bytes"] == trace.bytes
    assert trace.calibration == {"texts": [str(text)], "length": 300}


def test_tune_from_a_trace(traced, tmp_path, capsys):
    out = tmp_path / "p.json"
    command = ["tune", "--trace", str(traced), "--preset", "llama", "-o", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "model.layers.1.self_attn" in shown
    assert "evaluations of attention per head" in shown
    profile = Profile.load(out)
    assert profile.bounds == (0.08, 0.09)
    profile.check(tiny_llama())
    assert Trace.open(traced), "the user's trace stays"


def test_tune_from_a_model_leaves_nothing_but_the_profile(text, tmp_path):
    out = tmp_path / "out" / "p.json"
    out.parent.mkdir()
    arguments = ["--model", "tiny", "--text", str(text), "--length", "300", "--inputs", "1"]
    assert main(["tune", *arguments, "--l1", "0.2", "-o", str(out), "--json"]) == 0
    assert list(out.parent.iterdir()) == [out]
    assert Profile.load(out).bounds == (0.2, None)


def test_interrupted_tuning_writes_what_there_is(traced, tmp_path, capsys, monkeypatch):
    from sparge_tools.tuning import tuner

    original, n = tuner.tune_layer, 0

    def once(*args, **rest):
        nonlocal n
        n += 1
        if n == 2:
            raise KeyboardInterrupt
        return original(*args, **rest)

    monkeypatch.setattr(tuner, "tune_layer", once)
    out = tmp_path / "p.json"
    command = ["tune", "--trace", str(traced), "--l1", "0.1", "-o", str(out)]
    assert main(command) == 130
    assert "1 of 2 layers have the default recipe" in capsys.readouterr().err
    assert Profile.load(out).untuned == [LAYERS[1]]
    assert main(command) == 0
    assert n == 3  # the first layer was not tuned again
    assert Profile.load(out).untuned == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--trace", "x"], "an error bound is needed"),
        (["--trace", "x", "--l1", "0.1", "--preset", "llama"], "cannot be combined"),
        (["--trace", "x", "--l1", "0.1", "--l2", "0.05"], "at least l1"),
        (["--trace", "x", "--l1", "0.1"], "'x' holds no trace"),
        (["--l1", "0.1"], "--model NAME|DIR is needed"),
        (["--model", "tiny", "--l1", "0.1", "--inputs", "40"], "at most 16 inputs"),
    ],
)
def test_mistakes_are_said(arguments, why, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments, "-o", "p.json"]) == 2
    assert why in capsys.readouterr().err


def test_profiles_are_shown_and_compared(traced, tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    profile = tuning.tune(traced, l1=0.1)
    profile.save(first)
    layer = profile.layers[LAYERS[0]]
    heads = (HeadSettings(mass=0.5, density=0.25, error=0.3), *layer.heads[1:])
    changed = {**profile.layers, LAYERS[0]: replace(layer, heads=heads)}
    replace(profile, layers=changed).save(second)
    assert main(["profile", "show", str(first), "--heads"]) == 0
    shown = capsys.readouterr().out
    assert LAYERS[0] in shown
    assert "for LlamaForCausalLM: layers 2, heads 4" in shown
    assert main(["profile", "show", str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(first.read_text())
    assert main(["profile", "diff", str(first), str(first)]) == 0
    assert "the profiles keep the same" in capsys.readouterr().out
    assert main(["profile", "diff", str(first), str(second), "--json"]) == 1
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert difference["where"] == f"{LAYERS[0]} head 0"
    assert difference["second"] == "mass 0.5: density 0.250, error 0.3000"
    assert main(["profile", "diff", str(first), str(second)]) == 1


def test_a_profile_is_checked_against_a_model(traced, tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.json"
    tuning.tune(traced, l1=0.1).save(path)
    assert main(["profile", "check", str(path)]) == 0
    assert main(["profile", "check", str(path), "--model", "tiny"]) == 0
    assert "it was tuned for tiny" in capsys.readouterr().out
    monkeypatch.setattr(zoo, "load", lambda name: (tiny_llama(seed=9), None))
    assert main(["profile", "check", str(path), "--model", "other"]) == 1
    assert "does not fit other: its weights differ" in capsys.readouterr().out
    path.write_text(path.read_text()[:50])
    assert main(["profile", "check", str(path)]) == 2
    assert "is not a usable profile: it is damaged" in capsys.readouterr().err
