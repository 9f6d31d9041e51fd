"""What the default recipe is meant to reach on the zoo's model, and whether a run shows it.

Set for SmolLM2-135M in bf16 on two cores with AMX, against torch's SDPA of the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.targets import MET, NOT_MEASURED, NOT_MET
from .settings import ERRORS, NEEDLE, PERPLEXITY, PREFILL, SHORT

LONG = 8192
NEEDLE_LENGTHS = (2048, 4096, 8192)
NEEDLE_DEPTHS = 5
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Target:
    """form: how its figure is written. at_least: the figure must reach `must`, not stay below."""

    what: str
    must: float
    aim: float | None
    at_least: bool
    form: str
    figure: Callable[[Mapping[str, Rows]], float | None]

    def holds(self, value: float, needed: float) -> bool:
        return value >= needed if self.at_least else value <= needed


def at(measure: str, length: int, field: str) -> Callable[[Mapping[str, Rows]], float | None]:
    def figure(rows: Mapping[str, Rows]) -> float | None:
        return next((row[field] for row in rows[measure] if row["length"] == length), None)

    return figure


def lost_answers(rows: Mapping[str, Rows]) -> float | None:
    """Only where every document was read: fewer would be an easier test."""
    found: dict[int, int] = {}
    for row in rows[NEEDLE]:
        found[row["length"]] = found.get(row["length"], 0) + 1
    if any(found.get(length, 0) < NEEDLE_DEPTHS for length in NEEDLE_LENGTHS):
        return None
    return float(sum(row["lost"] for row in rows[NEEDLE] if row["length"] in NEEDLE_LENGTHS))


def worst_error(rows: Mapping[str, Rows]) -> float | None:
    means = [row["mean"] for row in rows[ERRORS] if row["mean"] is not None]
    return max(means, default=None)


TARGETS = (
    Target(
        "attention, 8k prefill, times dense",
        3.0,
        5.0,
        True,
        "times",
        at(PREFILL, LONG, "attention_speedup"),
    ),
    Target(
        "whole prefill, 8k, times dense",
        1.35,
        None,
        True,
        "times",
        at(PREFILL, LONG, "prefill_speedup"),
    ),
    Target("density, 8k", 0.45, 0.30, False, "share", at(PREFILL, LONG, "density")),
    Target(
        "perplexity against dense, 8k",
        0.010,
        0.003,
        False,
        "percent",
        at(PERPLEXITY, LONG, "relative"),
    ),
    Target(
        "needle answers that dense finds and sparge loses, 2k, 4k, 8k x 5 depths",
        0.0,
        0.0,
        False,
        "count",
        lost_answers,
    ),
    Target(
        "512-token prefill, times dense",
        0.97,
        None,
        True,
        "times",
        at(PREFILL, SHORT, "prefill_speedup"),
    ),
    Target(
        "error per layer (rel. L1), mean, at the worst length",
        0.05,
        None,
        False,
        "error",
        worst_error,
    ),
)


def judge(rows: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """One verdict for each target."""
    return [_judge(target, target.figure(rows)) for target in TARGETS]


def _judge(target: Target, value: float | None) -> dict[str, Any]:
    if value is None:
        verdict = NOT_MEASURED
    else:
        verdict = MET if target.holds(value, target.must) else NOT_MET
    reaches = None if value is None or target.aim is None else target.holds(value, target.aim)
    return {
        "target": target.what,
        "must": target.must,
        "aim": target.aim,
        "at_least": target.at_least,
        "form": target.form,
        "value": value,
        "verdict": verdict,
        "reaches_aim": reaches,
    }
