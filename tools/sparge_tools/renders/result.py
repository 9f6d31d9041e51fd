"""NOUN a dense and a sparse render of each input, and how they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sparge.models import Report

from .picture_metrics import LOWER_IS_BETTER, mean_of

FORMAT = "sparge.renders/1"
ERRORS = (*LOWER_IS_BETTER, "latent_error", "relative_l2", "largest_error")
"""Figures of which less is better."""


@dataclass(frozen=True, eq=False)
class Pair:
    """One input, computed by the model's own attention and with sparge, from the same noise.

    figures: how the results differ, by name; an infinite psnr is of equal pictures.
    latent_errors: relative L2 of the latents after each step. dense, sparse: the pictures, uint8
    `[T, H, W, 3]`; None where there are none. missing: what could not be measured, and why.
    report: of the sparse run.
    """

    caption: str
    seed: int | None
    dense_seconds: float
    sparse_seconds: float
    figures: Mapping[str, float]
    report: Report
    dense: Any = None
    sparse: Any = None
    latent_errors: tuple[float, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_identical(self) -> bool | None:
        """Whether all pixels are equal; None without pictures."""
        return None if self.dense is None else bool((self.dense == self.sparse).all())

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.sparse_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the pictures. An infinite psnr becomes null in JSON; `is_identical`
        tells it from one that is missing."""
        return {
            "caption": self.caption,
            "seed": self.seed,
            "dense_seconds": self.dense_seconds,
            "sparse_seconds": self.sparse_seconds,
            "speedup": self.speedup,
            "density": self.report.density,
            "sparse_density": self.report.sparse_density,
            "figures": dict(self.figures),
            "is_identical": self.is_identical,
            "frames": None if self.dense is None else len(self.dense),
            "latent_errors": list(self.latent_errors),
            "missing": dict(self.missing),
            "fallbacks": dict(self.report.fallbacks),
            "steps": step_densities(self.report),
        }


@dataclass(frozen=True, eq=False)
class Renders:
    """The pairs of one model with one setting. metric: the figure that decides."""

    model: str
    about: str
    metric: str
    pairs: tuple[Pair, ...]
    settings: Mapping[str, Any]

    def values(self, figure: str) -> list[float]:
        return [pair.figures[figure] for pair in self.pairs if figure in pair.figures]

    def mean(self, figure: str) -> float | None:
        """Over the pairs that have it; None if none has. See `mean_of` for infinite ones."""
        values = self.values(figure)
        return mean_of(values) if values else None

    def worst(self, figure: str) -> float | None:
        """Of one pair."""
        values = self.values(figure)
        if not values:
            return None
        return max(values) if figure.removesuffix("_worst") in ERRORS else min(values)

    @property
    def figures(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair.figures))

    @property
    def density(self) -> float:
        return sum(pair.report.density for pair in self.pairs) / len(self.pairs)

    @property
    def sparse_density(self) -> float:
        """Of the calls that ran sparse."""
        return sum(pair.report.sparse_density for pair in self.pairs) / len(self.pairs)

    @property
    def speedup(self) -> float:
        """The median over pairs."""
        return median(pair.speedup for pair in self.pairs)

    @property
    def fallbacks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pair in self.pairs:
            for reason, n in pair.report.fallbacks.items():
                found[reason] = found.get(reason, 0) + n
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "about": self.about,
            "metric": self.metric,
            "settings": dict(self.settings),
            "density": self.density,
            "sparse_density": self.sparse_density,
            "speedup": self.speedup,
            "figures": {
                name: {"mean": self.mean(name), "worst": self.worst(name)} for name in self.figures
            },
            "notes": list(dict.fromkeys(note for p in self.pairs for note in p.report.notes)),
            "pairs": [pair.to_dict() for pair in self.pairs],
        }


def step_densities(report: Report) -> dict[str, Any]:
    """Density by layer × step, and by layer × step × head where a step ran sparse."""
    steps = sorted({each.step for layer in report.layers for each in layer.by_step})
    noise: dict[int, float | None] = {}
    layers: list[list[float | None]] = []
    heads: list[list[list[float] | None]] = []
    for layer in report.layers:
        at = {each.step: each for each in layer.by_step}
        noise |= {step: each.noise_level for step, each in at.items()}
        layers.append([round(at[s].density, 4) if s in at else None for s in steps])
        heads.append([_rounded(at[s].density_by_head) if s in at else None for s in steps])
    return {
        "steps": steps,
        "noise_levels": [noise[step] for step in steps],
        "layers": [layer.name for layer in report.layers],
        "density": layers,
        "density_by_head": heads,
        "density_by_step": list(report.density_by_step.values()),
    }


def _rounded(values: Sequence[float]) -> list[float] | None:
    return [round(value, 4) for value in values] or None


def decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.2f}"
