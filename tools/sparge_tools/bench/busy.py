"""`sparge bench --busy`: torch's SDPA and sparge's `auto` while other processes use the processor.

The two take turns, and each call's wall time counts, also with one thread: a caller waits for it,
whoever used the core meanwhile. Besides the median there are the mean and the 99th percentile,
because a call that waits for a late thread is rare and long.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge import attention, record
from sparge.api.accuracy import spread_rows
from sparge.cli.self_check import relative_l1
from sparge.routing import AUTO
from sparge.support.turns import take_turns
from sparge.synthetic import structured_qkv

from ..measuring import no_garbage_collection, threads
from .cases import SAMPLED_ROWS, WARM_UP
from .contender import Inputs
from .truth import Truth

OTHERS = (0, 1, 2)
FEWEST_CALLS, MOST_CALLS = 15, 100
SECONDS_PER_ROW = 4.0
LIMITS = {"median": 1.1, "mean": 1.1, "p99": 1.25}
"""Time of `auto` / time of SDPA up to which the summary counts a row as no slower, by figure."""
LOOP = """
import os, sys
print("at work", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
"""What another process runs until it is killed, or until the process that started it is gone."""
Row = dict[str, Any]


@dataclass(frozen=True)
class BusyCase:
    length: int
    head_dim: int
    causal: bool
    heads: int
    threads: int

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.length} d{self.head_dim} {kind} {self.heads}h {self.threads}t"


@dataclass(frozen=True)
class Figures:
    """Of the seconds of one contestant's calls."""

    median: float
    mean: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Figures:
        """p99 is by nearest rank: with fewer than 100 calls, the longest."""
        rank = math.ceil(0.99 * len(seconds))
        return cls(median(seconds), fmean(seconds), sorted(seconds)[rank - 1])


@dataclass(frozen=True)
class Untimed:
    """What `auto` did before timing. error: relative L1 against dense fp64."""

    backend: str
    density: float
    error: float


@contextmanager
def at_work(n: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep `n` other processes busy inside the block; on every way out of it they are killed."""
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-I", "-S", "-c", LOOP, str(os.getpid())]
    quiet = subprocess.DEVNULL  # Ctrl-C reaches them as well, and would print a traceback each
    try:
        for _ in range(n):
            started.append(
                subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
            )
        for other in started:
            assert other.stdout is not None
            if other.stdout.readline().strip() != b"at work":
                raise RuntimeError(f"another process could not be started: {sys.executable}")
        yield started
    finally:
        for other in started:
            other.kill()
        for other in started:
            with other:  # closes its pipe and waits for its end
                pass


def measure_busy(
    wanted: Sequence[BusyCase],
    *,
    repeat: int | None,
    step: Callable[[str], None],
    others: Sequence[int] = OTHERS,
) -> Iterator[Row]:
    """A row for every case and number of other processes.

    repeat: calls of each contestant; None for as many as `SECONDS_PER_ROW` allows. step: called
    after each row with its name.
    """
    for case in wanted:
        inputs = make_inputs(case)
        rows = spread_rows(case.length, SAMPLED_ROWS)
        truth = Truth(*inputs, rows=rows, is_causal=case.causal).dense
        for n in others:
            with threads(case.threads), at_work(n):
                row = measure_row(case, n, inputs, rows=rows, truth=truth, repeat=repeat)
            yield row  # out of the block: nobody is at work while the caller has the row
            step(f"{case}, {n} others")


def make_inputs(case: BusyCase) -> Inputs:
    return structured_qkv(
        Hq=case.heads, Hk=case.heads, L=case.length, D=case.head_dim, dtype=torch.bfloat16
    )


def measure_row(
    case: BusyCase,
    others: int,
    inputs: Inputs,
    *,
    rows: Tensor,
    truth: Tensor,
    repeat: int | None,
) -> Row:
    """Both contestants in turns, in this process, as they are with the threads that are set."""
    dense = partial(F.scaled_dot_product_attention, *inputs, is_causal=case.causal)
    auto = partial(attention, *inputs, is_causal=case.causal, backend=AUTO)
    seen = call_untimed(auto, rows=rows, truth=truth)
    dense()
    with no_garbage_collection():
        times = take_turns(
            [partial(wall_seconds, dense), partial(wall_seconds, auto)],
            rounds=repeat,
            seconds=SECONDS_PER_ROW,
            fewest=FEWEST_CALLS,
            most=MOST_CALLS,
            warm_up=WARM_UP,
        )
    return row_of(case, others, seen, *times)


def call_untimed(auto: Callable[[], Tensor], *, rows: Tensor, truth: Tensor) -> Untimed:
    """Call twice, and look at the second call: the first may calibrate."""
    auto()
    with record() as runs:
        out = auto()
    (run,) = runs
    return Untimed(run.backend, 1 - run.sparsity, relative_l1(out[:, :, rows], truth))


def wall_seconds(work: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    out = work()
    seconds = time.perf_counter() - start
    del out  # freed after the time is taken
    return seconds


def row_of(
    case: BusyCase, others: int, seen: Untimed, dense: Sequence[float], auto: Sequence[float]
) -> Row:
    """dense, auto: seconds of each call. Ratios are `auto` / SDPA: below 1 sparge is faster."""
    sdpa, ours = asdict(Figures.of(dense)), asdict(Figures.of(auto))
    return {
        "others": others,
        **asdict(case),
        **asdict(seen),
        "calls": len(dense),
        **{f"sdpa_{name}_seconds": sdpa[name] for name in LIMITS},
        **{f"auto_{name}_seconds": ours[name] for name in LIMITS},
        **{f"{name}_ratio": ours[name] / sdpa[name] for name in LIMITS},
    }


def summarize_busy(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """By number of other processes: the share of rows within each limit, and within all three."""
    found = []
    for n in sorted({row["others"] for row in rows}):
        own = [row for row in rows if row["others"] == n]
        within = [{name: row[f"{name}_ratio"] <= LIMITS[name] for name in LIMITS} for row in own]
        shares = {name: fmean(each[name] for each in within) for name in LIMITS}
        everything = fmean(all(each.values()) for each in within)
        found.append({"others": n, "rows": len(own), **shares, "all": everything})
    return found


def busy_cases(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    causal: Sequence[bool],
    heads: Sequence[int],
    n_threads: Sequence[int],
) -> list[BusyCase]:
    return [BusyCase(*each) for each in product(lengths, head_dims, causal, heads, n_threads)]
