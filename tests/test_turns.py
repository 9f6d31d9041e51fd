"""Timing in turns: order, budget, warm-up, limit, and the clock."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import pytest
import torch

from sparge.support.turns import clock, take_turns, timed
from sparge_tools.measuring import no_garbage_collection, threads


class FakeTime:
    """A clock that moves only when a contestant runs."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("sparge.support.turns.time.perf_counter", lambda: self.now)

    def contestants(self, order, names, seconds):
        def runner(name):
            def run():
                order.append(name)
                self.now += seconds
                return seconds

            return run

        return [runner(name) for name in names]


@pytest.fixture
def fake_time(monkeypatch):
    return FakeTime(monkeypatch)


@pytest.mark.parametrize("warm_up, extra", [(1.0, 1), (0.2, 0), (0.0, 0)])
def test_rounds_alternate_and_a_short_first_round_is_discarded(fake_time, warm_up, extra):
    order = []
    contestants = fake_time.contestants(order, "abc", 0.1)
    times = take_turns(contestants, rounds=3, seconds=60.0, fewest=9, warm_up=warm_up)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc"] * extra + ["abc", "cba", "abc"]
    assert times == [[0.1] * 3] * 3


@pytest.mark.parametrize("each, rounds", [(0.001, 25), (0.5, 10), (100.0, 3)])
def test_rounds_follow_the_budget(fake_time, each, rounds):
    contestants = fake_time.contestants([], "a", each)
    (times,) = take_turns(contestants, seconds=5.0, fewest=3, most=25)
    assert len(times) == rounds


def test_a_round_is_never_cut_short(fake_time):
    times = take_turns(fake_time.contestants([], "abcd", 1.0), seconds=5.5)
    assert [len(own) for own in times] == [2, 2, 2, 2]


def test_a_machine_that_is_too_slow_is_an_error(fake_time):
    with pytest.raises(RuntimeError, match=r"^1 rounds of measuring took 6.0 s and 3 are needed"):
        take_turns(fake_time.contestants([], "ab", 3.0), fewest=3, limit=5.0)
    # Not once there are enough rounds.
    times = take_turns(fake_time.contestants([], "ab", 3.0), fewest=2, limit=11.0)
    assert [len(own) for own in times] == [2, 2]


def test_one_thread_is_timed_by_its_own_time(monkeypatch):
    with threads(1):
        fine = time.get_clock_info("thread_time").resolution < 1e-6
        assert clock() is (time.thread_time if fine else time.perf_counter)
        seconds, done = timed(lambda: time.sleep(0.05) or "done")
        assert done == "done"
        assert seconds < 0.04 or not fine
        coarse = SimpleNamespace(resolution=1e-3)
        monkeypatch.setattr(time, "get_clock_info", lambda name: coarse)
        assert clock() is time.perf_counter
    with threads(2):
        assert clock() is time.perf_counter


def test_threads_and_garbage_collection_are_restored():
    before = torch.get_num_threads()
    assert gc.isenabled()

    def fail():
        assert torch.get_num_threads() == before + 1
        assert not gc.isenabled()
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"), threads(before + 1), no_garbage_collection():
        fail()
    assert torch.get_num_threads() == before
    assert gc.isenabled()
