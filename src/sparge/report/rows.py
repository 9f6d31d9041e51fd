"""What was measured of a case, as rows of plain figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .contender import Contender
from .entries import SDPA, SPARSE
from .measure import Truth, kept_score_elements, relative_l1, score_elements

STAGES = {
    "statistics": ("prepare",),
    "selection": ("predict", "select"),
    "attention": ("attend",),
}
"""The names in a row, and those in the record of a run."""
FLOPS_PER_SCORE = 4
"""Times the head dim: a product and a sum for QK, the same for PV."""


def rows_of(case: Mapping[str, Any], contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    dense = {c.entry.dtype: c for c in contenders if c.entry.kind == SDPA}
    truth = {
        name: Truth(*c.inputs, rows=c.rows, is_causal=c.is_causal) for name, c in dense.items()
    }
    rows = []
    for contender in contenders:
        entry = contender.entry
        row = {
            **case,
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


def add_shares_of_peak(rows: Iterable[dict[str, Any]], peaks: Mapping[int, float]) -> None:
    """peaks: GFLOP/s by number of threads; known when all rows are, as they are measured twice."""
    for row in rows:
        if row["why_not"] is None:
            row["share_of_peak"] = row["gflops"] / peaks[row["threads"]]


def _errors(contender: Contender, truth: Truth) -> dict[str, Any]:
    assert contender.out is not None
    blocks = truth.dense if contender.plan is None else truth.of_blocks(contender.plan)
    return {
        "density": 1.0 if contender.plan is None else contender.plan.density,
        "error": relative_l1(contender.out, truth.dense),
        "quantization_error": relative_l1(contender.out, blocks),
        "sparsity_error": relative_l1(blocks, truth.dense),
    }


def _times(contender: Contender, dense: Contender) -> dict[str, Any]:
    B, Hq, L, D = contender.inputs[0].shape
    seconds = statistics.median(contender.seconds)
    # Of each round apart: both ran within it, so what slowed the machine slowed both.
    ratios = [d / s for d, s in zip(dense.seconds, contender.seconds, strict=True)]
    ratio = statistics.median(ratios)
    spread = ratios if contender is not dense else contender.seconds
    scores = score_elements(B, Hq, L, is_causal=contender.is_causal)
    kept = scores if contender.plan is None else kept_score_elements(contender.plan)
    times = {
        "rounds": len(contender.seconds),
        "seconds": seconds,
        "seconds_each": list(contender.seconds),
        "ratio": ratio,
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "spread": (max(spread) - min(spread)) / (2 * statistics.median(spread)),
        "loses": contender.entry.kind == SPARSE and ratio < 1,
        "scores": scores,
        "kept_scores": kept,
        "ns_per_score": seconds * 1e9 / scores,
        "gflops": FLOPS_PER_SCORE * D * kept / seconds / 1e9,
    }
    if contender.runs:
        spent = {
            name: [sum(run.seconds.get(stage, 0.0) for stage in stages) for run in contender.runs]
            for name, stages in STAGES.items()
        }
        times |= {name: statistics.median(each) for name, each in spent.items()}
        before = map(sum, zip(spent["statistics"], spent["selection"], strict=True))
        shares = [b / d for b, d in zip(before, dense.seconds, strict=True)]
        times["overhead"] = statistics.median(shares)
    return times
