"""`sparge demo --vision` from end to end on a tiny random module: page, JSON, and refusals."""

from __future__ import annotations

import json
import os

import pytest
import torch

pytest.importorskip("skimage")
pytest.importorskip("flip_evaluator")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from cli_runs import complaint
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge_tools import optional_libraries
from sparge_tools.zoo import kinds
from sparge_tools.zoo.vision.terrain import Terrain, TerrainConfig

OURS = "cpu" if native.why_missing() is None else "reference"
NET = TerrainConfig(
    channels=8, multipliers=(1, 1, 1, 2), blocks=1, attention_levels=(3,), head_dim=4, groups=4
)


@pytest.fixture
def argv(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARGE_BACKEND", OURS)
    torch.manual_seed(0)
    kinds._write_module(tmp_path / "tiny", "terrain", Terrain(NET).state_dict(), NET)
    return ["demo", "--vision", "--model", "tiny", "--inputs", "1"]


def test_the_table_and_the_page(argv, capsys, tmp_path):
    assert main([*argv, "--recipe", '{"keep": {"mass": 0.5}}']) == 0
    out, err = capsys.readouterr()
    page = (tmp_path / "vision.html").read_text()
    assert "tiny: terrain of 256×256 places" in out
    assert "page: vision.html" in out
    assert page.count("data:image/png;base64,") == 3
    for words in ("seed 0, difficulty 0.5", "relative L2", "difference"):
        assert words in page
    assert err.splitlines()[-1] == "sparge: 4 of 4: sparse: seed 0, difficulty 0.5"


def test_json_and_another_page(argv, capsys, tmp_path):
    assert main([*argv, "--seed", "3", "--json", "-o", "mine.html"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "sparge.showcase.vision/1"
    (model,) = found["models"]
    assert model["pairs"][0]["caption"] == "seed 3, difficulty 1"
    assert 0 < model["figures"]["relative_l2"]["mean"] < 1
    assert (tmp_path / "mine.html").is_file()
    assert not (tmp_path / "vision.html").exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (["--tokens", "400"], "--tokens is for the demo of a language model"),
        (["--text", "essays"], "--text is for the demo of a language model"),
        (["--repeats", "2"], "--repeats is for the demo of a language model"),
        (["--model", "smollm2-135m-instruct"], "must be a module of the zoo"),
        (["-o", "missing/vision.html"], "cannot be written"),
        (["--inputs", "0"], "at least 1"),
    ],
)
def test_mistakes_are_found_before_any_work(more, message, argv, capsys, tmp_path):
    assert message in complaint([*argv, *more], capsys)
    assert not list(tmp_path.glob("*.html"))


def test_inputs_go_with_vision(capsys):
    assert "--inputs goes with --vision" in complaint(["demo", "--inputs", "2"], capsys)


def test_without_a_library_the_extra_is_named(argv, capsys, monkeypatch):
    monkeypatch.setattr(optional_libraries, "find_spec", lambda name: None)
    assert "sparge-tools[vision]" in complaint(argv, capsys, 3)


def test_offline_it_says_what_is_missing(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("npm_config_offline", "true")
    monkeypatch.setenv("PATH", os.devnull)
    assert main(["demo", "--vision"]) == 3
    assert "sam2" in capsys.readouterr().err
    assert not (tmp_path / "vision.html").exists()
