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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparge.cli import OK, Parser
from sparge.cli.screen import Column, Table, console, error, share, show_table

from ..bench.cases import Case
from ..evaluate.settings import ERRORS, NEEDLE, PERPLEXITY, PREFILL, SHORT
from ..machine import load_text
from ..screen import percent, times
from . import study

BACKEND = "cpu"
MET, NOT_MET = "met", "NOT MET"
NOT_MEASURED, NO_TARGET = "not measured here", "no target here"
ANY_ISA = "any"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SpeedTarget:
    """figure: "ratio" (at least `needed`) or "overhead" (at most `needed`).

    recipe: a name in `contender.RECIPES`. needed: by instruction set. fast_on: instruction sets on
    which the recipe's int8-fast form counts instead if it is better. beyond: a recipe whose figure
    is subtracted. lengths: the shortest and the longest length that count.
    """

    what: str
    figure: str
    recipe: str
    needed: Mapping[str, float]
    fast_on: tuple[str, ...] = ()
    beyond: str | None = None
    lengths: tuple[int, int] = (8192, 2**31)

    def needs(self, isa: str | None) -> float | None:
        return self.needed.get(ANY_ISA, self.needed.get(isa or ""))

    def names(self, isa: str | None) -> set[str]:
        """Of the recipes of which the better one counts."""
        return {self.recipe, f"fast {self.recipe}" if isa in self.fast_on else self.recipe}


OF_ALL = {"amx": 1.5, "avx512_bf16": 1.1, "avx512": 1.1, "avx2": 1.5}
OF_40 = {"amx": 3.5, "avx512_bf16": 2.6, "avx512": 2.6, "avx2": 3.5}
OF_50 = {"amx": 2.8, "avx2": 2.9}
NO_TILES = ("avx512_bf16", "avx512", "avx2")
FASTER = "50 % kept, times SDPA in its faster dtype"
PLANNING = "statistics + selection (mean), share of SDPA bf16"
ON_TOP = "the exact rows of blend on top, share of SDPA bf16"
AT_8K, AT_32K = (8192, 8192), (32768, 32768)
SPEED_TARGETS = (
    SpeedTarget("all kept, times SDPA bf16", "ratio", "all", OF_ALL, fast_on=NO_TILES),
    SpeedTarget("40 % kept, times SDPA bf16", "ratio", "40%", OF_40, fast_on=NO_TILES),
    SpeedTarget("20 % kept, times SDPA bf16", "ratio", "20%", {"amx": 6.5}),
    SpeedTarget("fp32 inputs, all kept, times SDPA fp32", "ratio", "fp32 all", {"amx": 4.0}),
    SpeedTarget(f"{PLANNING} at 8k", "overhead", "40%", {ANY_ISA: 0.04}, lengths=AT_8K),
    SpeedTarget(f"{PLANNING} at 32k", "overhead", "40%", {ANY_ISA: 0.01}, lengths=AT_32K),
    SpeedTarget(ON_TOP, "overhead", "40% blend", {ANY_ISA: 0.035}, beyond="40%"),
)
VISION_TARGETS = (
    SpeedTarget(FASTER, "ratio", "50%", OF_50, fast_on=("amx", *NO_TILES), lengths=(0, 2**31)),
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
    for found in judge_speed(document["rows"], document["isa"], targets):
        form, sign = (times, ">=") if found["figure"] == "ratio" else (percent, "<=")
        texts = {
            name: None if found[name] is None else form(found[name])
            for name in ("needed", "worst", "best")
        }
        needed = None if texts["needed"] is None else f"{sign} {texts['needed']}"
        at = None if found["worst_case"] is None else str(Case(**found["worst_case"]))
        met = f"{found['cases_met']} of {found['cases']}" if found["cases"] else None
        rows.append({**found, **texts, "needed": needed, "at": at, "met": met})
    title = f"Speed targets for the instruction set {document['isa'] or 'none'}"
    notes = ["A target is met if every case that counts meets it."]
    return Table(title, SPEED_COLUMNS, rows, notes)


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
    worst, best = (ordered[0], ordered[-1]) if ordered else ((None, None), (None, None))
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
        "worst": worst[1],
        "worst_case": None if worst[0] is None else dict(zip(CASE, worst[0], strict=True)),
        "best": best[1],
        "cases": len(figures),
        "cases_met": sum(meets),
    }


