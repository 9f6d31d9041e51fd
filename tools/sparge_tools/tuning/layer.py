"""Tune one layer: search every head, take the better predictor, run the settings found.

Scores predict the error of a setting; a run measures it. Each head has a ladder of settings,
sparsest first: all heads run theirs together, those that exceed the bound on any input step on to
a safer one, and a head whose ladder ends stays dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from sparge import DEFAULT, Backend, Recipe
from sparge.routing import AUTO
from sparge.values.profile import RECIPE_FIELDS, HeadSettings, LayerSettings

from .capture import Capture, backend_for, run_captured
from .score import CaptureScorer, LayerScorer
from .search import find_ladder, find_pv_ladder

PREDICTORS = ("mean", "blend")
COST_OF_ROWS = 0.01
"""Cost of the exact rows of "blend", in density; "mean" is taken where it is as good."""
Ladder = Sequence[HeadSettings]


@dataclass(frozen=True)
class TunedLayer:
    """evaluations: of attention on one input, scored or run, for each head of the layer."""

    settings: LayerSettings = field(default_factory=LayerSettings)
    evaluations: int = 0
    seconds: float = 0.0


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

    base: precision, sink, local window, protected and sampled rows, and what skipped blocks
    contribute; what it keeps is tuned. Scores take skipped blocks as dropped, also where runs pool
    them: settings found so are safe, and sparser ones may exist.
    """
    base = replace(base, local_blocks=base.window(captures[0].is_causal))
    engine = backend_for(captures[0], base, backend)
    with torch.no_grad():
        scorers = [CaptureScorer(capture, base, engine) for capture in captures]
        scored, heads = LayerScorer(scorers), range(captures[0].Hq)
        ladders: dict[str, list[Ladder]] = {name: [] for name in predictors}
        for h in heads:
            for name in predictors:
                ladders[name].append(find_ladder(scored.head(h), name, l1))
        predictor = min(predictors, key=lambda name: _cost(name, ladders[name]))
        runner = Runner(scorers, base, predictor, engine)
        found = climb(runner, ladders[predictor], l1)
        if l2 is not None:
            with_pv: list[Ladder] = [
                () if found[h].is_dense else find_pv_ladder(scored.head(h), predictor, found[h], l2)
                for h in heads
            ]
            found = climb(runner, with_pv, l2, otherwise=found)
    digits = {"density": 4, "pv_skipped": 4, "error": 5}
    settings = replace(
        runner.layer,
        heads=tuple(
            replace(head, **{name: round(getattr(head, name), n) for name, n in digits.items()})
            for head in found
        ),
        inputs=len(captures),
        rows=sum(capture.query.shape[2] for capture in captures),
    )
    return TunedLayer(settings, len(captures) * (scored.scored + runner.runs))


class Runner:
    """Runs settings, one per head, on every input, and counts how often."""

    def __init__(
        self, scorers: Sequence[CaptureScorer], base: Recipe, predictor: str, backend: Backend
    ) -> None:
        self.scorers, self.backend, self.runs = scorers, backend, 0
        fields = {name: getattr(base, name) for name in RECIPE_FIELDS}
        self.layer = LayerSettings(**{**fields, "predictor": predictor})

    def run(self, settings: Ladder) -> list[HeadSettings]:
        """The settings with their measured error, of the worst input, and their densities."""
        self.runs += 1
        recipe = self.layer.recipe_with(settings)
        each = [
            run_captured(scorer.capture, recipe, scorer.exact, backend=self.backend)
            for scorer in self.scorers
        ]
        # NaN meets no bound.
        error = torch.stack([m.error for m in each]).nan_to_num(nan=torch.inf).amax(0).tolist()
        kept, allowed, skips, groups = (
            torch.stack([getattr(m, name) for m in each]).sum(0).tolist()
            for name in ("kept", "allowed", "pv_skips", "pv_groups")
        )
        measured = zip(settings, error, kept, allowed, skips, groups, strict=True)
        return [
            replace(setting, error=e, density=k / max(a, 1), pv_skipped=s / max(g, 1))
            for setting, e, k, a, s, g in measured
        ]


def climb(
    runner: Runner, ladders: Sequence[Ladder], bound: float, otherwise: Ladder | None = None
) -> list[HeadSettings]:
    """Run every head's first setting, and safer ones until each holds the bound on every input.

    otherwise: measured settings that a head without a bounded one goes back to; without them such
    a head is dense, and is run so too.
    """
    left = [list(ladder) for ladder in ladders]
    done: list[HeadSettings | None] = [None] * len(left)
    if otherwise is not None:
        done = [None if ladder else back for ladder, back in zip(left, otherwise, strict=True)]
    while any(result is None for result in done):
        settings = [
            result or (ladder[0] if ladder else HeadSettings())
            for result, ladder in zip(done, left, strict=True)
        ]
        for h, result in enumerate(runner.run(settings)):
            if done[h] is not None:
                continue
            if not left[h] or result.error <= bound:
                done[h] = result
                continue
            # Expect the next run to exceed its score by as much as this one did.
            more = max(result.error - left[h][0].error, 0.0)
            left[h] = [setting for setting in left[h][1:] if setting.error + more <= bound]
            if not left[h] and otherwise is not None:
                done[h] = otherwise[h]
    return [result for result in done if result is not None]


def _cost(predictor: str, ladders: Sequence[Ladder]) -> float:
    density = [ladder[0].density if ladder else 1.0 for ladder in ladders]
    rows = COST_OF_ROWS if predictor == "blend" else 0.0
    return sum(density) / len(density) + rows
