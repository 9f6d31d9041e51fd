"""The figures of one case: a row of plain data for each contender."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .contender import Contender
from .lineup import SDPA, SPARSE
from .truth import Truth, dense_pairs, kept_pairs, relative_l1

ATTEND, TOTAL = "attend", "total"
"""Names in a record's seconds: the last stage, and the sum of all stages."""
FLOPS_PER_SCORE = 4  # times the head dim: multiply and add, for QK and for PV


def case_rows(case: Mapping[str, Any], contenders: Sequence[Contender]) -> list[dict[str, Any]]:
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
    """peaks: GFLOP/s by number of threads."""
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
    # Within each round: whatever slowed the machine slowed both.
    ratios = [d / s for d, s in zip(dense.seconds, contender.seconds, strict=True)]
    ratio = statistics.median(ratios)
    spread = ratios if contender is not dense else contender.seconds
    pairs = dense_pairs(B, Hq, L, is_causal=contender.is_causal)
    kept = pairs if contender.plan is None else kept_pairs(contender.plan)
    return {
        "rounds": len(contender.seconds),
        "seconds": seconds,
        "seconds_each": list(contender.seconds),
        "ratio": ratio,
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "spread": (max(spread) - min(spread)) / (2 * statistics.median(spread)),
        "loses": contender.entry.kind == SPARSE and ratio < 1,
        "scores": pairs,
        "kept_scores": kept,
        "ns_per_score": seconds * 1e9 / pairs,
        "gflops": FLOPS_PER_SCORE * D * kept / seconds / 1e9,
        **_stages(contender, dense),
    }


def _stages(contender: Contender, dense: Contender) -> dict[str, Any]:
    """stages: median seconds by name. overhead: time before `attend`, as a share of SDPA's."""
    if not contender.runs:
        return {}
    each = [run.seconds for run in contender.runs]
    names = [name for name in each[0] if name != TOTAL]
    before = [sum(run[name] for name in names if name != ATTEND) for run in each]
    shares = [b / d for b, d in zip(before, dense.seconds, strict=True)]
    return {
        "stages": {name: statistics.median(run[name] for run in each) for name in names},
        "overhead": statistics.median(shares),
    }