def _figures(target: SpeedTarget, rows: Rows, isa: str | None) -> dict[tuple[Any, ...], float]:
    """The figure by case."""
    shortest, longest = target.lengths
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
        if row["recipe_name"] in target.names(isa) and shortest <= row["length"] <= longest:
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
LONG = 8192
NEEDLE_LENGTHS = (2048, 4096, 8192)
NEEDLE_DEPTHS = 5
Figure = Callable[[Mapping[str, Rows]], float | None]


@dataclass(frozen=True)
class QualityTarget:
    """sign: ">=" if the figure must be at least `must`, "<=" if at most."""

    what: str
    sign: str
    must: float
    aim: float | None
    form: Callable[[float], str]
    figure: Figure

    def holds(self, value: float, needed: float) -> bool:
        return value >= needed if self.sign == ">=" else value <= needed


def at(measure: str, field: str, length: int = LONG) -> Figure:
    def figure(rows: Mapping[str, Rows]) -> float | None:
        return next((row[field] for row in rows[measure] if row["length"] == length), None)

    return figure


def lost_answers(rows: Mapping[str, Rows]) -> float | None:
    """None unless all documents were read: fewer would be an easier test."""
    found = Counter(row["length"] for row in rows[NEEDLE])
    if any(found[length] < NEEDLE_DEPTHS for length in NEEDLE_LENGTHS):
        return None
    return float(sum(row["lost"] for row in rows[NEEDLE] if row["length"] in NEEDLE_LENGTHS))


def worst_error(rows: Mapping[str, Rows]) -> float | None:
    means = [row["mean"] for row in rows[ERRORS] if row["mean"] is not None]
    return max(means, default=None)


change, count = "{:+.1%}".format, "{:.0f}".format
ATTENTION, PERPLEXITIES = "attention, 8k prefill, times dense", "perplexity against dense, 8k"
WHOLE, SHORT_ONE = "whole prefill, 8k, times dense", "512-token prefill, times dense"
ANSWERS = "needle answers that dense finds and sparge loses, 2k, 4k, 8k x 5 depths"
LAYERS = "error per layer (rel. L1), mean, at the worst length"
QUALITY_TARGETS = (
    QualityTarget(ATTENTION, ">=", 3.0, 5.0, times, at(PREFILL, "attention_speedup")),
    QualityTarget(WHOLE, ">=", 1.35, None, times, at(PREFILL, "prefill_speedup")),
    QualityTarget("density, 8k", "<=", 0.45, 0.30, share, at(PREFILL, "density")),
    QualityTarget(PERPLEXITIES, "<=", 0.010, 0.003, change, at(PERPLEXITY, "relative")),
    QualityTarget(ANSWERS, "<=", 0.0, 0.0, count, lost_answers),
    QualityTarget(SHORT_ONE, ">=", 0.97, None, times, at(PREFILL, "prefill_speedup", SHORT)),
    QualityTarget(LAYERS, "<=", 0.05, None, error, worst_error),
)


def quality_table(document: dict[str, Any]) -> Table:
    lines = []
    for target, found in zip(QUALITY_TARGETS, judge_quality(document), strict=True):
        texts = {
            name: None if found[name] is None else target.form(found[name])
            for name in ("must", "aim", "value")
        }
        texts |= {name: f"{target.sign} {texts[name]}" for name in ("must", "aim") if texts[name]}
        reaches = ", reaches the aim" if found["reaches_aim"] else ""
        lines.append({**found, **texts, "verdict": found["verdict"] + reaches})
    notes = (
        "Set for smollm2-135m-instruct in bf16 with the default recipe on two cores with AMX.",
        f"machine: {document['machine_line']}; load average at the start: {load_text(document)}.",
    )
    return Table("Targets of an evaluation", QUALITY_COLUMNS, lines, notes)


def judge_quality(rows: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """One verdict for each target."""
    return [_judge_quality(target, target.figure(rows)) for target in QUALITY_TARGETS]


def _judge_quality(target: QualityTarget, value: float | None) -> dict[str, Any]:
    found = {"target": target.what, "must": target.must, "aim": target.aim, "value": value}
    if value is None:
        return {**found, "verdict": NOT_MEASURED, "reaches_aim": None}
    verdict = MET if target.holds(value, target.must) else NOT_MET
    reaches = None if target.aim is None else target.holds(value, target.aim)
    return {**found, "verdict": verdict, "reaches_aim": reaches}


TABLES = {**dict.fromkeys(BY_FORMAT, speed_table), "sparge.eval/2": quality_table}


@study
def main(argv: Sequence[str] | None) -> int:
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
