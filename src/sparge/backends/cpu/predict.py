"""The mass map, in the native core (csrc/predict.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...qtensor import Operands
from ...recipe import PRECISIONS, PREDICTORS, KeepAll, Recipe
from ...tokenmask import TokenMask
from . import library as native
from .arguments import empty_map, min_similarity, scored_parts, token_parts
from .prepare import Statistics


def predict(
    operands: Operands, statistics: Statistics, tokens: TokenMask, *, scale: float, recipe: Recipe
) -> Tensor | None:
    """The predicted share of each key block in the attention of a query block, fp32
    `[B, Hq, n_q, n_k]`; None for `KeepAll`, which predicts nothing.

    0 where no pair may attend; NaN in every other block of a row without a finite prediction.
    """
    if isinstance(recipe.keep, KeepAll):
        return None
    mass = empty_map(operands, tokens, torch.float32)
    native.ops().predict(
        *scored_parts(operands),
        PRECISIONS.index(recipe.precision),
        scale,
        statistics.q_pooled,
        statistics.k_pooled,
        statistics.k_similarity,
        min_similarity(recipe, mass.shape[1]),
        *token_parts(tokens),
        PREDICTORS.index(recipe.predictor),
        recipe.sample_rows,
        mass,
        native.isa_number(),
    )
    return mass
