"""Prediction and selection in the native core (csrc/plan.h, csrc/select.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..blockplan import BlockPlan
from ..geometry import BLOCK_K, BLOCK_Q, n_blocks
from ..nativeargs import kinds_of, parts_of
from ..qtensor import Operands
from ..quantize.cpu import Statistics, prepare
from ..recipe import PRECISIONS, PREDICTORS, KeepFraction, KeepMass, Recipe, heads_of
from ..tokenmask import TokenMask
from .forced import forced_blocks

ALL, MASS, FRACTION = 0, 1, 2


def make_plan(
    query: Tensor, key: Tensor, tokens: TokenMask, *, scale: float, recipe: Recipe
) -> BlockPlan:
    operands, statistics = prepare(query, key, None, scale=scale, recipe=recipe)
    return plan_from(operands, statistics, tokens, scale=scale, recipe=recipe)


def plan_from(
    operands: Operands,
    statistics: Statistics,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
) -> BlockPlan:
    """The plan of statistics that were made before."""
    q, q_scale, q_rows = parts_of(operands.query)
    k, k_scale, k_rows = parts_of(operands.key)
    B, Hq = q.shape[:2]
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    keep, amount = _amount(recipe, Hq)
    least = recipe.min_similarity
    judge = None if least is None else torch.tensor(heads_of(least, Hq, none=-1.0))
    counts = q.new_empty((B, Hq, n_q), dtype=torch.int32)
    indices = q.new_empty((B, Hq, n_q, n_k), dtype=torch.int32)
    allowed = torch.empty_like(counts)
    mask, kinds = tokens.attn_mask, kinds_of(tokens)
    native.ops().plan(
        q,
        k,
        q_scale,
        q_rows,
        k_scale,
        k_rows,
        statistics.q_pooled,
        statistics.k_pooled,
        statistics.q_similarity,
        statistics.k_similarity,
        judge,
        torch.tensor(amount, dtype=torch.float64),
        forced_blocks(tokens, recipe, q.device).to(torch.int8),
        mask,
        kinds,
        tokens.is_causal,
        tokens.offset,
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
    return BlockPlan(
        counts,
        indices,
        allowed,
        Lq=tokens.Lq,
        Lk=tokens.Lk,
        is_causal=tokens.is_causal,
        causal_align=tokens.causal_align,
        has_mask=mask is not None,
    ).trust()


def _amount(recipe: Recipe, Hq: int) -> tuple[int, list[float]]:
    if isinstance(recipe.keep, KeepMass):
        return MASS, heads_of(recipe.keep.mass, Hq, none=1.0)
    if isinstance(recipe.keep, KeepFraction):
        return FRACTION, heads_of(recipe.keep.fraction, Hq, none=1.0)
    return ALL, [1.0] * Hq
