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
from ..synthetic import structured_qkv
from .contender import Contender, Flex, Inputs, Sparse
from .entries import DTYPES, FLEX, SDPA, Entry
from .flex import CompiledFlex
from .race import SECONDS_OF_A_LONG_ROUND, race, rounds_for, threads
from .rows import rows_of

SAMPLED_ROWS = 64
"""Query rows of each head that errors are counted on."""
PROBE_LENGTH = 1024
COMPILE_SECONDS = 8.0
INPUT_SECONDS_PER_TOKEN = 0.001
"""Both of one slow core; they serve the estimate alone."""


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
    taking_part: Sequence[Entry],
    *,
    heads: int,
    repeat: int | None,
    reached: Callable[[int, float], None],
) -> Iterator[dict[str, Any]]:
    """The rows of every case; `reached` hears the number of the case and the share of it done."""
    made: tuple[int, int] | None = None
    inputs: dict[str, Inputs] = {}
    for i, case in enumerate(wanted):
        if made != (case.length, case.head_dim):
            made = (case.length, case.head_dim)
            inputs = inputs_of(case, heads)
        with threads(case.threads):
            contenders = contenders_of(case, taking_part, inputs)
            able = [contender for contender in contenders if contender.why_not is None]
            race(able, repeat=repeat, reached=partial(reached, i))
            yield from rows_of(case.to_dict(), contenders)


def inputs_of(case: Case, heads: int) -> dict[str, Inputs]:
    q, k, v = structured_qkv(Hq=heads, Hk=heads, L=case.length, D=case.head_dim)
    return {name: (q.to(dtype), k.to(dtype), v.to(dtype)) for name, dtype in DTYPES.items()}


def contenders_of(
    case: Case, taking_part: Sequence[Entry], inputs: dict[str, Inputs]
) -> list[Contender]:
    """Ready to run, or knowing why not."""
    rows = sample_rows(case.length, SAMPLED_ROWS)
    compiled = CompiledFlex()
    found: list[Contender] = []
    for entry in taking_part:
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


def estimate(
    wanted: Sequence[Case], taking_part: Sequence[Entry], *, heads: int, repeat: int | None
) -> list[float]:
    """Seconds that each case will take, from a short run of torch's SDPA at each head dim."""
    probed: dict[tuple[int, int], dict[str, float]] = {}
    seconds = []
    for i, case in enumerate(wanted):
        what = (case.head_dim, case.threads)
        if what not in probed:
            with threads(case.threads):
                probed[what] = _probe(case.head_dim, heads)
        scores = (case.length / PROBE_LENGTH) ** 2 * (0.5 if case.causal else 1.0)
        one = sum(entry.work * probed[what][entry.dtype] for entry in taking_part) * scores
        rounds = repeat or rounds_for(one)
        compiles = COMPILE_SECONDS if any(entry.kind == FLEX for entry in taking_part) else 0.0
        is_new = i == 0 or wanted[i - 1].length != case.length
        makes = INPUT_SECONDS_PER_TOKEN * case.length if is_new else 0.0
        warm_up = 0 if one > SECONDS_OF_A_LONG_ROUND else 1
        seconds.append((rounds + warm_up) * one + compiles + makes)
    return seconds


def _probe(head_dim: int, heads: int) -> dict[str, float]:
    found = {}
    for name, dtype in DTYPES.items():
        x = torch.ones(1, heads, PROBE_LENGTH, head_dim, dtype=dtype)
        each = []
        for _ in range(3):
            start = time.perf_counter()
            F.scaled_dot_product_attention(x, x, x)
            each.append(time.perf_counter() - start)
        found[name] = statistics.median(each)
    return found
