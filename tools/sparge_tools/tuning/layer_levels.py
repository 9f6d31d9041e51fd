"""Levels of sparsity of one layer: for each, the masses of its heads that keep the fewest blocks.

Each head is scored once on some query blocks, which gives the squared error of its output and the
blocks kept at every mass. Squared errors add up over heads, so a level spends one error on all
heads of the layer together, where it saves most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge import Backend, Recipe
from sparge.values.recipe import heads_of

from .allocate import Option, steps_of
from .capture import Capture
from .score import CaptureScorer, LayerScorer, ScoredHead
from .search import MASSES as SEARCHED
from .search import kept_sets

MASSES = (*SEARCHED, 1.0)
"""The last one keeps everything: its error is that of the precision alone."""
ERRORS = (*(round(0.01 * 2 ** (i / 3), 4) for i in range(19)), math.inf)
"""Relative errors (L2) of a layer's attention, 0.01 to 0.64, each of them a level; the last level
is the sparsest there is."""


@dataclass(frozen=True)
class Level:
    """error: relative L2 of the layer's attention, as scored. masses: of each head. density: of
    the scored query blocks."""

    error: float
    masses: tuple[float, ...]
    density: float


@dataclass(frozen=True)
class HeadCurves:
    """Sums over the scored blocks: wrong and kept `[heads][masses]`, right and allowed `[heads]`.

    wrong: squared error of the output at each of `MASSES`; right: the squared output.
    """

    wrong: Any
    kept: Any
    right: Any
    allowed: Any

    def __add__(self, other: HeadCurves) -> HeadCurves:
        return HeadCurves(*(_sum(a, vars(other)[name]) for name, a in vars(self).items()))


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [_sum(x, y) for x, y in zip(a, b, strict=True)]
    return a + b


def curves_of(captures: Sequence[Capture], recipe: Recipe, backend: Backend) -> HeadCurves:
    """The curves of all heads of a layer on some captures."""
    recipe = replace(recipe, local_blocks=recipe.window(captures[0].is_causal))
    masses = torch.tensor(MASSES, dtype=torch.float64)
    with torch.no_grad():
        scorer = LayerScorer([CaptureScorer(each, recipe, backend) for each in captures])
        similarity = heads_of(recipe.min_similarity, captures[0].Hq, none=-1.0)
        heads = [
            [_curve(one, recipe.predictor, similarity[h], masses) for one in scorer.head(h)]
            for h in range(captures[0].Hq)
        ]
    sums = [[torch.stack(x).sum(0).tolist() for x in zip(*each, strict=True)] for each in heads]
    return HeadCurves(*(list(x) for x in zip(*sums, strict=True)))


def _curve(
    head: ScoredHead, predictor: str, similarity: float, masses: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = kept_sets(head, predictor, [similarity], masses)[:, 0]
    wrong = torch.zeros(len(masses), dtype=torch.float64)
    right = torch.zeros((), dtype=torch.float64)
    for block, own in zip(head.blocks, kept, strict=True):
        sets = own[:, : len(block.sums)].to(block.sums.dtype)
        row_sum = sets @ block.sums
        out = (sets @ block.outputs.flatten(1)).unflatten(1, block.truth.shape)
        out /= row_sum.masked_fill_(row_sum == 0, 1.0).unsqueeze(-1)
        wrong += out.sub_(block.truth).square_().sum((1, 2)).double().cpu()
        right += block.truth.square().sum().double().cpu()
    return wrong, kept.sum((0, 2)).double().cpu(), right, head.may.sum().double().cpu()


def levels_of(curves: HeadCurves, errors: Sequence[float] = ERRORS) -> list[Level]:
    """A level for each error that sparser settings reach, the first of them with everything kept.

    The error of 8 bits is in the curves; what a level adds to it counts.
    """
    options = {
        h: [
            Option(kept, max(wrong - curves.wrong[h][-1], 0.0))
            for kept, wrong in zip(curves.kept[h], curves.wrong[h], strict=True)
        ]
        for h in range(len(curves.kept))
    }
    chosen, steps = steps_of(options)
    right, allowed = sum(curves.right), sum(curves.allowed)
    levels = [Level(0.0, (1.0,) * len(options), 1.0)]
    spent, done = 0.0, 0
    for error in errors:
        while done < len(steps) and spent + steps[done].change <= error**2 * right:
            spent += steps[done].change
            chosen[steps[done].part] = steps[done].option  # type: ignore[index]
            done += 1
        masses = tuple(MASSES[i] for i in chosen.values())
        if masses != levels[-1].masses:
            kept = sum(options[h][i].kept for h, i in chosen.items())
            levels.append(Level((spent / right) ** 0.5, masses, kept / max(allowed, 1)))
    return levels
