"""Targets of the default recipe on the zoo's model, and whether an evaluation meets them.

Set for SmolLM2-135M in bf16 on two cores with AMX, against torch's SDPA in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparge.cli.machine import load_text
from sparge.cli.screen import Column, Table, error, share, times

from ..evaluate.settings import ERRORS, NEEDLE, PERPLEXITY, PREFILL, SHORT
from .bench_targets import MET, NOT_MEASURED, NOT_MET

COLUMNS = (
    Column("target", "target"),
    Column("must", "must", "{}".format),
    Column("aim", "aim", "{}".format),
    Column("value", "is", "{}".format),
    Column("verdict", "verdict"),
)
FORMS = {
    "times": times,
    "share": share,
    "percent": "{:+.1%}".format,
    "count": "{:.0f}".format,
    "error": error,
}
LONG = 8192
NEEDLE_LENGTHS = (2048, 4096, 8192)
NEEDLE_DEPTHS = 5
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class QualityTarget:
    """form: a key of FORMS. at_least: the figure must be at least `must`, else at most."""

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
    """None unless all documents were read: fewer would be an easier test."""
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
    QualityTarget(
        "attention, 8k prefill, times dense",
        3.0,
        5.0,
        True,
        "times",
        at(PREFILL, LONG, "attention_speedup"),
    ),
    QualityTarget(
        "whole prefill, 8k, times dense",
        1.35,
        None,
        True,
        "times",
        at(PREFILL, LONG, "prefill_speedup"),
    ),
    QualityTarget("density, 8k", 0.45, 0.30, False, "share", at(PREFILL, LONG, "density")),
    QualityTarget(
        "perplexity against dense, 8k",
        0.010,
        0.003,
        False,
        "percent",
        at(PERPLEXITY, LONG, "relative"),
    ),
    QualityTarget(
        "needle answers that dense finds and sparge loses, 2k, 4k, 8k x 5 depths",
        0.0,
        0.0,
        False,
        "count",
        lost_answers,
    ),
    QualityTarget(
        "512-token prefill, times dense",
        0.97,
        None,
        True,
        "times",
        at(PREFILL, SHORT, "prefill_speedup"),
    ),
    QualityTarget(
        "error per layer (rel. L1), mean, at the worst length",
        0.05,
        None,
        False,
        "error",
        worst_error,
    ),
)


def targets_table(document: dict[str, Any]) -> Table:
    lines = []
    for target in judge(document):
        form, sign = FORMS[target["form"]], ">=" if target["at_least"] else "<="
        aim, value = target["aim"], target["value"]
        reaches = ", reaches the aim" if target["reaches_aim"] else ""
        lines.append(
            {
                "target": target["target"],
                "must": f"{sign} {form(target['must'])}",
                "aim": None if aim is None else f"{sign} {form(aim)}",
                "value": None if value is None else form(value),
                "verdict": target["verdict"] + reaches,
            }
        )
    notes = (
        "Set for smollm2-135m-instruct in bf16 with the default recipe on two cores with AMX.",
        f"machine: {document['machine_line']}; load average at the start: {load_text(document)}.",
    )
    return Table("Targets of an evaluation", COLUMNS, lines, notes)


def judge(rows: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """One verdict for each target."""
    return [_judge(target, target.figure(rows)) for target in TARGETS]


def _judge(target: QualityTarget, value: float | None) -> dict[str, Any]:
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
