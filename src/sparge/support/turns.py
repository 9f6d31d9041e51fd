"""Timing in turns: contestants run round after round, so a machine that slows down slows all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
Contestant = Callable[[], float]
"""Runs once and returns the seconds that count."""


def take_turns(
    contestants: Sequence[Contestant],
    *,
    seconds: float = 0.0,
    fewest: int = 1,
    most: int | None = None,
    warm_up: float = 0.0,
    limit: float | None = None,
    reached: Callable[[float], None] = lambda share: None,
) -> list[list[float]]:
    """Run whole rounds of all contestants; return each one's times, one per round.

    Every second round runs in reverse order, so nobody always follows the same neighbour.

    seconds: time budget; rounds are added until it is spent. fewest, most: bounds on the rounds.
    warm_up: a first round shorter than this many seconds is discarded; in a longer one the cost
    of a cold start is negligible, and it counts.
    limit: seconds after which RuntimeError is raised if `fewest` rounds are not complete.
    reached: called between turns with the share of the work done, from 0 to 1.
    """
    times: list[list[float]] = [[] for _ in contestants]
    start = time.perf_counter()
    if warm_up:
        for own, contestant in zip(times, contestants, strict=True):
            own.append(contestant())
        if time.perf_counter() - start < warm_up:
            times, start = [[] for _ in contestants], time.perf_counter()
    while True:
        rounds, spent = len(times[0]), time.perf_counter() - start
        if rounds >= fewest and (spent >= seconds or rounds == most):
            break
        step = 1 if rounds % 2 == 0 else -1
        for turn, i in enumerate(range(len(contestants))[::step]):
            spent = time.perf_counter() - start
            reached(_share(rounds + turn / len(contestants), spent, seconds, fewest, most))
            if limit is not None and spent > limit and rounds < fewest:
                raise RuntimeError(
                    f"{rounds} rounds of measuring took {spent:.1f} s and {fewest} are needed: "
                    "other programs use these cores, or there are fewer cores than torch's "
                    f"{torch.get_num_threads()} threads; measure again on a quiet machine"
                )
            times[i].append(contestants[i]())
    reached(1.0)
    return times


def _share(done: float, spent: float, seconds: float, fewest: int, most: int | None) -> float:
    by_budget = 1.0 if seconds == 0 else spent / seconds
    by_most = 0.0 if most is None else done / most
    return min(1.0, max(by_most, min(by_budget, done / fewest)))


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The seconds that `work` took by `clock()`, and what it returned."""
    now = clock()
    start = now()
    done = work()
    return now() - start, done


def clock() -> Callable[[], float]:
    """With one thread, CPU time if its resolution is under 1 µs; else wall time.

    CPU time does not grow while other programs use the core.
    """
    alone = torch.get_num_threads() == 1 and hasattr(time, "thread_time")
    fine = alone and time.get_clock_info("thread_time").resolution < 1e-6
    return time.thread_time if fine else time.perf_counter


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, then keep Python's garbage collector off until the end of the block."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Set torch's number of threads to `n` inside the block."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)
