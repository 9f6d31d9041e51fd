"""Spend an allowed change where it saves most: greedy on the convex hull of each part's options.

Parts (layers, or the heads of one) are independent, and the changes that they cause add up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True)
class Option:
    """One way to run a part: the blocks that it keeps, and the change that it causes."""

    kept: float
    change: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.kept < math.inf and 0.0 <= self.change < math.inf):
            raise ValueError(f"kept and change must be finite and at least 0, got {self}")


@dataclass(frozen=True)
class Step:
    """From one option of a part to its next sparser one."""

    part: Hashable
    option: int
    saved: float
    change: float


def hull(options: Sequence[Option]) -> list[int]:
    """Indices of the options that are worth taking, from the least change to the fewest blocks.

    The change bought by each block saved rises along them: they are the lower convex hull.
    """
    order = sorted(range(len(options)), key=lambda i: (options[i].change, options[i].kept))
    found: list[int] = []
    for i in order:
        if found and options[i].kept >= options[found[-1]].kept:
            continue  # more change for nothing
        while len(found) > 1 and _rate(options, found[-2], found[-1]) >= _rate(
            options, found[-1], i
        ):
            found.pop()
        found.append(i)
    return found


def _rate(options: Sequence[Option], a: int, b: int) -> float:
    """The change for each block saved between two options."""
    return (options[b].change - options[a].change) / (options[a].kept - options[b].kept)


def steps_of(parts: Mapping[Part, Sequence[Option]]) -> tuple[dict[Part, int], list[Step]]:
    """The option of each part with the least change, and all steps from there, cheapest first."""
    first: dict[Part, int] = {}
    steps: list[tuple[float, Step]] = []
    for part, options in parts.items():
        if not options:
            raise ValueError(f"every part needs at least one option, {part!r} has none")
        corners = hull(options)
        first[part] = corners[0]
        for a, b in pairwise(corners):
            saved = options[a].kept - options[b].kept
            step = Step(part, b, saved, options[b].change - options[a].change)
            steps.append((_rate(options, a, b), step))
    # A stable sort keeps the steps of one part in order, since their rates rise.
    return first, [step for _, step in sorted(steps, key=lambda each: each[0])]


def allocate(parts: Mapping[Part, Sequence[Option]], target: float) -> dict[Part, int]:
    """The option of each part: as few blocks as steps from the cheapest on reach within the target.

    The sum of the changes is at most the target, unless the least possible change exceeds it. A
    larger target contains every step of a smaller one, so it never keeps more blocks.
    """
    chosen, steps = steps_of(parts)
    spent = sum(parts[part][i].change for part, i in chosen.items())
    for step in steps:
        if spent + step.change > target:
            break
        spent += step.change
        chosen[step.part] = step.option  # type: ignore[index]
    return chosen
