"""The cases of a benchmark: one length, head dim, diagonal and number of threads at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..accuracy import sample_rows
from ..support.turns import no_garbage_collection, take_turns, threads
from ..synthetic import structured_qkv
from .case_rows import case_rows
from .compiled_flex import CompiledFlex
from .contender import Contender, Flex, Inputs, Sparse
from .lineup import DTYPES, FLEX, SDPA, Entry

SAMPLED_ROWS = 64
"""Query rows of each head on which errors are measured."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
SECONDS_PER_CASE = 5.0
WARM_UP = 2.0
"""A first round shorter than this many seconds is discarded."""
PROBE_LENGTH = 1024
COMPILE_SECONDS = 8.0
INPUT_SECONDS_PER_TOKEN = 0.001
"""Both measured on one slow core; used only to estimate the duration of a run."""


@dataclass(frozen=True)
class Case:
    length: int
    head_dim: int
    causal: bool
    threads: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.length} d{self.head_dim} {kind} {self.threads}t"


def cases(
    lengths: Sequence[int], head_dims: Sequence[int], causal: Sequence[bool], n: Sequence[int]
) -> list[Case]:
    return [
        Case(length, head_dim, is_causal, threads)
        for length in lengths
        for head_dim in head_dims
        for threads in n
        for is_causal in causal
    ]


def measure_cases(
    wanted: Sequence[Case],
    entries: Sequence[Entry],
    *,
    heads: int,
    repeat: int | None,
    reached: Callable[[int, float], None],
) -> Iterator[dict[str, Any]]:
    """The rows of every case. reached: called with the index of the case and its share done."""
    made: tuple[int, int] | None = None
    inputs: dict[str, Inputs] = {}
    for i, case in enumerate(wanted):
        if made != (case.length, case.head_dim):
            made = (case.length, case.head_dim)
            inputs = make_inputs(case, heads)
        with threads(case.threads):
            contenders = make_contenders(case, entries, inputs)
            measure_contenders(contenders, repeat=repeat, reached=partial(reached, i))
            yield from case_rows(case.to_dict(), contenders)


def make_inputs(case: Case, heads: int) -> dict[str, Inputs]:
    """Query, key and value by name of the dtype."""
    q, k, v = structured_qkv(Hq=heads, Hk=heads, L=case.length, D=case.head_dim)
    return {name: (q.to(dtype), k.to(dtype), v.to(dtype)) for name, dtype in DTYPES.items()}


def make_contenders(
    case: Case, entries: Sequence[Entry], inputs: dict[str, Inputs]
) -> list[Contender]:
    """Prepared contenders; those that cannot run have `why_not`."""
    rows = sample_rows(case.length, SAMPLED_ROWS)
    compiled = CompiledFlex()
    found: list[Contender] = []
    for entry in entries:
        facts = (entry, inputs[entry.dtype], case.causal, rows)
        if entry.kind == SDPA:
            contender = Contender(*facts)
        elif entry.kind == FLEX:
            contender = Flex(*facts, compiled=compiled)
        else:
            contender = Sparse(*facts)
        contender.prepare()
        found.append(contender)
    return found


def measure_contenders(
    contenders: Sequence[Contender], *, repeat: int | None, reached: Callable[[float], None]
) -> None:
    """Set `seconds` and `runs` of the contenders that can run."""
    able = [contender for contender in contenders if contender.why_not is None]
    with no_garbage_collection():
        times = take_turns(
            [contender.take_turn for contender in able],
            seconds=0.0 if repeat else SECONDS_PER_CASE,
            fewest=repeat or FEWEST_ROUNDS,
            most=repeat or MOST_ROUNDS,
            warm_up=WARM_UP,
            reached=reached,
        )
    for contender, seconds in zip(able, times, strict=True):
        contender.seconds = seconds
        contender.runs = contender.runs[-len(seconds) :]  # without the warm-up


def estimate(
    wanted: Sequence[Case], entries: Sequence[Entry], *, heads: int, repeat: int | None
) -> list[float]:
    """Expected seconds of each case, from a short run of SDPA at each head dim."""
    probed: dict[tuple[int, int], dict[str, float]] = {}
    seconds = []
    for i, case in enumerate(wanted):
        what = (case.head_dim, case.threads)
        if what not in probed:
            with threads(case.threads):
                probed[what] = _probe(case.head_dim, heads)
        pairs = (case.length / PROBE_LENGTH) ** 2 * (0.5 if case.causal else 1.0)
        one = sum(entry.work * probed[what][entry.dtype] for entry in entries) * pairs
        own = min(max(SECONDS_PER_CASE, FEWEST_ROUNDS * one), MOST_ROUNDS * one)
        own = repeat * one if repeat else own
        compiles = COMPILE_SECONDS if any(entry.kind == FLEX for entry in entries) else 0.0
        is_new = i == 0 or wanted[i - 1].length != case.length
        makes = INPUT_SECONDS_PER_TOKEN * case.length if is_new else 0.0
        seconds.append(own + (one if one < WARM_UP else 0.0) + compiles + makes)
    return seconds


def _probe(head_dim: int, heads: int) -> dict[str, float]:
    def attend(x: torch.Tensor) -> float:
        start = time.perf_counter()
        F.scaled_dot_product_attention(x, x, x)
        return time.perf_counter() - start

    inputs = [
        torch.ones(1, heads, PROBE_LENGTH, head_dim, dtype=dtype) for dtype in DTYPES.values()
    ]
    times = take_turns([partial(attend, x) for x in inputs], fewest=3)
    return {name: statistics.median(each) for name, each in zip(DTYPES, times, strict=True)}
