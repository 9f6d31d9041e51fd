"""Compare measured documents with the project's targets.

    python -m sparge_tools.studies.targets FILE …

Speed targets are those of the CPU backend, by instruction set. Targets of the default recipe on the
zoo's model were set for SmolLM2-135M in bf16 on two cores with AMX, against torch's SDPA in the
same dtype.

FILE: a document of `sparge bench --output` or the `eval.json` of `sparge eval`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparge.cli import OK, Parser, exit_code
from sparge.cli.machine import load_text
from sparge.cli.screen import Column, Table, console, error, percent, share, show_table, times

from ..bench.cases import Case
from ..evaluate.settings import ERRORS, NEEDLE, PERPLEXITY, PREFILL, SHORT

BACKEND = "cpu"
MET, NOT_MET = "met", "NOT MET"
NOT_MEASURED, NO_TARGET = "not measured here", "no target here"
ANY_ISA = "any"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SpeedTarget:
    """figure: "ratio" (at least `needed`) or "overhead" (at most `needed`).

    recipe: a name in `contender.RECIPES`. needed: by instruction set. also: by instruction set, a
    recipe that counts instead if it is better. beyond: a recipe whose figure is subtracted.
    lengths: the shortest and the longest length that count.
    """

    what: str
    figure: str
    recipe: str
    needed: Mapping[str, float]
    also: Mapping[str, str] = field(default_factory=dict)
    beyond: str | None = None
    lengths: tuple[int, int] = (8192, 2**31)

    def needs(self, isa: str | None) -> float | None:
        return self.needed.get(ANY_ISA, self.needed.get(isa or ""))


SPEED_TARGETS = (
    SpeedTarget(
        "all kept, times SDPA bf16",
        "ratio",
        "all",
        {"amx": 1.5, "avx512": 1.1, "avx2": 1.5},
        also={"avx512": "fast all", "avx2": "fast all"},
    ),
    SpeedTarget(
        "40 % kept, times SDPA bf16",
        "ratio",
        "40%",
        {"amx": 3.5, "avx512": 2.6, "avx2": 3.5},
        also={"avx512": "fast 40%", "avx2": "fast 40%"},
    ),
    SpeedTarget("20 % kept, times SDPA bf16", "ratio", "20%", {"amx": 6.5}),
    SpeedTarget("fp32 inputs, all kept, times SDPA fp32", "ratio", "fp32 all", {"amx": 4.0}),
    SpeedTarget(
        "statistics + selection (mean), share of SDPA bf16 at 8k",
        "overhead",
        "40%",
        {ANY_ISA: 0.04},
        lengths=(8192, 8192),
    ),
    SpeedTarget(
        "statistics + selection (mean), share of SDPA bf16 at 32k",
        "overhead",
        "40%",
        {ANY_ISA: 0.01},
        lengths=(32768, 32768),
    ),
    SpeedTarget(
        "the exact rows of blend on top, share of SDPA bf16",
        "overhead",
        "40% blend",
        {ANY_ISA: 0.035},
        beyond="40%",
    ),
)
VISION_TARGETS = (
    SpeedTarget(
        "50 % kept, times SDPA in its faster dtype",
        "ratio",
        "50%",
        {"amx": 2.8, "avx2": 2.9},
        also={"amx": "fast 50%", "avx2": "fast 50%", "avx512": "fast 50%"},
        lengths=(0, 2**31),
    ),
)
"""At the shapes of picture and video models."""
BY_FORMAT = {"sparge.bench/3": SPEED_TARGETS, "sparge.bench.vision/1": VISION_TARGETS}
SPEED_COLUMNS = (
    Column("target", "target"),
    Column("needed", "needed", "{}".format),
    Column("worst", "worst", "{}".format),
    Column("at", "at"),
    Column("best", "best", "{}".format),
    Column("met", "cases\nthat meet it", "{}".format),
    Column("verdict", "verdict"),
)
CASE = ("length", "head_dim", "causal", "threads")


def speed_table(document: dict[str, Any]) -> Table:
    rows = []
    targets = BY_FORMAT[document["format"]]
    for target in judge_speed(document["rows"], document["isa"], targets):
        form, sign = (times, ">=") if target["figure"] == "ratio" else (percent, "<=")
        where = target["worst_case"]
        texts = {
            name: None if target[name] is None else form(target[name])
            for name in ("needed", "worst", "best")
        }
        rows.append(
            {
                **texts,
                "target": target["target"],
                "needed": None if texts["needed"] is None else f"{sign} {texts['needed']}",
                "at": None if where is None else str(Case(**where)),
                "met": f"{target['cases_met']} of {target['cases']}" if target["cases"] else None,
                "verdict": target["verdict"],
            }
        )
    title = f"Speed targets for the instruction set {document['isa'] or 'none'}"
    return Table(
        title, SPEED_COLUMNS, rows, ["A target is met if every case that counts meets it."]
    )


def judge_speed(
    rows: Rows, isa: str | None, targets: Sequence[SpeedTarget] = SPEED_TARGETS
) -> list[dict[str, Any]]:
    """One verdict for each target, which is met if every case that counts meets it."""
    return [_judge_speed(target, rows, isa) for target in targets]


def _judge_speed(target: SpeedTarget, rows: Rows, isa: str | None) -> dict[str, Any]:
    needed = target.needs(isa)
    most = target.figure == "overhead"
    figures = _figures(target, rows, isa)
    ordered = sorted(figures.items(), key=lambda item: item[1], reverse=most)
    meets = [
        needed is not None and (value <= needed if most else value >= needed)
        for value in figures.values()
    ]
    if not figures:
        verdict = NOT_MEASURED
    elif needed is None:
        verdict = NO_TARGET
    else:
        verdict = MET if all(meets) else NOT_MET
    return {
        "target": target.what,
        "figure": target.figure,
        "needed": needed,
        "verdict": verdict,
        "worst": ordered[0][1] if ordered else None,
        "worst_case": dict(zip(CASE, ordered[0][0], strict=True)) if ordered else None,
        "best": ordered[-1][1] if ordered else None,
        "cases": len(figures),
        "cases_met": sum(meets),
    }


def _figures(target: SpeedTarget, rows: Rows, isa: str | None) -> dict[tuple[Any, ...], float]:
    """The figure by case."""
    shortest, longest = target.lengths
    names = {target.recipe, target.also.get(isa or "", target.recipe)}
    better = min if target.figure == "overhead" else max
    found: dict[tuple[Any, ...], float] = {}
    subtracted: dict[tuple[Any, ...], float] = {}
    for row in rows:
        value = row.get(target.figure)
        if row["backend"] != BACKEND or row["kind"] != "sparse" or value is None:
            continue
        case = tuple(row[key] for key in CASE)
        if row["recipe_name"] == target.beyond:
            subtracted[case] = value
        if row["recipe_name"] in names and shortest <= row["length"] <= longest:
            found[case] = better(found.get(case, value), value)
    if target.beyond is None:
        return found
    return {case: found[case] - subtracted[case] for case in found if case in subtracted}


QUALITY_COLUMNS = (
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


QUALITY_TARGETS = (
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


def quality_table(document: dict[str, Any]) -> Table:
    lines = []
    for target in judge_quality(document):
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
    return Table("Targets of an evaluation", QUALITY_COLUMNS, lines, notes)


def judge_quality(rows: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """One verdict for each target."""
    return [_judge_quality(target, target.figure(rows)) for target in QUALITY_TARGETS]


def _judge_quality(target: QualityTarget, value: float | None) -> dict[str, Any]:
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


TABLES = {**dict.fromkeys(BY_FORMAT, speed_table), "sparge.eval/2": quality_table}


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.targets", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    tables = [table_of(Path(file)) for file in parser.parse_args(argv).files]
    screen = console()
    for table in tables:
        show_table(screen, table)
        screen.print()
    return OK


def table_of(file: Path) -> Table:
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not valid JSON: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found not in TABLES:
        raise ValueError(f"{str(file)!r} has the format {found!r}; known: {', '.join(TABLES)}")
    return TABLES[found](document)


if __name__ == "__main__":
    sys.exit(main())
