"""What to evaluate: checked before any work, and split into cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sparge import BLOCK_Q, DEFAULT, Recipe

DENSE_VARIANT, SPARGE_VARIANT = "dense", "sparge"
VARIANTS = (DENSE_VARIANT, SPARGE_VARIANT)
PREFILL, PERPLEXITY, NEEDLE, ERRORS, TASKS = "prefill", "perplexity", "needle", "errors", "tasks"
MEASURES = (PREFILL, PERPLEXITY, NEEDLE, ERRORS, TASKS)
SHORT = 512
"""Tokens of a prefill so short that dense attention is faster; sparge must not slow it down."""


@dataclass(frozen=True)
class Cell:
    """One measurement, saved as soon as it is made. variant: "" where both are compared."""

    measure: str
    length: int
    depth: int | None = None
    window: int | None = None
    task: str = ""
    variant: str = ""

    @property
    def key(self) -> str:
        """The name of the cell in the run directory."""
        _, *named = vars(self).items()
        given = [f"{name}={value}" for name, value in named if value not in (None, "")]
        return " ".join([self.measure, *given])


@dataclass(frozen=True)
class Settings:
    """depths: number of needles per length, in the middle of that many equal parts of the text.

    windows: parts of the text on which perplexity is measured. repeat: rounds of prefill; None
    chooses by their duration. limit: documents per lm-eval task.
    """

    model: str
    recipe: Recipe | None = None
    profile: str | None = None
    lengths: Sequence[int] = (2048, 4096, 8192)
    measures: Sequence[str] = (PREFILL, PERPLEXITY, NEEDLE, ERRORS)
    text: str = "essays"
    depths: int = 5
    windows: int = 1
    tasks: Sequence[str] = ()
    limit: int = 20
    repeat: int | None = None
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.measures or [""]:
            if name not in MEASURES:
                raise ValueError(f"--measures must be of {', '.join(MEASURES)}; got {name!r}")
        if (TASKS in self.measures) != bool(self.tasks):
            raise ValueError(
                "--measures tasks and --tasks NAME,… need each other; for example "
                "--measures tasks --tasks niah_single_1"
            )
        if min(self.lengths) < BLOCK_Q:
            raise ValueError(
                f"--lengths must be at least one block, {BLOCK_Q} tokens; got {min(self.lengths)}"
            )

    @property
    def depth_percents(self) -> list[int]:
        """The middle of equal parts. Both ends are kept by every recipe and would prove little."""
        return [round(100 * (i + 0.5) / self.depths) for i in range(self.depths)]

    @property
    def needed_tokens(self) -> int:
        """The longest window of the text that a measure needs."""
        return max(self.lengths) if set(self.measures) - {TASKS} else 0

    def cells(self) -> list[Cell]:
        lengths = sorted(set(self.lengths))
        of_measure = {
            PREFILL: [Cell(PREFILL, n) for n in sorted({SHORT, *lengths})],
            # Windows outermost: an interrupted run has every length once before any length twice.
            PERPLEXITY: [
                Cell(PERPLEXITY, n, window=i) for i in range(self.windows) for n in lengths
            ],
            NEEDLE: [
                Cell(NEEDLE, n, depth=depth, variant=variant)
                for n in lengths
                for depth in self.depth_percents
                for variant in VARIANTS
            ],
            ERRORS: [Cell(ERRORS, n) for n in lengths],
            TASKS: [
                Cell(TASKS, n, task=task, variant=variant)
                for n in lengths
                for task in self.tasks
                for variant in VARIANTS
            ],
        }
        return [cell for measure in dict.fromkeys(self.measures) for cell in of_measure[measure]]

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


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
