"""`sparge eval` of tiny pipelines and of a tiny module: document, pictures, page, and refusals."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("skimage")
pytest.importorskip("flip_evaluator")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from PIL import Image

import tiny_pipelines
from cli_runs import complaint
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge_tools import optional_libraries
from sparge_tools.commands import eval_command
from sparge_tools.showcase import pictures_page
from sparge_tools.zoo import kinds
from sparge_tools.zoo.vision.terrain import Terrain, TerrainConfig

OURS = "cpu" if native.why_missing() is None else "reference"
NET = TerrainConfig(
    channels=8, multipliers=(1, 1, 1, 2), blocks=1, attention_levels=(3,), head_dim=4, groups=4
)
HALF = ["--recipe", '{"keep": {"mass": 0.5}}']


def save(tiny, path):
    tiny.pipe.save_pretrained(path)
    call = {name: x for name, x in tiny.arguments.items() if name != "prompt"}
    return ["--model", str(path), "--prompt", "a cat", "--call", json.dumps(call), "--steps", "4"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return save(tiny_pipelines.flux(), tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture(scope="module")
def terrain(tmp_path_factory):
    """A directory as zoo.fetch makes it."""
    path = tmp_path_factory.mktemp("models") / "tiny-terrain"
    torch.manual_seed(0)
    kinds._write_module(path, "terrain", Terrain(NET).state_dict(), NET)
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """`auto` would give such short calls to dense."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARGE_BACKEND", OURS)


def test_the_document_the_pictures_and_the_page(flux, capsys, tmp_path):
    argv = ["eval", *flux, *HALF, "--seeds", "2", "--seed", "7", "--dtype", "fp32", "--threads"]
    assert main([*argv, "1", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    directory = tmp_path / "sparge-eval-flux"
    assert found == json.loads((directory / "eval.json").read_text())
    assert found["format"] == "sparge.eval.renders/1"
    assert found["kind"] == "a diffusers pipeline"
    assert [pair["seed"] for pair in found["pairs"]] == [7, 8]
    assert found["settings"]["call"]["num_inference_steps"] == 4
    assert found["machine"]["threads"] == 1
    for pair in found["pairs"]:
        assert pair["latent_errors"][0] == 0.0
        assert 20 < pair["figures"]["psnr"] < 90
        assert pair["density"] < 1
    names = {f"pair-0{i}-{way}.png" for i in (0, 1) for way in ("dense", "sparge", "difference")}
    assert {file.name for file in directory.iterdir()} == {*names, "eval.json", "eval.html"}
    assert Image.open(directory / "pair-00-dense.png").size == (36, 28)
    page = (directory / "eval.html").read_text()
    assert page.count("<figcaption>difference") == 2
    assert "Where it was sparse" in page
    assert "Error of the latents" in page
    assert f"{found['figures']['psnr']['mean']:.2f}" in page
    assert not re.search('(src|href)="(?!data:)', page)  # self-contained
    assert "sparge: 6 of 6: dense, seed 8: a cat" in err


def test_a_second_run_replaces_the_pictures_of_the_first(flux, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures_page, "find_spec", lambda name: None)  # no charts
    argv = ["eval", *flux, *HALF, "-o", "out"]
    assert main([*argv, "--seeds", "2"]) == 0
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "written: out/eval.json, out/eval.html" in out
    assert "a cat" in out
    assert len(list((tmp_path / "out").glob("pair-*.png"))) == 3
    assert "Where it was sparse" not in (tmp_path / "out" / "eval.html").read_text()


def test_frames_of_a_video(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pictures_page, "find_spec", lambda name: None)
    argv = save(tiny_pipelines.wan(), tmp_path / "wan")
    assert main(["eval", *argv, *HALF, "--dense-first", "0", "-o", "out", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (pair,) = found["pairs"]
    assert pair["frames"] == 9
    assert pair["figures"]["psnr_worst"] <= pair["figures"]["psnr"]
    assert pair["latent_errors"][0] > 0
    assert found["settings"]["schedule"]["dense_first"] == 0.0
    shown = sorted(file.name for file in (tmp_path / "out").glob("*-dense.png"))
    assert shown == [f"pair-00-frame-00{i}-dense.png" for i in (0, 4, 8)]


def test_a_module_of_the_zoo(terrain, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures_page, "find_spec", lambda name: None)
    argv = ["eval", "--model", terrain, *HALF, "--inputs", "1", "--order", "tiles:8x8"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "a module of the zoo"
    assert found["metric"] == "relative_l2"
    assert found["pairs"][0]["caption"] == "seed 0, difficulty 0.5"
    assert found["settings"]["order"] == "tiles:8x8"
    assert (tmp_path / "sparge-eval-tiny-terrain" / "pair-00-sparge.png").is_file()


def test_prompts_of_a_file(flux, tmp_path):
    (tmp_path / "prompts.txt").write_text("a dog\n\n  a tree \n")
    args = eval_command.argparse.Namespace(prompt=["a cat"], prompts="prompts.txt")
    assert eval_command.prompts_of(args) == ["a cat", "a dog", "a tree"]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--lengths", "128"], "--lengths is not for a diffusers pipeline"),
        (["--fresh"], "--fresh is not for a diffusers pipeline"),
        (["--inputs", "2"], "--inputs is not for a diffusers pipeline"),
        (["--call", '{"steps"'], "valid JSON"),
        (["--call", "[1]"], "must be a JSON object"),
        (["--height", "32"], "--height and height in --call say the same"),
        (["--frames", "9"], "FluxPipeline takes no num_frames"),
        (["--schedule", '{"dense_first": 2}'], "dense_first must be in [0, 1]"),
        (["--dense-first", "1.5"], "dense_first must be in [0, 1]"),
        (["--schedule", "{}", "--dense-first", "0"], "not allowed with argument"),
        (["--order", "spiral"], "order must be one of"),
        (["--prompts", "missing.txt"], "--prompts 'missing.txt' cannot be read"),
        (["--profile", "missing.json"], "missing.json"),
        (["-o", "full"], "--output must name a new directory"),
    ],
)
def test_mistakes_are_found_before_any_render(more, message, flux, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sparge_tools.renders.compare.render", pytest.fail)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert main(["eval", *flux, *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sparge-eval-flux").exists()


def test_a_prompt_is_needed(flux, capsys):
    assert "--prompt TEXT" in complaint(["eval", *flux[:2]], capsys)


@pytest.mark.parametrize("option", [["--prompt", "x"], ["--dense-first", "0"], ["--offload"]])
def test_options_of_pipelines_are_not_for_others(option, terrain, capsys, tmp_path):
    words = f"{option[0]} is not for a module of the zoo"
    assert words in complaint(["eval", "--model", terrain, *option], capsys)
    words = f"{option[0]} is not for a language model"
    assert words in complaint(["eval", "--model", str(tmp_path), *option], capsys)


def test_without_a_library_the_extra_is_named(flux, capsys, monkeypatch):
    real = optional_libraries.find_spec
    monkeypatch.setattr(
        optional_libraries, "find_spec", lambda name: None if name == "skimage" else real(name)
    )
    message = complaint(["eval", *flux], capsys, 3)
    assert "skimage: not installed" in message
    assert "sparge-tools[vision]" in message
