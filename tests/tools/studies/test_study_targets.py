"""The targets of the project, judged on documents of `sparge bench` and `sparge eval`."""

from __future__ import annotations

import json

import pytest

from sparge_tools.bench.contender import RECIPES
from sparge_tools.evaluate.cells import prefill_row
from sparge_tools.studies.targets import (
    MET,
    NO_TARGET,
    NOT_MEASURED,
    NOT_MET,
    SPEED_TARGETS,
    judge_quality,
    judge_speed,
    main,
)

pytestmark = pytest.mark.usefixtures("piped")
PREFILL = {
    "rounds": 3,
    "density": 0.4,
    "ran": {"cpu (amx)": 2},
    "fallbacks": {},
    "dense_seconds": [10.0, 12.0, 10.0],
    "sparge_seconds": [5.0, 6.0, 4.0],
    "sparge_attention_seconds": [1.0, 1.0, 1.0],
    "clocked_seconds": [10.0, 10.0, 20.0],
    "clocked_attention_seconds": [6.0, 5.0, 10.0],
}


def row(recipe_name, length=8192, head_dim=64, **figures):
    case = {"length": length, "head_dim": head_dim, "causal": True, "threads": 2}
    return {**case, "backend": "cpu", "kind": "sparse", "recipe_name": recipe_name, **figures}


def verdicts(rows, isa):
    return {found["target"]: found for found in judge_speed(rows, isa)}


def test_targets_name_contenders_that_there_are():
    names = set(RECIPES)
    for target in SPEED_TARGETS:
        for isa in ("amx", "avx512", "avx2"):
            assert {target.beyond or target.recipe, *target.names(isa)} <= names


def test_a_target_is_met_if_every_long_case_meets_it():
    rows = [row("all", ratio=1.6), row("all", head_dim=128, ratio=1.5)]
    found = verdicts(rows, "avx2")["all kept, times SDPA bf16"]
    assert (found["verdict"], found["worst"], found["best"]) == (MET, 1.5, 1.6)
    assert found["worst_case"]["head_dim"] == 128
    short = row("all", length=4096, ratio=0.5)
    assert verdicts([*rows, short], "avx2")["all kept, times SDPA bf16"]["cases"] == 2
    slow = row("all", length=16384, ratio=1.4)
    found = verdicts([*rows, slow], "avx2")["all kept, times SDPA bf16"]
    assert (found["verdict"], found["cases_met"], found["cases"]) == (NOT_MET, 2, 3)
    other = {**slow, "backend": "reference"}
    assert verdicts([other], "avx2")["all kept, times SDPA bf16"]["verdict"] == NOT_MEASURED


def test_targets_depend_on_the_instruction_set():
    rows = [row("40%", ratio=2.0), row("fast 40%", ratio=2.7), row("20%", ratio=3.0)]
    name = "40 % kept, times SDPA bf16"
    assert verdicts(rows, "avx512")[name]["verdict"] == MET  # int8-fast counts there
    assert verdicts(rows, "amx")[name]["worst"] == 2.0
    assert verdicts(rows, "avx2")[name]["verdict"] == NOT_MET
    name = "20 % kept, times SDPA bf16"
    assert verdicts(rows, "avx2")[name]["verdict"] == NO_TARGET
    assert verdicts(rows, "amx")[name]["verdict"] == NOT_MET
    assert verdicts([], None)[name]["verdict"] == NOT_MEASURED


def test_shares_of_dense_time_must_stay_below():
    rows = [row("40%", overhead=0.03), row("40% blend", overhead=0.06)]
    found = verdicts(rows, "avx2")
    at_8k = found["statistics + selection (mean), share of SDPA bf16 at 8k"]
    at_32k = found["statistics + selection (mean), share of SDPA bf16 at 32k"]
    assert (at_8k["verdict"], at_32k["verdict"]) == (MET, NOT_MEASURED)
    on_top = found["the exact rows of blend on top, share of SDPA bf16"]
    assert on_top["worst"] == pytest.approx(0.03)
    assert on_top["verdict"] == MET


def test_targets_are_judged_by_what_was_measured():
    nothing = dict.fromkeys(("prefill", "perplexity", "needle", "errors"), ())
    assert {target["verdict"] for target in judge_quality(nothing)} == {"not measured here"}
    needles = [{"length": n, "lost": False} for n in (2048, 4096, 8192) for _ in range(5)]
    rows = {
        "prefill": [prefill_row(8192, PREFILL), {**prefill_row(512, PREFILL)}],
        "perplexity": [{"length": 8192, "relative": 0.005}],
        "needle": needles,
        "errors": [{"length": 2048, "mean": 0.01}, {"length": 8192, "mean": 0.06}],
    }
    found = {target["target"].split(",")[0]: target for target in judge_quality(rows)}
    verdicts = [target["verdict"] for target in judge_quality(rows)]
    assert verdicts == ["met"] * 6 + ["NOT MET"]
    assert found["attention"]["reaches_aim"] is True
    assert found["perplexity against dense"]["reaches_aim"] is False
    needles[0]["lost"] = True
    assert judge_quality(rows)[4]["verdict"] == "NOT MET"
    assert judge_quality({**rows, "needle": needles[:-1]})[4]["verdict"] == "not measured here"


def test_documents_become_tables(tmp_path, capsys):
    where = {"isa": "avx2", "machine_line": "a machine", "load_average": None}
    bench = {"format": "sparge.bench/3", **where, "rows": [row("all", ratio=1.6)]}
    rows = {
        "prefill": [prefill_row(8192, PREFILL)],
        **{name: [] for name in ("perplexity", "needle", "errors")},
    }
    for name, document in (("b", bench), ("e", {"format": "sparge.eval/2", **where, **rows})):
        (tmp_path / name).write_text(json.dumps(document))
    assert main([str(tmp_path / "b"), str(tmp_path / "e")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "all kept, times SDPA bf16 >= 1.50x 1.60x 8192 d64 causal 2t 1.60x 1 of 1 met" in lines
    reached = "attention, 8k prefill, times dense >= 3.00x >= 5.00x 6.00x met, reaches the aim"
    assert reached in lines
    assert "machine: a machine; load average at the start: unknown." in lines


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not valid JSON"),
        ('{"format": "sparge.bench/1"}', "has the format 'sparge.bench/1'; known: sparge.bench/3"),
        ("[1]", "has the format None"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys):
    (tmp_path / "x").write_text(content)
    assert main([str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
