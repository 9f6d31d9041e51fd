"""Measuring the crossover, and keeping it in the user's cache directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

import sparge
from calls import BUILT_IN, only, tensors
from cli_runs import complaint, run_json, run_text
from sparge import KeepFraction, Recipe
from sparge.backends.cpu import CPU_BACKEND
from sparge.backends.cpu import library as native
from sparge.routing import backends, current_router
from sparge.routing import cost_file as cache
from sparge.support.cache_directory import cache_directory
from sparge.values.backend import cost_names

KEY = {"cpu": "Fast", "isa": "avx2", "threads": "1"}
MEASURED = replace(BUILT_IN, key=KEY, date="2026-01-01", took=1.5, noise=1.1, measured=True)
RECIPE = Recipe(KeepFraction(0.5))


# --- measuring --------------------------------------------------------------------------------


@pytest.fixture
def quick(new_router):
    """Measure in earnest, with the fewest turns."""

    def quick(limit=60.0):
        def how(place):
            sizes = {"lengths": (128, 256), "seconds": 0.0, "fewest_rounds": 1, "limit": limit}
            return replace(CPU_BACKEND.cost.measuring(place), **sizes)

        backend = replace(CPU_BACKEND, cost=replace(CPU_BACKEND.cost, measuring=how))
        new_router([backend if b.name == "cpu" else b for b in backends()])

    quick()
    return quick


def measure():
    return current_router().measure("cpu", "cpu")


def test_measuring_gives_a_whole_model(quick):
    state = torch.get_rng_state()
    found = measure()
    assert torch.equal(torch.get_rng_state(), state)
    assert list(found.costs) == cost_names()
    assert all(cost.element > 0 and cost.call >= 0 for cost in found.costs.values())
    assert found.measured
    assert found.noise >= 1
    assert (found.key["threads"], found.key["isa"]) == ("1", native.available()[0])
    assert cache.write(found) == ""
    assert cache.read(found.key)[0] == found


@pytest.mark.parametrize("share, steady", [(0.97, True), (0.62, False)])
def test_processor_time_tells_how_busy_the_machine_was(quick, monkeypatch, share, steady):
    """The spread of the turns does not: a program that runs all the time slows all of them."""
    monkeypatch.setattr(time, "process_time", lambda: time.perf_counter() * share)
    found = measure()
    assert found.busy == pytest.approx(1 - share, abs=0.01)
    assert found.noise > 1.5 or found.steady == steady


def test_a_machine_that_is_too_busy_says_so(quick):
    quick(limit=0.0)
    with pytest.raises(RuntimeError, match="other programs use these cores"):
        measure()


class Seen(list):
    """Threads that measured. measure: what measures, in place of the real thing."""


@pytest.fixture
def unmeasured(new_router):
    """As on a machine that sparge is new to; `measure` counts and gives MEASURED."""
    seen = Seen()

    def measure(proceed):
        seen.append(threading.current_thread())
        return MEASURED

    seen.measure = measure
    new_router(costs={}, measure=lambda backend, place, *, proceed, **rest: seen.measure(proceed))
    return seen


def a_run(L=1024, **options):
    q, k, v = tensors(Lq=L, Lk=L)
    with sparge.record() as runs:
        sparge.attention(q, k, v, recipe=RECIPE, **options)
    return only(runs)


def test_the_first_call_that_needs_it_measures_and_no_other(unmeasured):
    a_run(140)
    a_run(backend="cpu")
    assert "built-in estimate" in sparge.explain(*tensors(Lq=1024, Lk=1024), recipe=RECIPE).reason
    assert unmeasured == []
    assert "(measured on this machine)" in a_run().reason
    assert unmeasured[0] is not threading.current_thread()
    assert len(os.listdir(cache_directory())) == 1
    assert "(measured on this machine)" in a_run().reason
    assert "measured on" in sparge.explain(*tensors(Lq=1024, Lk=1024), recipe=RECIPE).reason
    assert len(unmeasured) == 1
    torch.set_num_threads(2)
    assert "(measured on this machine)" in a_run().reason
    assert len(unmeasured) == 2


def test_measuring_that_fails_is_tried_once_and_fails_no_call(unmeasured, monkeypatch):
    tries = []

    def fail(proceed):
        tries.append(1)
        raise MemoryError("none left")

    unmeasured.measure = fail
    for _ in range(3):
        assert "built-in estimate" in a_run().reason
    assert tries == [1]


def test_a_measurement_that_cannot_be_kept_holds_in_memory(unmeasured, monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "taken"))
    for _ in range(2):
        assert "(measured on this machine)" in a_run().reason
    assert len(unmeasured) == 1


def test_threads_that_come_while_it_is_measured_do_not_wait(unmeasured, monkeypatch):
    begun, go_on, measure = threading.Event(), threading.Event(), unmeasured.measure

    def slowly(proceed):
        begun.set()
        assert go_on.wait(30)
        return measure(proceed)

    unmeasured.measure = slowly
    first = threading.Thread(target=a_run)
    first.start()
    assert begun.wait(30)
    assert "built-in estimate" in a_run().reason
    go_on.set()
    first.join()
    assert "(measured on this machine)" in a_run().reason
    assert len(unmeasured) == 1


def test_nothing_is_measured_or_read_while_a_graph_is_traced(unmeasured, monkeypatch):
    torch._dynamo.reset()
    f = torch.compile(
        lambda q, k, v: sparge.attention(q, k, v, recipe=RECIPE),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = tensors(Lq=1024, Lk=1024)
    with sparge.record() as runs, torch.no_grad():
        f(q, k, v)
    assert "(measured on this machine)" in only(runs).reason, "by the op, when it ran"
    assert len(unmeasured) == 1
    torch._dynamo.reset()


def test_calibration_inside_a_call_can_be_turned_off(unmeasured, monkeypatch):
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    run = a_run()
    assert (unmeasured, run.cost_source) == ([], "estimate")
    assert "built-in estimate" in run.reason
    monkeypatch.setenv("SPARGE_CALIBRATE", "no")
    with pytest.raises(ValueError, match=r"SPARGE_CALIBRATE must be 0 .* or 1, got no"):
        a_run()
    monkeypatch.setenv("SPARGE_CALIBRATE", "1")
    assert a_run().cost_source == "measured"
    assert len(unmeasured) == 1


def test_a_failure_is_kept_and_shown(unmeasured, monkeypatch, capsys):
    def fail(proceed):
        raise MemoryError("none left")

    unmeasured.measure = fail
    monkeypatch.setattr("sparge.cli.doctor_command.check_backends", lambda device: [])
    run = a_run()
    assert run.cost_source == "estimate"
    assert "calibration failed: MemoryError: none left" in run.reason
    assert run_json(["doctor"], capsys)["crossover"]["failure"] == "MemoryError: none left"
    assert "calibration failed" in run_text(["doctor"], capsys)


def test_an_interrupted_calibration_ends_its_thread_and_is_tried_again(unmeasured, monkeypatch):
    """Ctrl-C: the thread was left running native code, and nothing was measured afterwards."""
    measure, ended = unmeasured.measure, threading.Event()
    # A process that a shell started in the background ignores SIGINT, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(proceed):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            for _ in range(3000):
                time.sleep(0.01)
                proceed()
        finally:
            ended.set()

    unmeasured.measure = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            a_run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
    assert "sparge-calibrate" not in {thread.name for thread in threading.enumerate()}
    assert not cache_directory().exists()
    unmeasured.measure = measure
    assert a_run().cost_source == "measured"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_in_a_real_calibration_ends_the_process_as_python_does(tmp_path):
    code = (
        "import os, signal, threading, time, torch, sparge\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt():\n"
        "    while 'sparge-calibrate' not in {t.name for t in threading.enumerate()}:\n"
        "        time.sleep(0.001)\n"
        "    time.sleep(0.2); os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "x = torch.randn(1, 2, 2048, 64)\n"
        "try:\n    sparge.attention(x, x, x)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
        "with sparge.record() as runs:\n    sparge.attention(x, x, x)\n"
        "print(runs[0].cost_source)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SPARGE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.stderr == ""
    assert done.stdout == "interrupted\nmeasured\n"
    assert done.returncode == 0


# --- a machine that was busy ------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts, hours, again",
    [
        ({}, 2, False),
        ({"noise": 1.8}, 0, False),
        ({"noise": 1.8}, 2, True),
        ({"busy": 0.5}, 2, True),
        ({"noise": 1.8, "date": "yesterday"}, 0, True),
    ],
)
def test_a_measurement_of_a_busy_machine_is_repeated_later(unmeasured, facts, hours, again):
    """In another process: this one has read what an earlier one wrote."""
    date = (datetime.now(timezone.utc) - timedelta(hours=hours)).isoformat()
    key = current_router().key("cpu", "cpu")
    earlier = replace(MEASURED, key=key, **{"date": date, **facts})
    assert cache.write(earlier) == ""
    run = a_run()
    assert run.cost_source == "measured"
    assert ("while it was busy" in run.reason) == (bool(facts) and not again)
    assert len(unmeasured) == again
    a_run()
    assert len(unmeasured) == again


# --- doctor and the environment ---------------------------------------------------------------


@pytest.mark.usefixtures("piped")
def test_doctor_calibrates(quick, capsys, monkeypatch):
    monkeypatch.setattr("sparge.cli.doctor_command.check_backends", lambda device: [])
    before = run_json(["doctor"], capsys)
    assert before["crossover"]["state"] == "none"
    assert "nothing was measured yet" in run_text(["doctor"], capsys)
    found = run_json(["doctor", "--calibrate"], capsys)["crossover"]
    assert found["state"] == "measured now"
    assert Path(found["file"]).exists()
    assert list(found["costs"]) == cost_names()
    assert len(found["rows"]) == 6
    after = run_json(["doctor"], capsys)
    assert after["crossover"] == {**found, "state": "measured before"}
    assert after["native"]["runs"] == native.available()[0]
    assert "tiles" not in after["native"]["available"]
    text = run_text(["doctor"], capsys)
    for words in ("measured before", found["file"], found["date"], "SPARGE_ISA", "dense from"):
        assert words in text
    Path(found["file"]).write_text("{")
    assert "damaged" in run_json(["doctor"], capsys)["crossover"]["why"]
    assert run_json(["doctor", "--calibrate"], capsys)["crossover"]["why"] == ""


@pytest.mark.usefixtures("piped")
def test_doctor_says_what_could_not_be_kept(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sparge.cli.doctor_command.check_backends", lambda device: [])
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "taken"))
    assert "kept in memory" in run_text(["doctor", "--calibrate"], capsys)


def test_doctor_without_a_native_core(capsys, monkeypatch):
    monkeypatch.setattr(native, "why_missing", lambda: "it was not built")
    message = complaint(["doctor", "--calibrate"], capsys, code=3)
    assert "cpu: it was not built" in message


@pytest.mark.parametrize(
    "isa, why", [("avx1024", "no instruction set has that name"), ("amx", "does not have it")]
)
def test_an_instruction_set_that_is_not_there(isa, why, monkeypatch, capsys):
    if isa in native.available():
        pytest.skip("this machine has it")
    monkeypatch.setenv("SPARGE_ISA", isa)
    for backend in ("auto", "cpu"):
        with pytest.raises(ValueError, match=f"SPARGE_ISA={isa}: .*{why}.*here are") as caught:
            sparge.attention(*tensors(), backend=backend)
        assert "tiles" not in str(caught.value)
    assert f"SPARGE_ISA={isa}" in complaint(["doctor"], capsys)


def test_the_instruction_set_that_is_asked_for_runs(monkeypatch):
    for isa in native.available():
        monkeypatch.setenv("SPARGE_ISA", isa)
        assert a_run(140, backend="cpu").isa == isa
