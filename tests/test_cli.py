"""`sparge`: its messages and exit codes, and `demo --synthetic`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
from sparge.cli.synthetic_demo import BACKEND

import sparge
from cli_runs import BENCH, DEMO, EXPLAIN, complaint, run_json, run_text
from sparge import Recipe, cli
from sparge.cli import bench, main
from sparge.cli import synthetic_demo as demo
from sparge.report.table import Column, Table, error, to_json
from sparge.synthetic import structured_qkv

pytestmark = pytest.mark.usefixtures("piped")


def test_version_and_help_and_the_module(capsys, monkeypatch):
    text = run_text(["--help"], capsys)
    assert all(name in text for name in cli.COMMANDS)
    assert "--kv-heads" in run_text(["explain", "--help"], capsys)
    argv = [sys.executable, "-m", "sparge", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"sparge {sparge.__version__}\n", "")
    monkeypatch.setattr(sys, "argv", ["sparge", "fly"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("sparge", run_name="__main__")
    assert stop.value.code == 2
    assert "'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "required: command"),
        (["doctor", "--fast"], "unrecognized arguments: --fast"),
        (["demo", "--synthetic", "--length", "0"], "whole number of at least 1, got '0'"),
        (["demo", "--synthetic", "--heads", "many"], "whole number of at least 1, got 'many'"),
        (["demo", "--synthetic", "--seed", "-1"], "seed must be from 0"),
        (["bench", "--lengths", "256,"], "at least 1, got ''"),
        (["bench", "--head-dims", "64,300"], "--head-dims must be from 8 to 256, got 300"),
        (["bench", "--backends", "magic"], "--backends: there is no 'magic'; there are"),
        (["bench", "--backends", ","], "--backends needs a name; there are"),
        (["bench", "--contenders", "cpu,car"], "--contenders: no name contains 'car'"),
        (["explain"], "required: --shape"),
        (["explain", "--shape", "1,8,1024"], "B,H,L,D, four numbers; got 3"),
        (["explain", "--shape", "1,8,1024,300"], "head_dim must be at most 256, got 300"),
        ([*EXPLAIN, "--backend", "magic"], "unknown backend in backend='magic'"),
        ([*EXPLAIN, "--kv-heads", "3"], "multiple of key heads, got 8 and 3"),
        ([*EXPLAIN, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([*EXPLAIN, "--device", "toaster"], "--device 'toaster' is not usable"),
        ([*EXPLAIN, "--recipe", "{keep"], "must be valid JSON"),
        ([*EXPLAIN, "--recipe", '{"keeep": 1}'], "unknown recipe fields ['keeep']"),
        ([*EXPLAIN, "--recipe", '{"pv_skip": "low"}'], "pv_skip must be a number"),
        ([*EXPLAIN, "--recipe", "no/such/file"], "cannot be read: No such file"),
    ],
)
def test_the_callers_mistakes_are_one_clean_line(argv, message, capsys):
    assert message in complaint(argv, capsys)


def test_a_fault_of_ours_is_not_called_the_callers(capsys, monkeypatch):
    monkeypatch.setattr("sparge.cli.doctor_command.versions", lambda: None + 1)
    with pytest.raises(TypeError):
        main(["doctor"])
    assert complaint([*EXPLAIN, "--recipe", '{"sink_blocks": "two"}'], capsys).count("sink_blocks")


def test_a_reader_that_leaves_is_no_error_message():
    argv = [sys.executable, "-m", "sparge", *EXPLAIN, "--json"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        done = subprocess.run(argv, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", [DEMO, BENCH])
@pytest.mark.parametrize("target", ["missing/out.json", ".", "/dev/null", "file/out.json"])
def test_an_unwritable_output_is_found_before_any_work(
    command, target, capsys, monkeypatch, tmp_path
):
    def worked(*_, **__):
        raise AssertionError("work was done before the output was checked")

    monkeypatch.setattr(demo, "measure", worked)
    monkeypatch.setattr(bench, "check_backends", worked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert "--output" in complaint([*command, "--output", target], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fault, code", [(ValueError("no luck"), 2), (KeyboardInterrupt(), 130)])
def test_a_run_that_ends_early_leaves_the_output_alone(fault, code, capsys, monkeypatch, tmp_path):
    def fails(*_):
        raise fault

    target = tmp_path / "demo.json"
    target.write_text("old")
    monkeypatch.setattr(demo, "measure_recipe", fails)
    message = complaint([*DEMO, "--output", str(target)], capsys, code)
    assert message == f"sparge: error: {str(fault) or 'interrupted'}\n"
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_demo_measures(capsys):
    rows = {row["recipe_name"]: row for row in run_json(DEMO, capsys)["rows"]}
    assert list(rows) == list(demo.RECIPES)
    for row in rows.values():
        assert 0 < row["density"] <= 1
        assert 0 <= row["sparsity"] < 1
        assert 0.9 < row["cosine"] <= 1 + 1e-9
        assert row["error"] <= 1.1 * (row["quantization_error"] + row["sparsity_error"])
        assert row["seconds"] == pytest.approx(sum(row["stages"].values()))
    exact, int8, default = rows["keep all, exact"], rows["keep all, int8"], rows["default"]
    assert exact["density"] == int8["density"] == 1
    assert exact["quantization_error"] == 0 < exact["error"] < 1e-5
    assert 1e-4 < int8["error"] == pytest.approx(int8["quantization_error"], rel=1e-2)
    assert int8["sparsity_error"] < 1e-5 < default["sparsity_error"]
    assert rows["fraction 0.3"]["density"] < default["density"] < 1
    assert default["pv_skipped"] == 0 < rows["default, pv_skip 5"]["pv_skipped"]
    assert Recipe.from_dict(default["recipe"]) == Recipe()


def test_demo_repeats_a_seed_and_draws_heads_from_first_to_last(capsys):
    def numbers(seed):
        found = run_json([*DEMO[:2], "--length", "128", "--heads", "9", "--seed", seed], capsys)
        assert [drawn["head"] for drawn in found["plans"]] == [0, 3, 5, 8]
        return [(row["density"], row["error"]) for row in found["rows"]]

    assert numbers("3") == numbers("3") != numbers("4")


def test_demo_in_text_and_to_a_file(capsys, tmp_path):
    target = tmp_path / "demo.json"
    target.write_text("old")
    text = run_text([*DEMO, "--output", str(target)], capsys)
    found = json.loads(target.read_text())
    assert list(tmp_path.iterdir()) == [target]
    for row in found["rows"]:
        name = f"  {row['recipe_name']}   "
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert f" {row['density']:.3f} " in line
        assert f" {error(row['error'])} " in line
    query, key, value = structured_qkv(Hq=2, Hk=1, L=384)
    facts = {"is_causal": True, "enable_gqa": True}
    plan = sparge.make_plan(query, key, **facts, backend=BACKEND)
    for drawn in found["plans"]:
        assert "\n".join(drawn["picture"]) == plan.picture(h=drawn["head"])
        assert drawn["density"] == float(plan.head_density()[0, drawn["head"]])
        assert f"head {drawn['head']}, density {drawn['density']:.3f}" in text
        assert all(line.rstrip() in text for line in drawn["picture"])
    auto = sparge.explain(query, key, value, **facts)
    assert found["auto"] == auto.to_dict()
    dense = f"dense SDPA {found['dense_seconds'] * 1e3:.1f} ms"
    for words in (f"backend {BACKEND}", found["machine_line"], auto.reason, "x the speed", dense):
        assert words in text


def test_progress_is_drawn_on_a_terminal_only(capsys, monkeypatch):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda there=is_terminal: there)
        with cli.progress("walking", 2) as step:
            step()
        drawn = capsys.readouterr().err
        assert ("walking" in drawn and "50%" in drawn) if is_terminal else drawn == ""


def test_a_narrow_terminal_cuts_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    number = "{:.6f}".format
    columns = [Column("text", "text"), Column("a", "a", number), Column("b", "b", number)]
    row = {"text": "a text that is much longer than forty columns", "a": 1234567.25}
    cli.show_table(cli.console(), Table("title", columns, [row]))
    words = capsys.readouterr().out.split()
    assert {*row["text"].split(), "1234567.250000", "–"} <= set(words)


def test_json_has_no_nan():
    data = {"a": [float("nan"), 1.5], "b": (float("inf"), None)}
    assert json.loads(to_json(data)) == {"a": [None, 1.5], "b": [None, None]}
