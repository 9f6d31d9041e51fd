"""The first call on a card that might profit measures; others, and those beside it, do not.

Times are pretended (tests/support/gpus.py): trials and fits are real, and run on the processor."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest
import torch

from calls import a_call
from gpus import PretendedClock, a_4090, an_h100, compared, gpu_call, pretend, properties
from sparge import DEFAULT, VISION, KeepAll, Recipe
from sparge.backends.reference import REFERENCE
from sparge.backends.triton.rates import RATES
from sparge.routing import Router, calibration, choose, cost_file, current_router
from sparge.routing.calibration import Bench
from sparge.routing.crossover import costs_of
from sparge.support.cache_directory import cache_directory
from sparge.values.backend import DENSE_LSE, ESTIMATED, MEASURED, Measuring

FAST, SLOW = {"ours": 1e-12, "dense": 1e-11}, {"ours": 1e-11, "dense": 1e-12}


def run(call):
    """As `attention` chooses for a call that runs."""
    return current_router().calibrate(call, choose(call))


@pytest.fixture
def h100(monkeypatch):
    pretend(monkeypatch, an_h100())


# --- measuring --------------------------------------------------------------------------------


@pytest.mark.parametrize("speeds, backend", [(FAST, "triton"), (SLOW, "dense")])
@pytest.mark.parametrize("recipe", [DEFAULT, VISION])
def test_the_first_call_measures_its_own_kind_and_is_chosen_by_it(
    h100, monkeypatch, speeds, backend, recipe, new_router
):
    clock = PretendedClock(monkeypatch, new_router, **speeds)
    call = gpu_call(recipe=recipe)
    assert choose(call).estimate.source == ESTIMATED
    assert clock.measured == [], "choosing alone measures nothing"
    choice = run(call)
    assert (choice.backend, choice.estimate.source) == (backend, MEASURED)
    assert clock.measured == [("bf16/128/dense", "bf16/128/int8")]
    assert clock.thread is not threading.current_thread()
    assert run(gpu_call(65536, recipe=recipe)).estimate.source == MEASURED
    assert len(clock.measured) == 1
    stored, _ = cost_file.read(current_router().key("triton", "cuda"), complete=False)
    assert set(stored.costs) == set(costs_of(call))
    assert compared(call, Router()).source == MEASURED


def test_the_pretended_times_come_out_as_costs(h100, monkeypatch, new_router):
    PretendedClock(monkeypatch, new_router, ours=3e-12, dense=7e-12)
    run(gpu_call())
    costs = current_router().crossover("triton", "cuda").costs
    assert costs["bf16/128/dense"].element == pytest.approx(7e-12)
    assert costs["bf16/128/int8"].element == pytest.approx(3e-12 / 0.5, rel=0.35), "of those kept"


def test_another_kind_is_measured_later_and_added(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    run(gpu_call())
    half = replace(DEFAULT, precision="half")
    run(gpu_call(recipe=half))
    run(gpu_call(return_lse=True))
    run(gpu_call(D=96, Dv=96))
    assert clock.measured[1:] == [
        ("bf16/128/dense", "bf16/128/half"),
        (f"bf16/128/{DENSE_LSE}", "bf16/128/int8"),
        ("bf16/64/dense", "bf16/64/int8", "bf16/128/dense", "bf16/128/int8"),
    ]
    stored, _ = cost_file.read(current_router().key("triton", "cuda"), complete=False)
    assert set(stored.costs) == {name for wanted in clock.measured for name in wanted}


@pytest.mark.parametrize(
    "card, facts",
    [
        (an_h100(), {"L": 4096}),
        (an_h100(), {"Lq": 1}),
        (an_h100(), {"needs_grad": True}),
        (an_h100(), {"recipe": Recipe(KeepAll(), precision="exact")}),
        # 480 instructions a pair: no measurement would make it faster.
        (
            properties("Radeon", gcnArchName="gfx1100"),
            {"recipe": replace(DEFAULT, precision="exact")},
        ),
    ],
)
def test_calls_that_would_not_profit_measure_nothing(monkeypatch, card, facts, new_router):
    pretend(monkeypatch, card)
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    assert run(gpu_call(**facts)).backend == "dense"
    assert clock.measured == []


@pytest.mark.parametrize("L, measures", [(32768, True), (4096, False)])
def test_a_card_without_an_estimate_is_measured_by_a_long_call(
    monkeypatch, L, measures, new_router
):
    pretend(monkeypatch, properties("New GPU", 11, 0))
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    choice = run(gpu_call(L))
    assert bool(clock.measured) == measures
    assert choice.backend == ("triton" if measures else "dense")


def test_measuring_inside_a_call_can_be_turned_off(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    assert run(gpu_call()).estimate.source == ESTIMATED
    monkeypatch.setenv("SPARGE_CALIBRATE", "no")
    with pytest.raises(ValueError, match=r"SPARGE_CALIBRATE must be 0 .* or 1, got no"):
        run(gpu_call())
    assert clock.measured == []
    monkeypatch.setenv("SPARGE_CALIBRATE", "1")
    assert run(gpu_call()).estimate.source == MEASURED


def test_nothing_is_measured_inside_a_capture(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert run(gpu_call()).estimate.source == ESTIMATED
    assert clock.measured == []
    assert run(gpu_call()).estimate.source == MEASURED


def test_nothing_is_measured_inside_a_trace(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    provisional = choose(gpu_call())
    assert provisional.provisional
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert current_router().calibrate(gpu_call(), provisional) is provisional
    assert run(gpu_call()).reason.endswith("can serve this call"), "decided when it runs"
    assert clock.measured == []


def test_threads_that_come_meanwhile_do_not_wait(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)
    begun, go_on = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert go_on.wait(30)

    clock.before_each = wait
    first = threading.Thread(target=run, args=(gpu_call(),))
    first.start()
    assert begun.wait(30)
    assert run(gpu_call()).estimate.source == ESTIMATED
    assert run(gpu_call(dtype=torch.float16)).estimate.source == ESTIMATED
    go_on.set()
    first.join()
    assert run(gpu_call()).estimate.source == MEASURED
    assert len(clock.measured) == 1, "one at a time on a card"
    assert run(gpu_call(dtype=torch.float16)).estimate.source == MEASURED


def test_a_failure_is_told_and_tried_once(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)

    def fail():
        raise torch.OutOfMemoryError("none left")

    clock.before_each = fail
    router = current_router()
    cached = router.answer("a call", lambda: choose(gpu_call()))
    for _ in range(3):
        choice = run(gpu_call())
        assert choice.estimate.source == ESTIMATED
        assert "calibration failed: OutOfMemoryError: none left" in choice.estimate.reason
    assert len(clock.measured) == 1
    again = router.answer("a call", lambda: choose(gpu_call()))
    assert again is not cached, "choices made before do not know of the failure"
    assert router.failure("triton", "cuda") == "OutOfMemoryError: none left"
    clock.before_each = lambda: None
    run(gpu_call(dtype=torch.float16))
    assert router.failure("triton", "cuda") == ""


def test_an_interrupted_measurement_is_tried_again(h100, monkeypatch, new_router):
    clock = PretendedClock(monkeypatch, new_router, **FAST)

    def interrupted(measure):
        raise KeyboardInterrupt

    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr("sparge.routing.router.measure_apart", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(gpu_call())
    assert not cache_directory().exists()
    assert run(gpu_call()).estimate.source == MEASURED
    assert len(clock.measured) == 1


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("free, enough", [(8 << 30, True), (600 << 20, False)])
def test_a_card_that_a_model_fills_is_not_measured(h100, monkeypatch, free, enough):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free - (64 << 20), 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 128 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 64 << 20)
    assert calibration.free_bytes(torch.device("cuda", 0)) == free
    bench = Bench(None, RATES.measuring(("cuda", 0)), wanted=costs_of(gpu_call()))
    needed = bench.needed_bytes()
    assert needed < 1 << 30
    if enough:
        calibration.check_memory(needed, free, calibration.MOST_OF_FREE)
        return
    with pytest.raises(MemoryError, match=r"needs 0\.\d+ GB .* 50% of the 0\.59 GB that are free"):
        calibration.check_memory(needed, free, calibration.MOST_OF_FREE)
    # The whole way: before anything is put on the card.
    monkeypatch.setattr(Bench, "trials", None)
    choice = run(gpu_call())
    assert "calibration failed: MemoryError: measuring needs" in choice.estimate.reason


def test_memory_that_torch_does_not_tell_is_not_guessed():
    assert calibration.free_bytes(torch.device("cpu")) is None
    calibration.check_memory(1 << 40, None, 0.5)


def test_what_trials_hold_is_counted():
    how = Measuring("cpu", 2, (128, 256), (128,), 0.0, 0.0, 1)
    half, single = ("bf16/64/dense", "bf16/64/int8"), ("fp32/128/dense+lse", "fp32/128/int8")
    for wanted in (half, single, None):
        bench = Bench(REFERENCE, how, wanted)
        made = {
            x.data_ptr(): x.nbytes
            for of_lengths in bench.trials().values()
            for trial in of_lengths
            for x in trial.inputs
        }
        scores = 0 if wanted == half else 4 * 2 * 128**2 * 4
        assert bench.needed_bytes() == 4 * sum(made.values()) + scores


# --- the log ----------------------------------------------------------------------------------


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="sparge")
    return caplog


def test_one_line_when_an_unmeasured_card_runs_dense(h100, monkeypatch, log):
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    vision = {"recipe": VISION, "is_causal": False, "Hk": 32}
    for L in (32768, 65536):
        assert choose(gpu_call(L, **vision)).backend == "dense"
    (line,) = log.records
    assert (line.levelno, line.name) == (logging.WARNING, "sparge")
    words = line.getMessage()
    for needed in (
        "NVIDIA H100 80GB HBM3 (cuda:0)",
        "roofline estimate",
        "`sparge doctor --calibrate`",
        'backend="triton"',
    ):
        assert words.count(needed) == 1, needed


def test_one_line_when_dense_was_measured_to_be_faster(h100, monkeypatch, log, new_router):
    PretendedClock(monkeypatch, new_router, **SLOW)
    for _ in range(2):
        assert run(gpu_call()).backend == "dense"
    (line,) = log.records
    assert line.levelno == logging.INFO
    assert "measured on this machine" in line.getMessage()
    assert "doctor" not in line.getMessage()


def test_one_line_for_a_card_that_nothing_is_known_of(monkeypatch, log):
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    pretend(monkeypatch, properties("New GPU", 11, 0), properties("New GPU", 11, 0))
    for index in (0, 0, 1):
        choose(gpu_call(index=index))
    assert ["cuda:0" in line.getMessage() for line in log.records] == [True, False], (
        "once for each card"
    )
    assert log.records[0].levelno == logging.WARNING
    assert "(sm_110) is not known here" in log.records[0].getMessage()


def test_nothing_is_logged_where_dense_is_as_it_should_be(monkeypatch, log):
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    pretend(monkeypatch, a_4090())
    choose(gpu_call())
    for facts in ({"L": 512}, {"Lq": 1}, {"recipe": Recipe(KeepAll())}, {"needs_grad": True}):
        assert choose(gpu_call(**facts)).backend == "dense"
    choose(a_call(4096))
    assert log.records == []
