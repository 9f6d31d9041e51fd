"""Speed targets of the CPU backend, and whether the rows of a benchmark meet them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparge.cli.screen import Column, Table, percent, times

from ..bench.cases import Case

BACKEND = "cpu"
MET, NOT_MET = "met", "NOT MET"
NOT_MEASURED, NO_TARGET = "not measured here", "no target here"
ANY_ISA = "any"
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SpeedTarget:
    """figure: "ratio" (at least `needed`) or "overhead" (at most `needed`).

    recipe: a name in `lineup.RECIPES`. needed: by instruction set. also: by instruction set, a
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


TARGETS = (
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
BY_FORMAT = {"sparge.bench/3": TARGETS, "sparge.bench.vision/1": VISION_TARGETS}
COLUMNS = (
    Column("target", "target"),
    Column("needed", "needed", "{}".format),
    Column("worst", "worst", "{}".format),
    Column("at", "at"),
    Column("best", "best", "{}".format),
    Column("met", "cases\nthat meet it", "{}".format),
    Column("verdict", "verdict"),
)
CASE = ("length", "head_dim", "causal", "threads")


def targets_table(document: dict[str, Any]) -> Table:
    rows = []
    targets = BY_FORMAT[document["format"]]
    for target in judge(document["rows"], document["isa"], targets):
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
    return Table(title, COLUMNS, rows, ["A target is met if every case that counts meets it."])


def judge(
    rows: Rows, isa: str | None, targets: Sequence[SpeedTarget] = TARGETS
) -> list[dict[str, Any]]:
    """One verdict for each target, which is met if every case that counts meets it."""
    return [_judge(target, rows, isa) for target in targets]


def _judge(target: SpeedTarget, rows: Rows, isa: str | None) -> dict[str, Any]:
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
