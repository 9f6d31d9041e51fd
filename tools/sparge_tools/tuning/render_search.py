"""Levels of sparsity of a pipeline, measured by its renders, and the search among them.

A level is a mass that every head keeps and a share of the run that stays dense. Less mass and a
shorter dense part can only make a render worse, so the levels that meet a bound lie on one side of
a staircase, which is walked once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any

from sparge import KeepMass, Profile, Recipe, Schedule

from ..renders.compare import Given, Settings, render
from ..renders.picture_metrics import BEST_PSNR, METRICS, compare_pictures, mean_of, psnr
from .output_state import OutputState

PSNR = METRICS[0]


@dataclass(frozen=True)
class Level:
    """psnr, density: means over the renders that were searched on; density of whole runs."""

    mass: float
    dense_first: float
    psnr: float
    density: float

    @property
    def words(self) -> str:
        return f"mass {self.mass:g}, dense_first {self.dense_first:g}"


@dataclass(frozen=True)
class Verified:
    """A profile on held-out seeds. figures: means, standard error and the worst.

    density, error: of every head in the sparse part of a run, by layer; the error of the worst run.
    """

    figures: Mapping[str, float]
    density: Mapping[str, Sequence[float]]
    error: Mapping[str, Sequence[float]]

    @property
    def least(self) -> float:
        """The mean PSNR with one standard error to spare."""
        return self.figures[PSNR] - self.figures["psnr_error"]


def search_levels(
    evaluate: Callable[[float, float], Level],
    masses: Sequence[float],
    dense_first: Sequence[float],
    target: float,
) -> list[Level]:
    """All levels on the way along the staircase; those that meet the target are among them.

    masses: from dense to sparse. dense_first: from short to long.
    """
    tried: list[Level] = []
    i = j = 0
    while i < len(masses) and j < len(dense_first):
        best = min((each.density for each in tried if each.psnr >= target), default=1.0)
        if best <= dense_first[j]:
            break  # a run has at least the density of its dense part
        tried.append(evaluate(masses[i], dense_first[j]))
        if tried[-1].psnr >= target:
            i += 1
        else:
            j += 1
    return tried


@dataclass
class Renderer:
    """Renders with settings and compares with the dense renders, which are kept in memory.

    base: what a setting leaves as it is. state: holds the figures of every render so far.
    """

    pipe: Any
    given: Sequence[Given]
    base: Recipe
    settings: Settings
    state: OutputState
    step: Callable[[str], None]
    _dense: dict[tuple[int, int], Any] = field(default_factory=dict)

    def level(self, mass: float, dense_first: float, seeds: Sequence[int]) -> Level:
        """A level on every prompt and seed."""
        settings = replace(
            self.settings,
            recipe=replace(self.base, keep=KeepMass(mass)),
            schedule=Schedule(dense_first=dense_first),
        )
        words = f"mass {mass:g} dense_first {dense_first:g}"
        found = self._on_all(words, settings, seeds, figures=(PSNR,))
        density = mean(each["density"] for each in found)
        level_psnr = mean(each[PSNR] for each in found)
        return Level(mass, dense_first, level_psnr, density)

    def verify(self, profile: Profile, level: Level, seeds: Sequence[int]) -> Verified:
        """A profile as its users run it, on held-out seeds."""
        schedule = Schedule(dense_first=level.dense_first)
        settings = replace(self.settings, profile=profile, schedule=schedule, layers=None)
        settings = replace(settings, measure_error=True)
        words = f"profile of {level.words}"
        found = self._on_all(words, settings, seeds, figures=METRICS)
        each = [one[PSNR] for one in found]
        figures = {
            **{name: mean(one[name] for one in found) for name in METRICS},
            "psnr_error": stdev(each) / math.sqrt(len(each)),
            "psnr_worst": min(each),
            "density": mean(one["density"] for one in found),
            "renders": len(found),
        }
        heads, errors = (
            {
                layer: [one[what][layer] for one in found if layer in one[what]]
                for layer in dict.fromkeys(layer for one in found for layer in one[what])
            }
            for what in ("heads", "errors")
        )
        return Verified(
            figures,
            {layer: [mean(of) for of in zip(*runs, strict=True)] for layer, runs in heads.items()},
            {layer: [max(of) for of in zip(*runs, strict=True)] for layer, runs in errors.items()},
        )

    def _on_all(
        self, words: str, settings: Settings, seeds: Sequence[int], figures: Sequence[str]
    ) -> list[dict[str, Any]]:
        found = []
        for i, given in enumerate(self.given):
            for seed in seeds:
                key = f"{words} prompt {i} seed {seed}"
                one = self.state.get(key)
                if one is None:
                    one = self.state.put(key, self._measure(settings, i, seed, figures))
                    self.step(f"{words}, seed {seed}: {one[PSNR]:.2f} dB, {given.caption}")
                found.append(one)
        return found

    def _measure(
        self, settings: Settings, i: int, seed: int, figures: Sequence[str]
    ) -> dict[str, Any]:
        dense = self._dense_frames(i, seed)
        with settings.accelerate(self.pipe) as handle:
            sparse = render(self.pipe, self.given[i].arguments, seed)
            report = handle.report()
        if sparse.why_no_frames:
            raise ValueError(f"min_psnr needs pictures: {sparse.why_no_frames}")
        if tuple(figures) == (PSNR,):
            pairs = zip(dense, sparse.frames, strict=True)
            told = {PSNR: mean_of([psnr(one, other) for one, other in pairs])}
        else:
            told = compare_pictures(dense, sparse.frames)
        return {
            **{name: told[name] for name in figures},
            PSNR: min(told[PSNR], BEST_PSNR),
            "density": report.density,
            "heads": {
                layer.name: list(layer.density_by_head)
                for layer in report.layers
                if layer.density_by_head
            },
            "errors": {
                layer.name: list(layer.error_by_head)
                for layer in report.layers
                if layer.error_by_head
            },
        }

    def _dense_frames(self, i: int, seed: int) -> Any:
        if (i, seed) not in self._dense:
            done = render(self.pipe, self.given[i].arguments, seed)
            if done.why_no_frames:
                raise ValueError(f"min_psnr needs pictures: {done.why_no_frames}")
            self._dense[i, seed] = done.frames
        return self._dense[i, seed]
