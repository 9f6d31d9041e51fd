"""`sparge bench`: what it measures, what it refuses, what it prints. No test looks at a time."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cli_runs import WHY, attend_wrongly, run_json, run_text
from sparge import Recipe
from sparge.backends.cpu import library as native
from sparge.cli import bench, main
from sparge.report import flex, race
from sparge.report.benchtables import table_of_rows
from sparge.report.entries import WANTED, entries

pytestmark = [
    pytest.mark.usefixtures("piped"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TINY = ["bench", "--lengths", "256", "--heads", "1", "--head-dims", "16", "--repeat", "2"]
OURS = [*TINY, "--backends", "reference"]


@pytest.fixture
def green(monkeypatch):
    """The gate has tests of its own, and so has the peak."""
    monkeypatch.setattr(bench, "check_backends", list)
    monkeypatch.setattr(bench, "check_sparse", lambda names: [])
    known = {"gflops": {"bf16": 2.0, "fp32": 4.0}, "peak": 4.0, "of": "fp32"}
    monkeypatch.setattr(bench, "gemm_peaks", lambda counts: dict.fromkeys(counts, known))


@pytest.fixture
def eager_flex(monkeypatch):
    """Compiling is tested where it belongs, and takes longer than all of this."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)


def test_every_contender_in_every_case(green, eager_flex, capsys):
    found = run_json(OURS, capsys)
    assert found["format"] == "sparge.bench/2"
    threads = torch.get_num_threads()
    assert found["threads"] == [threads]
    wanted = [e.name for e in entries(["reference"])]
    assert [row["contender"] for row in found["rows"]] == wanted * 2
    assert wanted[0] == "SDPA bf16"
    assert {f"reference {w.name}" for w in WANTED} | {"SDPA fp32", "flex 20%"} <= set(wanted)
    assert [case["causal"] for case in found["cases"]] == [True, False]
    for row in found["rows"]:
        assert {key: row[key] for key in found["cases"][0]} in found["cases"]
        assert (row["recipe"] is None) == (row["kind"] == "sdpa")
        assert row["why_not"] is None
        peak = found["peaks"][str(row["threads"])]["peak"]
        assert row["share_of_peak"] == pytest.approx(row["gflops"] / peak)


def test_the_figures_of_a_row(green, eager_flex, capsys):
    rows = run_json([*OURS, "--lengths", "512", "--repeat", "3", "--causal"], capsys)["rows"]
    by_name = {row["contender"]: row for row in rows}
    for row in rows:
        dense = by_name[f"SDPA {row['dtype']}"]
        pairs = list(zip(dense["seconds_each"], row["seconds_each"], strict=True))
        assert row["rounds"] == len(pairs) == 3
        assert row["seconds"] == median(row["seconds_each"])
        assert row["ratio"] == pytest.approx(median(d / s for d, s in pairs))
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["loses"] == (row["kind"] == "sparse" and row["ratio"] < 1)
        assert row["scores"] == 512 * 513 // 2 >= row["kept_scores"]
        assert row["ns_per_score"] == pytest.approx(row["seconds"] * 1e9 / row["scores"])
        flops = 4 * 16 * row["kept_scores"] / row["seconds"]
        assert row["gflops"] == pytest.approx(flops / 1e9)
        assert 0 < row["error"] <= 1.1 * (row["quantization_error"] + row["sparsity_error"])
        stages = [row.get(name) for name in ("statistics", "selection", "attention")]
        assert all(stages) if row["kind"] == "sparse" else not any(stages)
    everything, some = by_name["reference all"], by_name["reference 40%"]
    assert everything["density"] == 1 > some["density"]
    assert everything["kept_scores"] == everything["scores"] > some["kept_scores"]
    assert everything["sparsity_error"] < 1e-12 < some["sparsity_error"]
    assert Recipe.from_dict(by_name["reference default"]["recipe"]) == Recipe()
    # The very same blocks, without our quantization.
    given = by_name["flex 40%"]
    assert (given["density"], given["kept_scores"]) == (some["density"], some["kept_scores"])
    assert given["sparsity_error"] == some["sparsity_error"]
    assert given["quantization_error"] < 0.01


