"""What the CPU core is meant to reach, as data, and whether the rows of a run show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BACKEND = "cpu"
MET, NOT_MET = "met", "NOT MET"
NOT_MEASURED, NO_TARGET = "not measured here", "no target here"
ANY_ISA = "any"


@dataclass(frozen=True)
class Target:
    """figure: "ratio", which must reach what is needed, or "overhead", which must stay below.

    recipe: a name in entries.WANTED. needed: by instruction set. also: by instruction set, a
    recipe that counts too if it is better. beyond: the recipe whose figure is taken off first.
    lengths: the shortest and the longest that it is judged at.
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
    Target(
        "all kept, times SDPA bf16",
        "ratio",
        "all",
        {"amx": 1.5, "avx512": 1.1, "avx2": 1.5},
        also={"avx512": "fast all", "avx2": "fast all"},
    ),
    Target(
        "40 % kept, times SDPA bf16",
        "ratio",
        "40%",
        {"amx": 3.5, "avx512": 2.6, "avx2": 3.5},
        also={"avx512": "fast 40%", "avx2": "fast 40%"},
    ),
    Target("20 % kept, times SDPA bf16", "ratio", "20%", {"amx": 6.5}),
    Target("fp32 inputs, all kept, times SDPA fp32", "ratio", "fp32 all", {"amx": 4.0}),
    Target(
        "statistics + selection (mean), share of SDPA bf16 at 8k",
        "overhead",
        "40%",
        {ANY_ISA: 0.04},
        lengths=(8192, 8192),
    ),
    Target(
        "statistics + selection (mean), share of SDPA bf16 at 32k",
        "overhead",
        "40%",
        {ANY_ISA: 0.01},
        lengths=(32768, 32768),
    ),
    Target(
        "the exact rows of blend on top, share of SDPA bf16",
        "overhead",
        "40% blend",
        {ANY_ISA: 0.035},
        beyond="40%",
    ),
)
CASE = ("length", "head_dim", "causal", "threads")


def judge(rows: Sequence[Mapping[str, Any]], isa: str | None) -> list[dict[str, Any]]:
    """One verdict for each target. It is met if every case that it is judged at meets it."""
    return [_judge(target, rows, isa) for target in TARGETS]


def _judge(target: Target, rows: Sequence[Mapping[str, Any]], isa: str | None) -> dict[str, Any]:
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


def _figures(
    target: Target, rows: Sequence[Mapping[str, Any]], isa: str | None
) -> dict[tuple[Any, ...], float]:
    """The figure of each case that has one."""
    shortest, longest = target.lengths
    names = {target.recipe, target.also.get(isa or "", target.recipe)}
    better = min if target.figure == "overhead" else max
    found: dict[tuple[Any, ...], float] = {}
    taken_off: dict[tuple[Any, ...], float] = {}
    for row in rows:
        value = row.get(target.figure)
        if row["backend"] != BACKEND or row["kind"] != "sparse" or value is None:
            continue
        case = tuple(row[key] for key in CASE)
        if row["recipe_name"] == target.beyond:
            taken_off[case] = value
        if row["recipe_name"] in names and shortest <= row["length"] <= longest:
            found[case] = better(found.get(case, value), value)
    if target.beyond is None:
        return found
    return {case: found[case] - taken_off[case] for case in found if case in taken_off}
