"""`sparge tune --max-kl` and `--max-perplexity`, from the command line's side."""

from __future__ import annotations

import json

import pytest

from sparge.cli import main
from sparge.values.profile import Profile
from sparge_tools import zoo
from sparge_tools.tuning import sensitivity
from tiny_llama import Letters, sharp_llama

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda name, dtype=None: (sharp_llama().to(dtype), Letters()))


@pytest.fixture
def command(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + (i * i * 7 + i // 3) % 90) for i in range(20000)))
    (tmp_path / "out").mkdir()
    sizes = ["--length", "640", "--inputs", "1", "--held-out", "2"]
    out = str(tmp_path / "out" / "p.json")
    return ["tune", "--model", "tiny", "--text", str(text), *sizes, "-o", out]


def test_the_target_is_met_and_told(command, tmp_path, capsys):
    assert main([*command, "--max-kl", "0.2"]) == 0
    shown = capsys.readouterr()
    assert "tiny: KL at most 0.2, density" in shown.out
    assert "held out: KL 0." in shown.out
    assert "perplexity" in shown.out
    assert "measured model.layers.2.self_attn" in shown.err
    path = tmp_path / "out" / "p.json"
    assert list(path.parent.iterdir()) == [path], "the state is gone"
    profile = Profile.load(path)
    held = profile.output["held_out"]
    assert held["kl"] + held["kl_error"] <= 0.2
    assert held["tokens"] == 2 * 639
    assert profile.calibration["dtype"] == "float32"
    assert len(profile.calibration["held_out"]) == 2
    assert main(["profile", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "how far each layer alone moves the output" in shown
    assert f"held out: KL {held['kl']:.5f} ± {held['kl_error']:.5f}" in shown
    assert main(["profile", "check", str(path)]) == 0
    assert "held out: KL" in capsys.readouterr().out
    other = tmp_path / "b.json"
    data = json.loads(path.read_text())
    data["output"]["target"] = 0.3
    other.write_text(json.dumps(data))
    assert main(["profile", "diff", str(path), str(other), "--json"]) == 1
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert difference["first"] == {"measure": "kl", "target": 0.2}


def test_perplexity_as_json(command, capsys):
    assert main([*command, "--max-perplexity", "+20%", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measure"] == "perplexity"
    assert document["target"] == pytest.approx(0.2)
    assert document["held_out"]["relative"] <= 0.2
    assert "sensitivity" not in document


def test_nothing_is_written_when_the_target_cannot_be_met(command, tmp_path, capsys):
    assert main([*command, "--max-kl", "1e-7"]) == 1
    said = capsys.readouterr().err
    assert "the target 1e-07 cannot be met" in said
    assert "no profile was written" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["p.json.state"]
    # The measurements serve another target.
    assert main([*command, "--max-kl", "0.2"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["p.json"]


def test_an_interrupted_command_resumes(command, tmp_path, capsys, monkeypatch):
    original, ran = sensitivity._change_of, []

    def interrupted(*args):
        ran.append(args)
        if len(ran) == 4:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(sensitivity, "_change_of", interrupted)
    state = tmp_path / "mine.json"
    command += ["--max-kl", "0.2", "--state", str(state)]
    assert main(command) == 130
    assert f"the same command resumes from {state}" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    assert main(command) == 0
    found = Profile.load(tmp_path / "out" / "p.json").output["sensitivity"]
    assert len(ran) == 1 + sum(len(layer["errors"]) for layer in found.values())
    assert state.is_file(), "a state that was asked for stays"
    assert main([*command, "--layers", "*.0.self_attn"]) == 2
    assert "it is of another request: other layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--max-kl", "0.1", "--max-perplexity", "1%"], "--max-kl cannot be combined with --max-p"),
        (["--max-kl", "0.1", "--l1", "0.1"], "--max-kl cannot be combined with --l1"),
        (["--max-kl", "0.1", "--l2", "0.1"], "cannot be combined with --l2"),
        (["--max-perplexity", "1%", "--preset", "llama"], "cannot be combined with --preset"),
        (["--max-kl", "0.1", "--trace", "x"], "cannot be combined with --trace"),
        (["--max-kl", "0.1", "--store", "bf16"], "cannot be combined with --store"),
        (["--max-kl", "0.1", "--max-gb", "3"], "cannot be combined with --max-gb"),
        (["--max-kl", "0"], "max_kl must be a number greater than 0"),
        (["--max-perplexity", "0.5"], "must be a percentage such as +0.5%, got '0.5'"),
        (["--max-perplexity", "x%"], "must be a percentage"),
        (["--max-kl", "0.1", "--held-out", "1"], "--held-out must be at least 2"),
        (["--held-out", "3", "--l1", "0.1"], "--held-out goes with --max-kl"),
    ],
)
def test_mistakes_are_said_before_the_model_is_loaded(command, arguments, why, capsys, monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    arguments = [each for each in arguments if each]
    command = command if "--held-out" not in arguments else command[:5] + command[-2:]
    assert main([*command, *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_model_is_needed_and_a_text_for_both(command, tmp_path, capsys):
    assert main(["tune", "--max-kl", "0.1", "-o", str(tmp_path / "p.json")]) == 2
    assert "--max-kl needs --model" in capsys.readouterr().err
    assert main([*command, "--max-kl", "0.1", "--length", "4096"]) == 2
    assert "overlap: give a longer text" in capsys.readouterr().err