def test_text_and_file_and_threads(green, eager_flex, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # the reference has a longer name than the table is for
    target = tmp_path / "bench.json"
    torch.set_num_threads(2)
    argv = [*OURS, "--no-causal", "--threads", "1,2", "--contenders", "40%,fp32"]
    text = run_text([*argv, "--output", str(target)], capsys)
    assert torch.get_num_threads() == 2
    found = json.loads(target.read_text())
    assert found["threads"] == [1, 2]
    assert {row["threads"] for row in found["rows"]} == {1, 2}
    names = {row["contender"] for row in found["rows"]}
    assert names == {
        *("SDPA bf16", "reference 40%", "reference 40% blend", "reference fast 40%"),
        *("flex 40%", "SDPA fp32", "reference fp32 all"),
    }
    assert f"machine: {found['machine_line']}" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for row in found["rows"]:
        start = f"256 d16 full {row['threads']}t {row['contender']} {row['density']:.3f}"
        (line,) = [line for line in lines if line.startswith(start)]
        assert ("LOSS" in line) == row["loses"]
    lost = sum(row["loses"] for row in found["rows"])
    assert f"We lose {lost} of our 8 rows; they are marked LOSS." in text
    assert "not measured here" in text
    assert {target["verdict"] for target in found["targets"]} == {"not measured here"}


def test_rows_where_we_lose_are_marked(green, eager_flex, capsys):
    found = run_json([*OURS, "--contenders", "reference all"], capsys)
    for row in found["rows"]:
        row |= {"ratio": 0.5, "loses": True} if row["causal"] else {"ratio": 2, "loses": False}
    table = table_of_rows(found)
    texts = [cells[[c.key for c in table.columns].index("ratio_text")] for cells in table.cells()]
    assert texts == ["0.50x LOSS"] * 2 + ["2.00x"] * 2


def test_what_cannot_run_is_a_row_with_its_reason(green, add_backend, capsys, monkeypatch):
    def fails():
        tried.append(1)
        raise RuntimeError("no C++ compiler\nand much more")

    tried = []
    monkeypatch.setattr(flex, "_compiled", fails)
    argv = [*OURS, "--causal"]
    rows = run_json(argv, capsys)["rows"]
    failed = {row["contender"]: row["why_not"] for row in rows if row["why_not"]}
    why = "does not compile here: RuntimeError: no C++ compiler"
    assert failed == dict.fromkeys(["flex all", "flex 40%", "flex 20%", "flex default"], why)
    assert len(tried) == 1  # not once more for each of them
    text = run_text(argv, capsys)
    assert f"not run: flex 40% (1 cases, first 256 d16 causal 1t): {why}" in text
    add_backend("picky", refusal=WHY)
    rows = run_json([*TINY, "--causal", "--backends", "picky"], capsys)["rows"]
    assert {row["why_not"] for row in rows if row["kind"] == "sparse"} == {WHY}
    assert {row["why_not"] for row in rows if row["kind"] == "flex"} == {
        f"no blocks to give it; picky says: {WHY}"
    }
    assert all(row["ratio"] == 1 for row in rows if row["kind"] == "sdpa")


@pytest.mark.skipif(native.why_missing() is not None, reason="no native core here")
def test_the_native_core(green, capsys):
    rows = run_json([*TINY, "--causal", "--contenders", "cpu"], capsys)
    assert rows["isa"] == native.chosen_isa(native.available())
    ours = [row for row in rows["rows"] if row["kind"] == "sparse"]
    assert len(ours) == len(WANTED)
    assert {row["isa"] for row in ours} == {rows["isa"]}
    assert all(row["quantization_error"] < 0.02 for row in ours)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_numbers_of_wrong_results(flags, add_backend, capsys, tmp_path, monkeypatch):
    add_backend("wrong", attend=attend_wrongly)
    monkeypatch.setattr(bench, "measure", None)
    target = tmp_path / "bench.json"
    assert main([*OURS, *flags, "--output", str(target)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrong is wrong: the error must be below 1e-05" in err
    assert not target.exists()


def test_no_numbers_of_a_row_that_is_wrong(green, eager_flex, add_backend, capsys):
    """The gate's cases are short; a fault may wait for a longer one."""

    def attend_worse(*args, **kwargs):
        done = attend_wrongly(*args, **kwargs)
        return replace(done, out=done.out * 1.2)

    add_backend("wrong", attend=attend_worse)
    assert main([*TINY, "--causal", "--backends", "wrong", "--contenders", "wrong 40%"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrong 40% at length 256, head dim 16: 0.2" in err
    assert "no numbers are printed" in err


def test_a_long_run_says_so_first(capsys):
    bench.say_how_long(59.0)
    assert capsys.readouterr().err == ""
    bench.say_how_long(300.0)
    assert "about 5 min;" in capsys.readouterr().err
    bench.say_how_long(18000.0)
    assert "about 5 hours;" in capsys.readouterr().err


def test_the_bar_follows_the_cases():
    moved = []
    reached = bench.pace([2, 4], lambda: moved.append(1))
    for i_case, share, total in ((0, 0.5, 1), (0, 1.0, 2), (1, 0.0, 2), (1, 0.6, 4), (1, 1.0, 6)):
        reached(i_case, share)
        assert len(moved) == total


def test_the_defaults_and_the_full_set():
    def cases(*argv):
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        return bench.cases_of(parser.parse_args(argv))

    torch.set_num_threads(2)
    assert {case.length for case in cases()} == {1024, 4096, 8192}
    assert {(case.head_dim, case.causal, case.threads) for case in cases()} == {
        (dim, causal, 2) for dim in (64, 128) for causal in (True, False)
    }
    assert {case.length for case in cases("--full")} == {2**n for n in range(10, 16)}
    assert {case.threads for case in cases("--full")} == {1, 2}
    assert len(cases("--full")) == len(set(cases("--full"))) == 6 * 2 * 2 * 2
    assert {case.length for case in cases("--full", "--lengths", "300")} == {300}


def test_rounds_follow_the_time_of_one():
    assert race.rounds_for(0.0) == race.rounds_for(1e-3) == 25
    assert race.rounds_for(0.5) == 10
    assert race.rounds_for(100.0) == 3


class Runner:
    """A contender that only counts."""

    def __init__(self, order, name):
        self.order, self.name, self.turns = order, name, 0

    def take_turn(self):
        self.order.append(self.name)
        self.turns += 1

    def forget_turns(self):
        self.turns = 0


@pytest.mark.parametrize("long_after, first", [(1e9, 0), (-1.0, 1)])
def test_turns_go_there_and_back_and_a_long_first_round_counts(long_after, first, monkeypatch):
    monkeypatch.setattr(race, "SECONDS_OF_A_LONG_ROUND", long_after)
    order, shares = [], []
    runners = [Runner(order, name) for name in "abc"]
    assert race.race(runners, repeat=3, reached=shares.append) == 3
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc", *["abc", "cba", "abc"][first:]]
    assert {runner.turns for runner in runners} == {3}
    assert shares == sorted(shares)
    assert shares[-1] == 1
