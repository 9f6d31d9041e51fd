"""The mass map, by csrc/predict.h."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.call import Call
from ...values.recipe import PRECISIONS, PREDICTORS
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from . import library
from .library import min_similarity, scored_parts, token_parts


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    """0 where no pair may attend; NaN in every other block of a row that is not known."""
    keys, recipe = prepared.keys, call.recipe
    mass = torch.empty((call.B, call.Hq, call.n_q, call.n_k), dtype=torch.float32)
    library.ops().predict(
        *scored_parts(prepared),
        PRECISIONS.index(recipe.precision),
        call.scale,
        prepared.queries.pooled,
        keys.pooled,
        keys.similarity,
        min_similarity(recipe, call.Hq),
        *token_parts(tokens),
        PREDICTORS.index(recipe.predictor),
        recipe.sample_rows,
        mass,
        library.isa_number(),
    )
    return mass
