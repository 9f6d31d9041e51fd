"""Tune one layer: search every head, take the better predictor, run what was found until it holds.

Scores say what a setting should give; only a run says what it does. Each head has a ladder of
settings, sparsest first: all heads run theirs together, those that exceed the bound on any input
step on to a safer one, and a head whose ladder ends stays dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..dispatch import AUTO, Backend
from ..profile import HeadSettings, LayerSettings
from ..recipe import DEFAULT, KeepMass, Recipe
from .capture import Capture
from .pieces import backend_for, run_pieces
from .score import Scorer, Views
from .search import Setting, find_ladder, find_pv_ladder

PREDICTORS = ("mean", "blend")
COST_OF_ROWS = 0.01
"""In density: what the exact rows of "blend" cost; "mean" is taken where it is as good."""
DENSE = Setting()


@dataclass(frozen=True)
class TunedLayer:
    """evaluations: of attention on one input, scored or run, for each head of the layer."""

    settings: LayerSettings
    evaluations: int


@dataclass(frozen=True)
class Result:
    """What a head's setting gave when it ran; error of the input where it is largest."""

    setting: Setting
    error: float
    density: float
    pv_skipped: float


def tune_layer(
    captures: Sequence[Capture],
    *,
    l1: float,
    l2: float | None,
    base: Recipe = DEFAULT,
    predictors: Sequence[str] = PREDICTORS,
    backend: str = AUTO,
) -> TunedLayer:
    """The settings of one layer from its captures, one for each calibration input.

    base: precision, sink, local window and sampled rows; what it keeps is what is tuned.
    """
    window = base.window(captures[0].is_causal)
    base = replace(base, local_blocks=window)
    engine = backend_for(captures[0], base, backend)
    with torch.no_grad():
        scorers = [Scorer(capture, base, engine) for capture in captures]
        views, heads = Views(scorers), range(captures[0].Hq)
        ladders: dict[str, list[list[Setting]]] = {name: [] for name in predictors}
        for h in heads:
            for name in predictors:
                ladders[name].append(find_ladder(views.head(h), name, l1))
        predictor = min(predictors, key=lambda name: _cost(name, ladders[name]))
        runner = Runner(scorers, base, predictor, engine)
        found = climb(runner, ladders[predictor], l1)
        if l2 is not None:
            with_pv = [
                []
                if found[h].setting == DENSE
                else find_pv_ladder(views.head(h), predictor, found[h].setting, l2)
                for h in heads
            ]
            found = climb(runner, with_pv, l2, otherwise=found)
    settings = LayerSettings(
        heads=tuple(_head(done) for done in found),
        predictor=predictor,
        precision=base.precision,
        sink_blocks=base.sink_blocks,
        local_blocks=window,
        sample_rows=base.sample_rows,
        protect=base.protect,
        inputs=len(captures),
        rows=sum(capture.query.shape[2] for capture in captures),
    )
    return TunedLayer(settings, len(captures) * (views.scored + runner.runs))


class Runner:
    """Runs one setting per head on every input, and counts how often."""

    def __init__(
        self, scorers: Sequence[Scorer], base: Recipe, predictor: str, backend: Backend
    ) -> None:
        self.scorers, self.base, self.predictor, self.backend = scorers, base, predictor, backend
        self.runs = 0

    def run(self, settings: Sequence[Setting]) -> list[Result]:
        self.runs += 1
        recipe = recipe_of(settings, self.base, self.predictor)
        each = [
            run_pieces(scorer.capture, recipe, scorer.exact, backend=self.backend)
            for scorer in self.scorers
        ]
        # NaN is no error that meets a bound.
        error = torch.stack([m.error for m in each]).nan_to_num(nan=torch.inf).amax(0).tolist()
        kept, allowed, skips, groups = (
            torch.stack([getattr(m, name) for m in each]).sum(0).tolist()
            for name in ("kept", "allowed", "pv_skips", "pv_groups")
        )
        return [
            Result(setting, error[h], kept[h] / max(allowed[h], 1), skips[h] / max(groups[h], 1))
            for h, setting in enumerate(settings)
        ]


def recipe_of(settings: Sequence[Setting], base: Recipe, predictor: str) -> Recipe:
    judge = tuple(setting.min_similarity for setting in settings)
    return Recipe(
        keep=KeepMass(tuple(setting.mass for setting in settings)),
        predictor=predictor,
        min_similarity=judge if predictor == "mean" else None,
        pv_skip=tuple(setting.pv_skip for setting in settings),
        precision=base.precision,
        sink_blocks=base.sink_blocks,
        local_blocks=base.local_blocks,
        protect=base.protect,
        sample_rows=base.sample_rows,
    )


def climb(
    runner: Runner,
    ladders: Sequence[Sequence[Setting]],
    bound: float,
    otherwise: Sequence[Result] | None = None,
) -> list[Result]:
    """Run every head's first setting, and safer ones until each holds the bound on every input.

    otherwise: what a head without a setting that holds goes back to, as it ran before; without
    it such a head is dense, and runs as that too.
    """
    left = [list(ladder) for ladder in ladders]
    done: list[Result | None] = [None] * len(left)
    if otherwise is not None:
        done = [None if ladder else back for ladder, back in zip(left, otherwise, strict=True)]
    while any(result is None for result in done):
        settings = [
            result.setting if result else ladder[0] if ladder else DENSE
            for result, ladder in zip(done, left, strict=True)
        ]
        for h, result in enumerate(runner.run(settings)):
            if done[h] is not None:
                continue
            if not left[h] or result.error <= bound:
                done[h] = result
                continue
            # What a run added to the score, it will add to the next one too.
            more = max(result.error - left[h][0].error, 0.0)
            left[h] = [setting for setting in left[h][1:] if setting.error + more <= bound]
            if not left[h] and otherwise is not None:
                done[h] = otherwise[h]
    return [result for result in done if result is not None]


def _cost(predictor: str, ladders: Sequence[Sequence[Setting]]) -> float:
    density = [ladder[0].density if ladder else 1.0 for ladder in ladders]
    rows = COST_OF_ROWS if predictor == "blend" else 0.0
    return sum(density) / len(density) + rows


def _head(done: Result) -> HeadSettings:
    setting = done.setting
    return HeadSettings(
        mass=setting.mass,
        min_similarity=setting.min_similarity,
        pv_skip=setting.pv_skip,
        density=round(done.density, 4),
        pv_skipped=round(done.pv_skipped, 4),
        error=round(done.error, 5),
    )
