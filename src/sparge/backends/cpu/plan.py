"""Prediction and selection in one call."""

from __future__ import annotations

from torch import Tensor

from ...blockplan import BlockPlan
from ...qtensor import Operands
from ...recipe import Recipe
from ...tokenmask import TokenMask
from .predict import predict
from .prepare import Statistics, prepare
from .select import select


def make_plan(
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    value: Tensor | None = None,
) -> BlockPlan:
    operands, statistics = prepare(query, key, None, scale=scale, recipe=recipe)
    return plan_from(operands, statistics, tokens, scale=scale, recipe=recipe, value=value)


def plan_from(
    operands: Operands,
    statistics: Statistics,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    value: Tensor | None = None,
) -> BlockPlan:
    """The plan of statistics that exist already; `KeepError` reads the caller's value."""
    mass = predict(operands, statistics, tokens, scale=scale, recipe=recipe)
    return select(operands, statistics, mass, tokens, scale=scale, recipe=recipe, value=value)
