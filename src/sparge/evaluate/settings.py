"""NOUN what to evaluate: checked before any work, and split into cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..geometry import BLOCK_Q
from ..recipe import DEFAULT, Recipe

DENSE_VARIANT, SPARGE_VARIANT = "dense", "sparge"
VARIANTS = (DENSE_VARIANT, SPARGE_VARIANT)
PREFILL, PERPLEXITY, NEEDLE, ERRORS, TASKS = "prefill", "perplexity", "needle", "errors", "tasks"
MEASURES = (PREFILL, PERPLEXITY, NEEDLE, ERRORS, TASKS)
WITH_HARNESS = (NEEDLE, TASKS)  # measures that run through lm-eval
SHORT = 512
"""Tokens of a prefill so short that dense attention is faster; sparge must not slow it down."""
DEFAULT_LENGTHS = (2048, 4096, 8192)
DEFAULT_MEASURES = (PREFILL, PERPLEXITY, NEEDLE, ERRORS)


@dataclass(frozen=True)
class Cell:
    """One measurement, saved as soon as it is made. variant: "" where both are compared."""

    measure: str
    length: int
    variant: str = ""
    depth: int | None = None
    window: int | None = None
    task: str = ""

    @property
    def key(self) -> str:
        """The name of the cell in the run directory."""
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
    """depths: number of needles per length, in the middle of that many equal parts of the text.

    windows: parts of the text on which perplexity is measured. repeat: rounds of prefill; None
    chooses by their duration. limit: documents per lm-eval task.
    """

    model: str
    recipe: Recipe | None = None
    profile: str | None = None
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    measures: tuple[str, ...] = DEFAULT_MEASURES
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
                raise ValueError(f"--measures must be of {', '.join(MEASURES)}; got {name!r}")
        if not self.measures:
            raise ValueError(f"--measures needs a name; known: {', '.join(MEASURES)}")
        if (TASKS in self.measures) != bool(self.tasks):
            raise ValueError(
                "--measures tasks and --tasks NAME,… need each other; for example "
                "--measures tasks --tasks niah_single_1"
            )
        if self.recipe is not None and self.profile is not None:
            raise ValueError("--recipe and --profile cannot be combined; a profile holds recipes")
        if not self.lengths:
            raise ValueError("--lengths must name at least one number of tokens")
        for length in self.lengths:
            if length < BLOCK_Q:
                raise ValueError(
                    f"--lengths must be at least one block, {BLOCK_Q} tokens; got {length}"
                )
        for name in ("depths", "windows", "limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")

    @property
    def depth_percents(self) -> list[int]:
        """The middle of equal parts. Both ends are kept by every recipe and would prove little."""
        return [round(100 * (i + 0.5) / self.depths) for i in range(self.depths)]

    @property
    def needed_tokens(self) -> int:
        """The longest window of the text that a measure needs."""
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
        """The settings that change the result of a cell; others only choose the cells."""
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
        # Windows outermost: an interrupted run has every length once before any length twice.
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
