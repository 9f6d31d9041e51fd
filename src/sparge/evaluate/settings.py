"""NOUN what to evaluate: checked before any work, and cut into cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..geometry import BLOCK_Q
from ..recipe import DEFAULT, Recipe

DENSE, SPARGE = "dense", "sparge"
VARIANTS = (DENSE, SPARGE)
PREFILL, PERPLEXITY, NEEDLE, ERRORS, TASKS = "prefill", "perplexity", "needle", "errors", "tasks"
MEASURES = (PREFILL, PERPLEXITY, NEEDLE, ERRORS, TASKS)
WITH_HARNESS = (NEEDLE, TASKS)
"""Measures that run through lm-eval."""
SHORT = 512
"""A prefill so short that dense attention is the better choice: sparge must not cost anything."""


@dataclass(frozen=True)
class Cell:
    """One measurement, kept as soon as it is made; `variant` is "" where both are compared."""

    measure: str
    length: int
    variant: str = ""
    depth: int | None = None
    window: int | None = None
    task: str = ""

    @property
    def key(self) -> str:
        """Its name in the run directory."""
        parts = {
            "depth": self.depth,
            "window": self.window,
            "task": self.task or None,
            "variant": self.variant or None,
        }
        named = [f"{name}={value}" for name, value in parts.items() if value is not None]
        return " ".join([self.measure, f"length={self.length}", *named])

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True)
class Settings:
    """depths: how many needle depths, in the middles of that many equal parts of the text.

    windows: stretches of the text, spread over it, that perplexity is taken on. repeat: rounds of
    the prefill race; None lets the time of one decide. limit: documents of each lm-eval task.
    """

    model: str
    recipe: Recipe | None = None
    profile: str | None = None
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    measures: tuple[str, ...] = (PREFILL, PERPLEXITY, NEEDLE, ERRORS)
    text: str = "essays"
    depths: int = 5
    windows: int = 1
    tasks: tuple[str, ...] = ()
    limit: int = 20
    repeat: int | None = None
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.measures:
            if name not in MEASURES:
                raise ValueError(f"there is no measure {name!r}; there are {', '.join(MEASURES)}")
        if not self.measures:
            raise ValueError(f"no measure was named; there are {', '.join(MEASURES)}")
        if (TASKS in self.measures) != bool(self.tasks):
            raise ValueError(
                "the measure tasks needs the names of lm-eval tasks, and they need it; such as "
                "--measures tasks --tasks niah_single_1"
            )
        if self.recipe is not None and self.profile is not None:
            raise ValueError("a recipe and a profile were given; a profile holds its own recipes")
        if not self.lengths:
            raise ValueError("lengths must name at least one number of tokens")
        for length in self.lengths:
            if length < BLOCK_Q:
                raise ValueError(
                    f"a length must be at least one block, {BLOCK_Q} tokens; got {length}"
                )
        for name in ("depths", "windows", "limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def depth_percents(self) -> list[int]:
        """The middles of equal parts: the two ends are kept by every recipe and prove little."""
        return [round(100 * (i + 0.5) / self.depths) for i in range(self.depths)]

    @property
    def needed_tokens(self) -> int:
        """The longest stretch of the text that a measure asks for."""
        own = {PREFILL, PERPLEXITY, ERRORS, NEEDLE} & set(self.measures)
        return max(self.lengths) if own else 0

    def cells(self) -> list[Cell]:
        found: list[Cell] = []
        for measure in dict.fromkeys(self.measures):
            found += _cells_of(self, measure)
        return found

    def to_dict(self) -> dict[str, Any]:
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        recipe = self.recipe or (DEFAULT if self.profile is None else None)
        return out | {"recipe": None if recipe is None else recipe.to_dict()}

    def of_a_cell(self) -> dict[str, Any]:
        """What changes the number in a cell; which cells there are may differ from run to run."""
        plain = self.to_dict()
        for name in ("lengths", "measures", "depths", "tasks", "windows", "model", "text"):
            del plain[name]
        if self.profile is not None:
            plain["profile"] = digest_of(Path(self.profile).read_bytes())
        return json.loads(json.dumps(plain))


def _cells_of(settings: Settings, measure: str) -> list[Cell]:
    lengths: Sequence[int] = sorted(set(settings.lengths))
    if measure == PREFILL:
        return [Cell(measure, length) for length in sorted({SHORT, *lengths})]
    if measure == PERPLEXITY:
        # Windows outside: a run that is interrupted has each length once before any twice.
        return [
            Cell(measure, length, window=i) for i in range(settings.windows) for length in lengths
        ]
    if measure == NEEDLE:
        return [
            Cell(measure, length, variant, depth=depth)
            for length in lengths
            for depth in settings.depth_percents
            for variant in VARIANTS
        ]
    if measure == ERRORS:
        return [Cell(measure, length) for length in lengths]
    return [
        Cell(measure, length, variant, task=task)
        for length in lengths
        for task in settings.tasks
        for variant in VARIANTS
    ]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
