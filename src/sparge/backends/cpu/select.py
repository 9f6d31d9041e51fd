"""Prediction and selection in the native core (csrc/plan.h, select.h and check.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...blockplan import BlockPlan, plan_from_lists
from ...call import Call
from ...qtensor import Operands
from ...recipe import PRECISIONS, PREDICTORS, KeepError, KeepFraction, KeepMass, Recipe, heads_of
from ...stages import Prepared, Statistics
from ...tokenmask import TokenMask
from ..budget import checked_rows, masses_of, take_step
from ..forced import forced_blocks
from . import library as native
from .arguments import kinds_of, parts_of

ALL, MASS, FRACTION = 0, 1, 2


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    q = parts_of(prepared.operands.query)[0]
    counts = q.new_empty((call.B, call.Hq, call.n_q), dtype=torch.int32)
    indices = q.new_empty((call.B, call.Hq, call.n_q, call.n_k), dtype=torch.int32)
    allowed = torch.empty_like(counts)
    error = None
    operands, statistics = prepared.operands, prepared.statistics
    if isinstance(call.recipe.keep, KeepError):
        assert prepared.value is not None
        args = (statistics, tokens, call.scale, call.recipe)
        error = _plan_by_error(operands, prepared.value, *args, counts, indices, allowed)
    else:
        _plan(operands, statistics, tokens, call.scale, call.recipe, counts, indices, allowed)
    return plan_from_lists(counts, indices, allowed, tokens, error=error)


def _plan(
    operands: Operands,
    statistics: Statistics,
    tokens: TokenMask,
    scale: float,
    recipe: Recipe,
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
) -> None:
    q, k, scales = _scored(operands)
    keep, amount = _amount(recipe, q.shape[1])
    least = recipe.min_similarity
    judge = None if least is None else torch.tensor(heads_of(least, q.shape[1], none=-1.0))
    native.ops().plan(
        q,
        k,
        *scales,
        statistics.q_pooled,
        statistics.k_pooled,
        statistics.q_similarity,
        statistics.k_similarity,
        judge,
        torch.tensor(amount, dtype=torch.float64),
        *_where(tokens, recipe, q.device),
        PREDICTORS.index(recipe.predictor),
        keep,
        PRECISIONS.index(recipe.precision),
        scale,
        recipe.sample_rows,
        counts,
        indices,
        allowed,
        native.isa_number(),
    )


def _plan_by_error(
    operands: Operands,
    value: Tensor,
    statistics: Statistics,
    tokens: TokenMask,
    scale: float,
    recipe: Recipe,
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
) -> Tensor:
    """Every step measured in one pass, then the lists of the one that each head takes."""
    q, k, scales = _scored(operands)
    assert isinstance(recipe.keep, KeepError)
    masses = torch.tensor(masses_of(recipe.keep, q.shape[1]), dtype=torch.float64)
    whole = q.new_empty(q.shape[:2], dtype=torch.float64)
    wrong = q.new_empty((*q.shape[:2], masses.shape[1]), dtype=torch.float64)
    native.ops().plan_steps(
        q,
        k,
        value,
        *scales,
        statistics.q_pooled,
        statistics.k_pooled,
        masses,
        torch.tensor(checked_rows(tokens.Lq, recipe.sample_rows)),
        *_where(tokens, recipe, q.device),
        PRECISIONS.index(recipe.precision),
        scale,
        recipe.sample_rows,
        wrong,
        whole,
        indices,
        allowed,
        native.isa_number(),
    )
    step, error = take_step(wrong, whole, recipe.keep)
    native.ops().take_steps(step, counts, indices, native.isa_number())
    return error


def _scored(operands: Operands) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """What rows are scored with: codes or tensors of q and k, and the scales of both."""
    q, *q_scale = parts_of(operands.query)
    k, *k_scale = parts_of(operands.key)
    return q, k, (*q_scale, *k_scale)


def _where(tokens: TokenMask, recipe: Recipe, device: torch.device) -> tuple[Any, ...]:
    """Which blocks must be kept, and which pairs may attend."""
    forced = forced_blocks(tokens, recipe, device).to(torch.int8)
    return forced, tokens.attn_mask, kinds_of(tokens), tokens.is_causal, tokens.offset


def _amount(recipe: Recipe, Hq: int) -> tuple[int, list[float]]:
    if isinstance(recipe.keep, KeepMass):
        return MASS, heads_of(recipe.keep.mass, Hq, none=1.0)
    if isinstance(recipe.keep, KeepFraction):
        return FRACTION, heads_of(recipe.keep.fraction, Hq, none=1.0)
    return ALL, [1.0] * Hq
