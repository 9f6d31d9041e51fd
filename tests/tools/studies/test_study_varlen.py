"""`python -m sparge_tools.studies.varlen`: its document and its verdict."""

from __future__ import annotations

import json

import pytest

from sparge_tools.studies import varlen

GOOD = {"lengths": "mixed", "backend": "cpu", "ratio": 1.0, "difference": 0.0}


def test_the_ratio_is_of_the_times_measured(monkeypatch, capsys):
    monkeypatch.setattr(varlen, "HEADS", {"Hq": 2, "Hk": 1, "D": 16})
    monkeypatch.setattr(varlen, "LENGTHS", {"short": (1, 8), "mixed": (1, 300)})
    code = varlen.main(["--sequences", "3", "--rounds", "1", "--json"])
    cases = json.loads(capsys.readouterr().out)["cases"]
    names = [(case["lengths"], case["backend"]) for case in cases]
    assert names == [(name, x) for name in ("short", "mixed") for x in ("auto", "cpu")]
    for case in cases:
        assert case["ratio"] == pytest.approx(case["one_each_seconds"] / case["one_call_seconds"])
        assert 3 <= case["tokens"] <= 900
        assert 0 < case["density"] <= 1
        if case["backend"] == "cpu":
            assert (case["ran"], case["difference"]) == ("cpu", 0.0)
    assert code == (0 if all(map(varlen.is_good, cases)) else 1)


def test_the_lengths_are_within_their_limits():
    *_, cuts = varlen.make_pack(5, 9, 40)
    lengths = cuts.diff()
    assert (len(lengths), int(lengths.min()), int(lengths.max())) == (40, 5, 9)


def test_what_is_good_enough():
    assert varlen.is_good(GOOD)
    assert not varlen.is_good(GOOD | {"ratio": 0.9})
    assert not varlen.is_good(GOOD | {"difference": 1e-7})
    assert varlen.is_good(GOOD | {"difference": 1e-7, "backend": "auto"})
    assert not varlen.is_good(GOOD | {"lengths": "short"})
    assert varlen.is_good(GOOD | {"lengths": "short", "ratio": 1.4})


def test_no_rounds_are_a_mistake(capsys):
    assert varlen.main(["--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
