"""Prediction and selection in the native core (csrc/predict.h, select.h and budget.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...blockplan import BlockPlan
from ...geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...qtensor import Operands
from ...recipe import (
    PRECISIONS,
    PREDICTORS,
    KeepAll,
    KeepError,
    KeepFraction,
    KeepMass,
    Recipe,
    heads_of,
)
from ...tokenmask import TokenMask
from ..budget import checked_rows, masses_of, take_step
from ..forced import forced_blocks
from . import library as native
from .arguments import parts_of, scored_parts, token_parts
from .prepare import Statistics, prepare

ALL, MASS, FRACTION = 0, 1, 2


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
    facts: dict[str, Any] = {"scale": scale, "recipe": recipe, "value": value}
    return plan_from(operands, statistics, tokens, **facts)


def plan_from(
    operands: Operands,
    statistics: Statistics,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    value: Tensor | None = None,
) -> BlockPlan:
    """The plan of statistics that were made before; `KeepError` reads the caller's value."""
    facts: dict[str, Any] = {"scale": scale, "recipe": recipe}
    mass = predict(operands, statistics, tokens, **facts)
    return select(operands, statistics, mass, tokens, value=value, **facts)


def predict(
    operands: Operands, statistics: Statistics, tokens: TokenMask, *, scale: float, recipe: Recipe
) -> Tensor | None:
    """The mass map, fp32 `[B, Hq, n_q, n_k]`; None for `KeepAll`, which needs none."""
    if isinstance(recipe.keep, KeepAll):
        return None
    q, _, _ = parts_of(operands.query)
    mass = q.new_empty(_map_shape(q, tokens), dtype=torch.float32)
    native.ops().predict(
        *scored_parts(operands.query, operands.key),
        PRECISIONS.index(recipe.precision),
        scale,
        statistics.q_pooled,
        statistics.k_pooled,
        statistics.k_similarity,
        _min_similarity(recipe, q.shape[1]),
        *token_parts(tokens),
        PREDICTORS.index(recipe.predictor),
        recipe.sample_rows,
        mass,
        native.isa_number(),
    )
    return mass


def select(
    operands: Operands,
    statistics: Statistics,
    mass: Tensor | None,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    value: Tensor | None,
) -> BlockPlan:
    """The kept blocks, from the mass map."""
    q, _, _ = parts_of(operands.query)
    indices = q.new_empty(_map_shape(q, tokens), dtype=torch.int32)
    counts = q.new_empty(indices.shape[:3], dtype=torch.int32)
    allowed = torch.empty_like(counts)
    forced = forced_blocks(tokens, recipe, q.device)
    error = None
    if isinstance(recipe.keep, KeepError):
        assert mass is not None
        assert value is not None
        scored = *scored_parts(operands.query, operands.key), PRECISIONS.index(recipe.precision)
        error = _select_by_error(
            (*scored, scale), value, mass, tokens, recipe, forced, counts, indices, allowed
        )
    else:
        keep, amount = _amount(recipe, q.shape[1])
        native.ops().select(
            mass,
            keep,
            torch.tensor(amount, dtype=torch.float64),
            statistics.q_similarity,
            statistics.k_similarity,
            _min_similarity(recipe, q.shape[1]),
            forced,
            *token_parts(tokens),
            tokens.Lq,
            tokens.Lk,
            counts,
            indices,
            allowed,
            native.isa_number(),
        )
    return BlockPlan(
        counts,
        indices,
        allowed,
        Lq=tokens.Lq,
        Lk=tokens.Lk,
        is_causal=tokens.is_causal,
        causal_align=tokens.causal_align,
        has_mask=tokens.attn_mask is not None,
        error=error,
    ).trust()


def _select_by_error(
    scored: tuple[Any, ...],
    value: Tensor,
    mass: Tensor,
    tokens: TokenMask,
    recipe: Recipe,
    forced: Tensor,
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
) -> Tensor:
    """Measures the error of every step in one pass, then writes the lists of each head's step."""
    assert isinstance(recipe.keep, KeepError)
    query, key, *scoring = scored
    masses = torch.tensor(masses_of(recipe.keep, mass.shape[1]), dtype=torch.float64)
    wrong = mass.new_empty((*mass.shape[:2], masses.shape[1]), dtype=torch.float64)
    whole = mass.new_empty(mass.shape[:2], dtype=torch.float64)
    native.ops().select_steps(
        mass,
        masses,
        query,
        key,
        value,
        *scoring,
        torch.tensor(checked_rows(tokens.Lq, recipe.sample_rows)),
        forced,
        *token_parts(tokens),
        wrong,
        whole,
        indices,
        allowed,
        native.isa_number(),
    )
    step, error = take_step(wrong, whole, recipe.keep)
    native.ops().take_steps(step, counts, indices, native.isa_number())
    return error


def _map_shape(query: Tensor, tokens: TokenMask) -> tuple[int, int, int, int]:
    B, Hq = query.shape[:2]
    return B, Hq, n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)


def _min_similarity(recipe: Recipe, Hq: int) -> Tensor | None:
    """Of each query head; None without a judge, and for `KeepAll`, which judges nothing."""
    least = recipe.min_similarity
    if least is None or isinstance(recipe.keep, KeepAll):
        return None
    return torch.tensor(heads_of(least, Hq, none=-1.0))


def _amount(recipe: Recipe, Hq: int) -> tuple[int, list[float]]:
    if isinstance(recipe.keep, KeepMass):
        return MASS, heads_of(recipe.keep.mass, Hq, none=1.0)
    if isinstance(recipe.keep, KeepFraction):
        return FRACTION, heads_of(recipe.keep.fraction, Hq, none=1.0)
    return ALL, [1.0] * Hq
