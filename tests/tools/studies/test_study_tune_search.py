"""`python -m sparge_tools.studies.tune_search` on a tiny model."""

from __future__ import annotations

import json

import pytest

from sparge.values.profile import Profile
from sparge_tools import zoo
from sparge_tools.studies import paper_search, profile_quality
from sparge_tools.studies.tune_search import main, search_targets
from tiny_llama import Letters, tiny_llama

pytest.importorskip("transformers")


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda name, dtype=None: (tiny_llama(), Letters()))
    monkeypatch.setattr(paper_search, "THETAS", paper_search.THETAS[14:18])
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sizes = {"length": 300, "inputs": 2, "sample": 1, "windows": 1, "budget-length": 300}
    given = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    return ["--model", "tiny", "--text", str(text), *given]


def test_the_document_says_what_was_asked(arguments, tmp_path, capsys):
    kept = tmp_path / "profile.json"
    assert main([*arguments, "--keep", str(kept), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "sparge.benchmarks.tune_search/1"
    profile = Profile.load(kept)
    assert profile.to_dict() == document["profile"]
    assert document["whole_seconds"] == document["trace_seconds"] + document["seconds"]
    budget = document["keep_error"]
    assert budget["heads"] == sum(len(layer.heads) for layer in profile.layers.values())
    assert 0 <= budget["median"] <= budget["p95"] <= 1
    verdicts = {line["target"]: line["verdict"] for line in search_targets(document)}
    assert len(verdicts) == 7
    assert verdicts["seconds for the whole model"] == "met"
    document["keep_error"]["median"] = 0.06
    document["quality"]["saved"] = None
    worse = {line["target"]: line["verdict"] for line in search_targets(document)}
    changed = {what for what in worse if worse[what] != verdicts[what]} | {
        what for what, verdict in worse.items() if verdict == "not reached"
    }
    assert {"KeepError(0.05): median error", "density below one recipe's, same perplexity"} <= (
        changed
    )


def test_the_tables_are_shown(arguments, capsys, monkeypatch):
    monkeypatch.setattr(profile_quality, "MASSES", (0.9, 0.98))
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for word in (
        "sparge's search and the paper's",
        "KeepError(0.05)",
        "Targets of tuning",
        "verdict",
    ):
        assert word in shown


def test_mistakes_are_found_before_the_work(arguments, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(zoo, "load", lambda *a, **k: pytest.fail("work was begun"))
    assert main([*arguments, "--l1", "0.09", "--l2", "0.08"]) == 2
    assert main([*arguments, "--keep", str(tmp_path / "no" / "p.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["--fast"]) == 2
