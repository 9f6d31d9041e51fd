"""The cases of a benchmark, and a row of plain data for each contender in each case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from sparge import BLOCK_K, BLOCK_Q, BlockPlan
from sparge.api.accuracy import spread_rows
from sparge.cli.self_check import relative_l1
from sparge.support.turns import take_turns
from sparge.synthetic import structured_qkv
from sparge.values.call import block_sizes, in_blocks

from ..measuring import no_garbage_collection, threads
from .contender import DTYPES, SDPA, SPARSE, CompiledFlex, Contender, Entry, Inputs
from .truth import Truth

SAMPLED_ROWS = 64  # query rows of each head on which errors are measured
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
SECONDS_PER_CASE = 5.0
WARM_UP = 2.0  # a first round shorter than this many seconds is discarded
ATTEND, TOTAL = "attend", "total"
"""Names in a record's seconds: the last stage, and the sum of all stages."""
FLOPS_PER_SCORE = 4  # times the head dim: multiply and add, for QK and for PV
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    length: int
    head_dim: int
    causal: bool
    threads: int

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.length} d{self.head_dim} {kind} {self.threads}t"


def measure_cases(
    wanted: Sequence[Case],
    entries: Sequence[Entry],
    *,
    heads: int,
    repeat: int | None,
    step: Callable[[str], None],
    device: str = "cpu",
) -> Iterator[Row]:
    """The rows of every case. step: called after each case with its name."""
    made: tuple[int, int] | None = None
    inputs: dict[str, Inputs] = {}
    for case in wanted:
        if made != (case.length, case.head_dim):
            made = (case.length, case.head_dim)
            inputs = make_inputs(case, heads, device)
        with threads(case.threads):
            contenders = make_contenders(case, entries, inputs)
            measure_contenders(contenders, repeat=repeat)
            yield from case_rows(case, contenders)
        step(str(case))


def make_inputs(case: Case, heads: int, device: str = "cpu") -> dict[str, Inputs]:
    """Query, key and value by name of the dtype."""
    q, k, v = structured_qkv(Hq=heads, Hk=heads, L=case.length, D=case.head_dim, device=device)
    return {name: (q.to(dtype), k.to(dtype), v.to(dtype)) for name, dtype in DTYPES.items()}


def make_contenders(
    case: Case, entries: Sequence[Entry], inputs: Mapping[str, Inputs]
) -> list[Contender]:
    """Prepared contenders; those that cannot run have `why_not`."""
    rows, flex = spread_rows(case.length, SAMPLED_ROWS), CompiledFlex()
    return [Contender(entry, inputs[entry.dtype], case.causal, rows, flex) for entry in entries]


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


def case_rows(case: Case, contenders: Sequence[Contender]) -> list[Row]:
    dense = {c.entry.dtype: c for c in contenders if c.entry.kind == SDPA}
    truth = {
        name: Truth(*c.inputs, rows=c.rows, is_causal=c.is_causal) for name, c in dense.items()
    }
    rows = []
    for contender in contenders:
        entry = contender.entry
        row = {
            **asdict(case),
            "contender": entry.name,
            "kind": entry.kind,
            "dtype": entry.dtype,
            "backend": entry.backend,
            "recipe_name": entry.recipe_name,
            "recipe": None if entry.recipe is None else entry.recipe.to_dict(),
            "isa": contender.runs[0].isa if contender.runs else None,
            "why_not": contender.why_not,
        }
        if contender.why_not is None:
            row |= _errors(contender, truth[entry.dtype])
            row |= _times(contender, dense[entry.dtype])
        rows.append(row)
    return rows


def add_shares_of_peak(rows: Iterable[Row], peaks: Mapping[int, float]) -> None:
    """peaks: GFLOP/s by number of threads."""
    for row in rows:
        if row["why_not"] is None:
            row["share_of_peak"] = row["gflops"] / peaks[row["threads"]]


def _errors(contender: Contender, truth: Truth) -> Row:
    assert contender.out is not None
    blocks = truth.dense
    if contender.plan is not None:
        recipe = contender.entry.recipe
        pools = recipe is not None and recipe.pools and contender.entry.kind == "sparse"
        blocks = truth.of_blocks(contender.plan, recipe.pool_group if recipe and pools else None)
    return {
        "density": 1.0 if contender.plan is None else contender.plan.density,
        "error": relative_l1(contender.out, truth.dense),
        "quantization_error": relative_l1(contender.out, blocks),
        "sparsity_error": relative_l1(blocks, truth.dense),
    }


def _times(contender: Contender, dense: Contender) -> Row:
    B, Hq, L, D = contender.inputs[0].shape
    seconds = median(contender.seconds)
    # Within each round: whatever slowed the machine slowed both.
    ratios = [d / s for d, s in zip(dense.seconds, contender.seconds, strict=True)]
    spread = ratios if contender is not dense else contender.seconds
    pairs = dense_pairs(B, Hq, L, is_causal=contender.is_causal)
    kept = pairs if contender.plan is None else kept_pairs(contender.plan)
    return {
        "rounds": len(contender.seconds),
        "seconds": seconds,
        "seconds_each": list(contender.seconds),
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "spread": (max(spread) - min(spread)) / (2 * median(spread)),
        "loses": contender.entry.kind == SPARSE and median(ratios) < 1,
        "scores": pairs,
        "kept_scores": kept,
        "ns_per_score": seconds * 1e9 / pairs,
        "gflops": FLOPS_PER_SCORE * D * kept / seconds / 1e9,
        **_stages(contender, dense),
    }


def _stages(contender: Contender, dense: Contender) -> Row:
    """stages: median seconds by name. overhead: time before `attend`, as a share of SDPA's."""
    if not contender.runs:
        return {}
    each = [run.seconds for run in contender.runs]
    before = [run[TOTAL] - run[ATTEND] for run in each]
    return {
        "stages": {name: median(run[name] for run in each) for name in each[0] if name != TOTAL},
        "overhead": median(b / d for b, d in zip(before, dense.seconds, strict=True)),
    }


def dense_pairs(B: int, Hq: int, L: int, *, is_causal: bool) -> int:
    """Query-key pairs that dense attention computes."""
    return B * Hq * (L * (L + 1) // 2 if is_causal else L * L)


def kept_pairs(plan: BlockPlan) -> int:
    """Query-key pairs inside the blocks that a plan keeps; Lq == Lk."""
    sizes = block_sizes(plan.Lk, BLOCK_K)
    if plan.is_causal:
        starts = torch.arange(len(sizes)) * BLOCK_K
        seen = (torch.arange(plan.Lq)[:, None] + 1 - starts).clamp(min=0).minimum(sizes)
    else:
        seen = sizes.expand(plan.Lq, -1)
    pairs = in_blocks(seen, -2, BLOCK_Q).sum(-2)
    return int((plan.to_mask().cpu() * pairs).sum())
