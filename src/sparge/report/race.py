"""Contenders in turns, round by round, so that a machine that slows down slows all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from .contender import Contender

MIN_ROUNDS, MAX_ROUNDS = 3, 25
SECONDS_PER_CASE = 5.0
SECONDS_OF_A_LONG_ROUND = 2.0
"""In a round longer than this the first one counts: what a cold start costs is lost in it."""


def race(
    contenders: Sequence[Contender], *, repeat: int | None, reached: Callable[[float], None]
) -> int:
    """The rounds that were measured: `repeat`, or as many as the time of one allows.

    reached: told which share of the race is done, between turns.
    """
    with quiet():
        start = time.perf_counter()
        for contender in contenders:
            contender.take_turn()
        seconds = time.perf_counter() - start
        is_long = seconds > SECONDS_OF_A_LONG_ROUND
        if not is_long:
            for contender in contenders:
                contender.forget_turns()
        rounds = repeat or rounds_for(seconds)
        for i in range(1 if is_long else 0, rounds):
            # There and back: nobody runs behind the same neighbour every time.
            for turn, contender in enumerate(contenders[:: 1 if i % 2 == 0 else -1]):
                reached((i + turn / len(contenders)) / rounds)
                contender.take_turn()
    reached(1.0)
    return rounds


def rounds_for(seconds: float) -> int:
    """How many rounds of this length fit, within bounds."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(SECONDS_PER_CASE / max(seconds, 1e-9))))


@contextmanager
def quiet() -> Iterator[None]:
    """Python collects no garbage meanwhile."""
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
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)
