"""The cases of a benchmark: one length, head dim, diagonal and number of threads at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..accuracy import sample_rows
from ..support.turns import no_garbage_collection, take_turns, threads
from ..synthetic import structured_qkv
from .case_rows import case_rows
from .compiled_flex import CompiledFlex
from .contender import Contender, Flex, Inputs, Sparse
from .lineup import DTYPES, FLEX, SDPA, Entry

SAMPLED_ROWS = 64  # query rows of each head on which errors are measured
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
SECONDS_PER_CASE = 5.0
WARM_UP = 2.0  # a first round shorter than this many seconds is discarded


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
    step: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """The rows of every case. step: called after each case with its name."""
    made: tuple[int, int] | None = None
    inputs: dict[str, Inputs] = {}
    for case in wanted:
        if made != (case.length, case.head_dim):
            made = (case.length, case.head_dim)
            inputs = make_inputs(case, heads)
        with threads(case.threads):
            contenders = make_contenders(case, entries, inputs)
            measure_contenders(contenders, repeat=repeat)
            yield from case_rows(case.to_dict(), contenders)
        step(str(case))


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


def measure_contenders(contenders: Sequence[Contender], *, repeat: int | None) -> None:
    """Set `seconds` and `runs` of the contenders that can run."""
    able = [contender for contender in contenders if contender.why_not is None]
    with no_garbage_collection():
        times = take_turns(
            [contender.take_turn for contender in able],
            rounds=repeat,
            seconds=SECONDS_PER_CASE,
            fewest=FEWEST_ROUNDS,
            most=MOST_ROUNDS,
            warm_up=WARM_UP,
        )
    for contender, seconds in zip(able, times, strict=True):
        contender.seconds = seconds
        contender.runs = contender.runs[-len(seconds) :]  # without the warm-up
