"""`sparge eval` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

from cli_runs import complaint
from sparge import DEFAULT, Recipe, cli
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge_tools import optional_libraries
from sparge_tools.evaluate import cells, harness, tested_model
from tiny_lm import MAX_TOKENS, make_tokenizer, save, sentences

OURS = "cpu" if native.why_missing() is None else "reference"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture
def argv(model, tmp_path, monkeypatch):
    """A small run that is sparse: `auto` would give such short calls to dense."""
    monkeypatch.setenv("SPARGE_BACKEND", OURS)
    monkeypatch.setitem(cli.COMMANDS, "eval", "a language model with sparge and without")
    text = tmp_path / "text.txt"
    text.write_text(sentences(2000))
    arguments = ["eval", "--model", model, "--text", str(text), "--lengths", "256,384"]
    return [
        *arguments,
        "--dtype",
        "fp32",
        "--depths",
        "2",
        "--repeat",
        "1",
        "-o",
        str(tmp_path / "r"),
    ]


def document(argv, capsys, code=0):
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_whole_document(argv, capsys, tmp_path):
    found = document(argv, capsys)
    assert "targets" not in found
    assert found["format"] == "sparge.eval/2"
    assert found == json.loads((tmp_path / "r" / "eval.json").read_text())
    assert found["model"]["layers"] == 2
    assert Recipe.from_dict(found["settings"]["recipe"]) == DEFAULT
    assert [row["length"] for row in found["prefill"]] == [256, 384, 512]
    for row in found["prefill"]:
        assert 0 < row["attention_share"] < 1
        assert all(way.startswith(OURS) for way in row["ran"])
        assert row["density"] <= 1
    for row in found["perplexity"]:
        assert row["tokens"] == row["length"] - 1 == sum(b["tokens"] for b in row["buckets"])
        assert abs(row["relative"]) < 0.05
        assert 0 < row["kl_mean"] <= row["kl_p99"]
    assert [(row["length"], row["depth"]) for row in found["needle"]] == [
        (n, d) for n in (256, 384) for d in (25, 75)
    ]
    for row in found["needle"]:
        assert 0 < row["density"] <= 1
        assert row["dense_loss"] == pytest.approx(row["sparge_loss"], rel=0.2)
    for row in found["errors"]:
        assert [len(layer) for layer in row["error_by_head"]] == [4, 4]
        assert 0 < row["mean"] < 0.2
    for name in ("needle.png", "errors.png", "perplexity.png"):
        assert (tmp_path / "r" / name).read_bytes().startswith(b"\x89PNG")


def test_the_answer_is_scored_as_by_hand(argv, capsys, model, tmp_path):
    """lm-eval's loss of an answer is the model's own, over the prompt with its template."""
    from transformers import AutoModelForCausalLM

    (row, *_) = document([*argv, "--measures", "needle", "--lengths", "256"], capsys)["needle"]
    (doc, *_) = map(json.loads, (tmp_path / "r/tasks/sparge_needle.jsonl").read_text().splitlines())
    tokenizer = make_tokenizer(chat=True)
    prompt = f"<user> {doc['context']}\n\n{doc['question']} <end> <assistant> {doc['prefix']}"
    ids = torch.tensor([tokenizer.encode(f"{prompt} {doc['answer']}")])
    assert ids.shape[1] == row["tokens"] == doc["tokens"]
    n = len(doc["answer"])
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(model)(ids).logits[0, -n - 1 : -1]
    losses = -scores.log_softmax(-1).gather(1, ids[0, -n:, None])
    assert row["dense_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert row["dense_found"] == bool((scores.argmax(-1) == ids[0, -n:]).all())


def test_text(argv, capsys):
    assert main([*argv, "--lengths", "256"]) == 0
    out, err = capsys.readouterr()
    for title in ("Prefill", "Perplexity by position", "Needle in a haystack"):
        assert f"\n{title}\n" in out
    assert "arget" not in out  # results, not the project's goals
    assert "sparge: 1 of 8: prefill length=256" in err


def test_an_interrupted_run_goes_on(argv, capsys, monkeypatch):
    """Finished cells are not measured again, and the document is the one of a whole run."""
    argv = [*argv, "--measures", "perplexity,needle"]
    measured, real = [], cells.measure

    def measure(subject, cell):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(cell.key)
        return real(subject, cell)

    monkeypatch.setattr(cells, "measure", measure)
    assert main(argv) == 130
    err = capsys.readouterr().err
    assert "4 of 10 measurements are saved in" in err
    assert "the same command resumes" in err
    measured[:] = ["again"]
    monkeypatch.setattr(cells, "measure", lambda s, c: (measured.append(c.key), real(s, c))[1])
    found = document(argv, capsys)
    assert len(measured) == 1 + 6
    assert len(found["needle"]) == 4
    monkeypatch.setattr(tested_model.TestedModel, "loaded", property(lambda self: 1 / 0))
    assert document(argv, capsys)["needle"] == found["needle"]  # nothing left to load a model for
    assert "holds a run with other settings: seed was 0, is 7" in complaint(
        [*argv, "--seed", "7"], capsys
    )


def test_a_task_of_lm_eval_and_ours(argv, capsys):
    argv = [*argv, "--measures", "tasks", "--lengths", "256", "--limit", "2"]
    rows = document([*argv, "--tasks", "sparge_longtext"], capsys)["tasks"]
    by_metric = {row["metric"]: row for row in rows}
    assert set(by_metric) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    for row in rows:
        assert row["dense"] != row["sparge"]
        assert row["dense"] == pytest.approx(row["sparge"], rel=0.1)


def test_tasks_alone_need_no_text(argv, capsys, monkeypatch):
    """And each variant runs every task at every length, with its own attention."""
    asked = []

    def scores_of(name, lm, *, length, **rest):
        asked.append((name, length, lm.model.config._attn_implementation))
        return {"acc": 0.5 * len(asked)}

    index = SimpleNamespace(all_tasks=["niah_single_1"])
    monkeypatch.setattr(harness, "task_manager", lambda *where: index)
    monkeypatch.setattr(harness, "scores_of", scores_of)
    monkeypatch.setattr(tested_model, "read_text", None)
    argv = [*argv, "--measures", "tasks", "--tasks", "niah_single_1"]
    rows = document(argv, capsys)["tasks"]
    assert asked == [
        ("niah_single_1", length, how) for length in (256, 384) for how in ("sdpa", "sparge")
    ]
    assert [(row["dense"], row["sparge"]) for row in rows] == [(0.5, 1.0), (1.5, 2.0)]


MISTAKES = [
    (["--lengths", "2048"], f"--lengths must be at most {MAX_TOKENS} for"),
    (["--lengths", "64"], "at least one block, 128 tokens; got 64"),
    (["--measures", "speed"], "--measures must be of"),
    (["--measures", "tasks", "--tasks", "niah_singel_1"], "similar names: niah_single_1"),
    (["--measures", "prefill", "--tasks", "niah_single_1"], "need each other"),
    (["--text", "no-such.txt"], "--text must be a file or one of"),
    (["--model", "no-such"], "is no directory"),
    (["--recipe", "no-such.json"], "--recipe: must be a JSON object or a file"),
    (["--recipe", "{}", "--profile", "p.json"], "not allowed with argument --recipe"),
    (["--depths", "0"], "--depths: must be a whole number of at least 1"),
    (["--profile", "no-such.json"], "--profile must name a file"),
]


@pytest.mark.parametrize("more, message", MISTAKES)
def test_mistakes_cost_nothing(more, message, argv, capsys, monkeypatch, tmp_path):
    # The real index takes many seconds.
    index = SimpleNamespace(all_tasks=["niah_single_1", "wikitext"])
    monkeypatch.setattr(harness, "task_manager", lambda *where: index)
    monkeypatch.setattr(tested_model.TestedModel, "loaded", property(lambda self: 1 / 0))
    assert message in complaint([*argv, *more], capsys)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "words, message",
    [(100, "at least one block of 128 tokens"), (300, "at least 384 tokens for this length")],
)
def test_a_text_too_short(words, message, argv, capsys, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(sentences(words))
    assert message in complaint([*argv, "--text", str(short)], capsys)


def test_damaged_models(argv, capsys, tmp_path):
    empty = tmp_path / "model"
    empty.mkdir()
    assert "has no config.json" in complaint([*argv, "--model", str(empty)], capsys)
    (empty / "config.json").write_text("{")
    assert "is not valid JSON" in complaint([*argv, "--model", str(empty)], capsys)


def test_without_lm_eval(argv, capsys, monkeypatch):
    real = optional_libraries.find_spec
    monkeypatch.setattr(
        optional_libraries, "find_spec", lambda name: None if name == "lm_eval" else real(name)
    )
    err = complaint([*argv, "--measures", "needle"], capsys, code=3)
    assert 'pip install "sparge-tools[eval]"' in err
    assert document([*argv, "--measures", "errors"], capsys)["errors"]


def test_two_models_have_two_fingerprints(model, tmp_path):
    first = tested_model.directory_fingerprint("a", Path(model))
    other = tested_model.directory_fingerprint("a", Path(save(tmp_path / "other", seed=1)))
    assert (
        first["digest"]
        == tested_model.directory_fingerprint("a", Path(model))["digest"]
        != other["digest"]
    )


def test_lm_eval_with_sparge_registered_first(monkeypatch):
    """Every argument is lm-eval's own; our attention is there when it begins."""
    from transformers import AttentionInterface

    from sparge_tools import lm_eval as ours

    seen = []
    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate",
        lambda: seen.append("sparge" in AttentionInterface().valid_keys()),
    )
    assert ours.main() == 0
    assert seen == [True]


def test_lm_eval_missing(monkeypatch, capsys):
    from sparge_tools import lm_eval as ours

    monkeypatch.setattr(optional_libraries, "find_spec", lambda name: None)
    assert ours.main() == 3
    assert 'pip install "sparge-tools[eval]"' in capsys.readouterr().err
