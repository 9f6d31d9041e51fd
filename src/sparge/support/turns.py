"""Timing in turns: contestants run round after round, so a machine that slows down slows all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Timer(Protocol):
    """Runs work; returns the seconds that it took, and what it returned."""

    def __call__(self, work: Callable[[], T], /) -> tuple[float, T]: ...


Contestant = Callable[[], float]
"""Runs once and returns the seconds that count."""
HOST = ("cpu", "meta")
"""Types of devices that nobody waits for."""


def take_turns(
    contestants: Sequence[Contestant],
    *,
    rounds: int | None = None,
    seconds: float = 0.0,
    fewest: int = 1,
    most: int | None = None,
    warm_up: float = 0.0,
    limit: float | None = None,
) -> list[list[float]]:
    """Run whole rounds of all contestants; return each one's times, one per round.

    Every second round runs in reverse order, so nobody always follows the same neighbour.

    rounds: how many; None: rounds are added until the budget of `seconds` is spent, at least
    `fewest` and at most `most`.
    warm_up: a first round shorter than this many seconds is discarded; in a longer one the cost
    of a cold start is negligible, and it counts.
    limit: seconds after which RuntimeError is raised if `fewest` rounds are not complete.
    """
    if rounds is not None:
        seconds, fewest = 0.0, rounds
    times: list[list[float]] = [[] for _ in contestants]
    start = time.perf_counter()
    if warm_up:
        for own, contestant in zip(times, contestants, strict=True):
            own.append(contestant())
        if time.perf_counter() - start < warm_up:
            times, start = [[] for _ in contestants], time.perf_counter()
    while True:
        done = len(times[0])
        if done >= fewest and (done == most or time.perf_counter() - start >= seconds):
            return times
        for i in range(len(contestants))[:: 1 if done % 2 == 0 else -1]:
            spent = time.perf_counter() - start
            if limit is not None and spent > limit and done < fewest:
                raise RuntimeError(
                    f"{done} rounds of measuring took {spent:.1f} s and {fewest} are needed: "
                    "other programs use these cores, or there are fewer cores than torch's "
                    f"{torch.get_num_threads()} threads; measure again on a quiet machine"
                )
            times[i].append(contestants[i]())


def timed(work: Callable[[], T], /) -> tuple[float, T]:
    """The seconds that `work` took by `clock()`, and what it returned."""
    now = clock()
    start = now()
    done = work()
    return now() - start, done


def timer(device: str) -> Timer:
    """`timed`, for work on a device. An accelerator works on its own after a launch: it is waited
    for before and after, so that launching counts as it does for a caller who waits."""

    def timed_there(work: Callable[[], T], /) -> tuple[float, T]:
        torch.accelerator.synchronize(torch.device(device))
        start = time.perf_counter()
        done = work()
        torch.accelerator.synchronize(torch.device(device))
        return time.perf_counter() - start, done

    return timed if torch.device(device).type in HOST else timed_there


def clock() -> Callable[[], float]:
    """With one thread, CPU time if its resolution is under 1 µs; else wall time.

    CPU time does not grow while other programs use the core.
    """
    alone = torch.get_num_threads() == 1 and hasattr(time, "thread_time")
    fine = alone and time.get_clock_info("thread_time").resolution < 1e-6
    return time.thread_time if fine else time.perf_counter
