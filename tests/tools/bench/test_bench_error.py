"""`sparge bench error`: the adversarial cases, what is judged, and the exit code."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparge import DEFAULT, KeepError, Recipe
from sparge.backends.cpu import library as native
from sparge.cli import BAD_RESULT, MISTAKE, OK, main
from sparge_tools.bench.error_suite import (
    DIMS,
    FAMILIES,
    LENGTHS,
    Adversary,
    Outcome,
    adversaries,
    failures,
    run_case,
    summarize,
)
from sparge_tools.commands import bench_command

needs_core = pytest.mark.skipif(native.why_missing() is not None, reason="too long otherwise")
GOOD = Outcome("runs", 0.05, 0.5, reported=0.03, bound=0.04, true=0.03, raised=False, rising=False)


def test_cases_are_many_mixed_and_the_same_every_time():
    cases = adversaries(30)
    assert len(cases) == 210 == len(set(cases))
    assert {case.family for case in cases} == set(FAMILIES)
    assert {case.is_causal for case in cases} == {True, False}
    assert {case.L for case in cases} == set(LENGTHS)
    assert {case.D for case in cases} == set(DIMS)
    assert adversaries(30, first_seed=7)[0].seed == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_a_case_is_finite_and_follows_from_its_seed(family):
    case = Adversary(family, 3, 300, 32, True)
    one, again = case.qkv(), case.qkv()
    for a, b in zip(one, again, strict=True):
        assert a.shape == (1, 2, 300, 32)
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)
    assert not torch.equal(one[0], replace(case, seed=4).qkv()[0])


def test_what_is_judged():
    assert not GOOD.is_over
    assert GOOD.is_visible
    assert not GOOD.is_misjudged
    assert replace(GOOD, true=0.0626).is_over
    assert replace(GOOD, true=float("inf")).is_over
    assert replace(GOOD, reported=0.019).is_misjudged
    assert replace(GOOD, reported=0.046).is_misjudged
    assert not replace(GOOD, true=0.004, reported=0.0).is_misjudged


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (replace(GOOD, true=1.0, reported=1.0), "exceed 1.25 x their budget"),
        (replace(GOOD, reported=0.001), "report an error off by > 1.5x"),
        (replace(GOOD, rising=True), "keep more at a larger budget"),
    ],
)
def test_what_fails(bad, says):
    assert failures(summarize([GOOD] * 9, "budget")) == []
    (why,) = failures(summarize([GOOD] * 9 + [bad], "budget"))
    assert says in why


@needs_core
def test_a_case_is_run_at_every_budget():
    found = run_case(Adversary("drift", 1, 700, 32, True), (0.1, 0.02), DEFAULT, backend="cpu")
    assert [one.budget for one in found] == [0.02, 0.02, 0.1, 0.1]
    assert all(0 < one.density <= 1 and one.reported <= one.bound for one in found)
    assert found[2].density <= found[0].density
    assert not any(one.rising for one in found)


@needs_core
def test_the_command(capsys, tmp_path, monkeypatch):
    file = tmp_path / "errors.json"
    arguments = ["bench", "error", "--cases", "1", "--budgets", "0.05,0.1", "--json"]
    code = main([*arguments, "--output", str(file)])
    document = json.loads(capsys.readouterr().out)
    assert code == (BAD_RESULT if document["missed"] else OK)
    assert json.loads(file.read_text())["by_budget"] == document["by_budget"]
    assert [row["of"] for row in document["by_budget"]] == ["0.05", "0.1", "all"]
    assert [row["of"] for row in document["by_family"]] == [*FAMILIES, "all"]
    assert document["by_budget"][-1]["heads"] == 7 * 2 * 2
    assert Recipe.from_dict(document["recipe"]) == replace(DEFAULT, keep=KeepError(0.05))
    # A budget that is not kept is shown by the exit code.
    bad = replace(GOOD, true=1.0)
    monkeypatch.setattr(bench_command, "run_suite", lambda *args, **more: [GOOD, bad])
    assert main(["bench", "error", "--cases", "1"]) == BAD_RESULT
    said = capsys.readouterr()
    assert "KeepError on 7 adversarial cases" in said.out
    assert "50.0% of heads exceed" in said.err


def test_mistakes_are_said(capsys, no_work):
    assert main(["bench", "error", "--budgets", "0.05,2"]) == MISTAKE
    assert "max_error must be greater than 0" in capsys.readouterr().err
    assert main(["bench", "errors"]) == MISTAKE
