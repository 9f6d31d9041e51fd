"""`sparge bench --busy`: what it measures, refuses and leaves behind. No test looks at a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from statistics import median

import pytest
import torch

from cli_runs import complaint
from sparge.cli import main
from sparge_tools.bench import busy
from sparge_tools.bench.busy import (
    FEWEST_CALLS,
    LIMITS,
    LOOP,
    BusyCase,
    Figures,
    Untimed,
    at_work,
    measure_busy,
    row_of,
    summarize_busy,
)
from sparge_tools.commands import bench_command

pytestmark = pytest.mark.usefixtures("piped")
TINY = BusyCase(128, 16, causal=True, heads=1, threads=1)
SMALL = ["bench", "--busy", "--lengths", "128", "--head-dims", "16", "--heads", "1"]
SEEN = Untimed("cpu", 0.5, 0.01)


@pytest.fixture
def green(monkeypatch):
    """The self-check has tests of its own. One number of others is enough for the command."""
    monkeypatch.setattr(bench_command, "check_backends", lambda device: [])
    monkeypatch.setattr(bench_command, "OTHERS", (0, 1))


@pytest.fixture
def started(monkeypatch):
    """Every process that is started, in order."""
    found = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(busy.subprocess, "Popen", Noted)
    return found


def gone(processes):
    return all(process.returncode is not None for process in processes)


def ignore(text):
    """Counts no steps."""


def test_the_rows_of_a_case(started):
    steps = []
    before = torch.get_num_threads()
    rows = list(measure_busy([TINY], repeat=3, step=steps.append, others=(0, 1)))
    assert [row["others"] for row in rows] == [0, 1]
    assert steps == ["128 d16 causal 1h 1t, 0 others", "128 d16 causal 1h 1t, 1 others"]
    for row in rows:
        assert (row["length"], row["head_dim"], row["causal"]) == (128, 16, True)
        assert (row["heads"], row["threads"], row["calls"]) == (1, 1, 3)
        assert row["backend"]
        assert 0 < row["density"] <= 1
        assert 0 <= row["error"] < 0.1
        for who in ("sdpa", "auto"):
            assert 0 < row[f"{who}_median_seconds"] <= row[f"{who}_p99_seconds"]
            assert 0 < row[f"{who}_mean_seconds"] <= row[f"{who}_p99_seconds"]
        for name in LIMITS:
            ratio = row[f"auto_{name}_seconds"] / row[f"sdpa_{name}_seconds"]
            assert row[f"{name}_ratio"] == ratio
    assert torch.get_num_threads() == before
    assert len(started) == 1
    assert gone(started)


def test_the_number_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(busy, "SECONDS_PER_ROW", 0.0)
    (row,) = measure_busy([TINY], repeat=None, step=ignore, others=(0,))
    assert row["calls"] == FEWEST_CALLS
    monkeypatch.setattr(busy, "SECONDS_PER_ROW", 1e9)
    monkeypatch.setattr(busy, "MOST_CALLS", 17)
    (row,) = measure_busy([TINY], repeat=None, step=ignore, others=(0,))
    assert row["calls"] == 17


def test_nobody_is_at_work_while_the_caller_has_a_row(started):
    made = measure_busy([TINY], repeat=1, step=ignore, others=(2,))
    next(made)
    assert len(started) == 2
    assert gone(started)


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_the_others_are_gone_if_measuring_raises(fault, monkeypatch, started):
    def fail(*args, **kwargs):
        assert len(started) == 2
        assert all(process.poll() is None for process in started)
        raise fault

    monkeypatch.setattr(busy, "take_turns", fail)
    with pytest.raises(fault):
        list(measure_busy([TINY], repeat=1, step=ignore, others=(2,)))
    assert gone(started)


def test_the_others_use_the_processor():
    with at_work(1) as (other,):
        if not os.path.exists(f"/proc/{other.pid}/stat"):
            pytest.skip("the system does not tell a process's time")
        # It is waited for, without a limit of its own: a busy machine may give it its turn late.
        while not ticks_of(other.pid):
            time.perf_counter()
    assert other.returncode is not None


def ticks_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[11])


def test_the_others_end_by_themselves_if_their_parent_is_gone():
    """The pid of no parent: the loop ends at its first look."""
    done = subprocess.run([sys.executable, "-c", LOOP, "0"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [b"at", b"work"])


def test_a_process_that_does_not_start_is_an_error(monkeypatch, started):
    monkeypatch.setattr(busy, "LOOP", "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="could not be started"), at_work(2):
        pytest.fail("began")
    assert gone(started)


def test_figures_are_those_of_the_calls():
    seconds = [float(n) for n in range(100, 0, -1)]
    assert Figures.of(seconds) == Figures(50.5, 50.5, 99.0)
    assert Figures.of([3.0, 1.0, 1.0]) == Figures(1.0, pytest.approx(5 / 3), 3.0)
    row = row_of(TINY, 1, SEEN, [2.0, 4.0, 6.0], [1.0, 2.0, 9.0])
    assert row["median_ratio"] == median([1.0, 2.0, 9.0]) / 4.0
    assert (row["mean_ratio"], row["p99_ratio"]) == (1.0, 1.5)
    assert (row["sdpa_p99_seconds"], row["auto_p99_seconds"]) == (6.0, 9.0)
    assert (row["others"], row["backend"], row["density"], row["error"]) == (1, "cpu", 0.5, 0.01)


def test_the_summary_counts_rows_within_limits():
    def row(others, *ratios):
        names = ("median_ratio", "mean_ratio", "p99_ratio")
        return {"others": others, **dict(zip(names, ratios, strict=True))}

    rows = [
        row(2, 1.0, 1.2, 1.3),
        row(0, 1.1, 1.1, 1.25),  # the limits are within
        row(0, 1.11, 1.0, 1.2),
        row(0, 0.5, 1.3, 1.2),
        row(0, 0.5, 0.5, 2.0),
    ]
    assert summarize_busy(rows) == [
        {"others": 0, "rows": 4, "median": 0.75, "mean": 0.75, "p99": 0.75, "all": 0.25},
        {"others": 2, "rows": 1, "median": 1.0, "mean": 0.0, "p99": 0.0, "all": 0.0},
    ]
    assert summarize_busy([]) == []


def test_the_document_and_the_table(green, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    target = tmp_path / "busy.json"
    assert main([*SMALL, "--causal", "--repeat", "2", "--output", str(target)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    document = json.loads(target.read_text())
    assert document["format"] == "sparge.bench.busy/1"
    assert {"versions", "machine_line", "isa", "date"} <= set(document)
    assert document["limits"] == LIMITS
    assert [row["others"] for row in document["rows"]] == [0, 1]
    assert document["summary"] == summarize_busy(document["rows"])
    n = torch.get_num_threads()
    assert text.count(f"128 d16 causal 1h {n}t") == 2
    assert "0 other processes: of 1 rows" in text
    assert "1 other process: of 1 rows" in text


def test_shapes_by_default_and_by_options(green, monkeypatch, capsys):
    seen = []

    def note(wanted, **options):
        seen.append((wanted, options["repeat"]))
        return iter(())

    monkeypatch.setattr(bench_command, "measure_busy", note)
    assert main(["bench", "--busy", "--threads", "1,2", "--json"]) == 0
    wanted, repeat = seen.pop()
    assert repeat is None
    assert sorted({case.length for case in wanted}) == [128, 512, 1024, 2048, 8192]
    assert len(set(wanted)) == len(wanted) == 5 * 2 * 2 * 2 * 2
    assert main([*SMALL, "--no-causal", "--threads", "3", "--repeat", "7", "--json"]) == 0
    assert seen.pop() == ([BusyCase(128, 16, causal=False, heads=1, threads=3)], 7)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--suite", "vision"], "--busy measures speed, got the suite vision"),
        (["--suite", "error"], "--busy measures speed, got the suite error"),
        (["--device", "auto"], "--busy is for --device cpu, got --device auto"),
        (["--device", "cuda"], "--busy is for --device cpu, got --device cuda"),
        (["--static"], "--static is not for --busy"),
        (["--full"], "--full is not for --busy"),
        (["--backends", "cpu"], "--backends is not for --busy"),
        (["--contenders", "all"], "--contenders is not for --busy"),
        (["--cases", "3"], "--cases is not for --busy"),
        (["--budgets", "0.5"], "--budgets is not for --busy"),
        (["--update-ratchet", "why"], "--update-ratchet is not for --busy"),
        (["--shapes", "flux"], "--shapes is for --suite vision"),
        (["--head-dims", "4096"], "--head-dims must be from"),
        (["--output", "/nowhere/out.json"], "cannot be written"),
    ],
)
def test_mistakes_are_refused_before_measuring(more, why, capsys, monkeypatch):
    monkeypatch.setattr(bench_command, "check_backends", lambda device: pytest.fail("began"))
    assert why in complaint(["bench", "--busy", *more], capsys)
