"""Attention over the kept blocks in the native core (csrc/attend.h), and its gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...blockplan import BlockPlan
from ...qtensor import Operands
from ...recipe import PRECISIONS, Recipe, heads_of
from ...tokenmask import TokenMask
from ..reference import backward
from . import library as native
from .arguments import kinds_of, parts_of


def attend(
    operands: Operands,
    plan: BlockPlan,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, lse, pv_skips)`; `dtype` is the caller's."""
    q, q_scale, q_rows = parts_of(operands.query)
    k, k_scale, k_rows = parts_of(operands.key)
    v, v_scale, _ = parts_of(operands.value)
    B, Hq, Lq = q.shape[:3]
    out = q.new_empty((B, Hq, Lq, v.shape[3]), dtype=dtype)
    lse = q.new_empty((B, Hq, Lq), dtype=torch.float32)
    pv_skips = torch.empty_like(plan.counts)
    native.ops().attend(
        q,
        k,
        v,
        q_scale,
        q_rows,
        k_scale,
        k_rows,
        v_scale,
        operands.lse_shift,
        _pv_skip(recipe, Hq),
        plan.counts.contiguous(),
        plan.indices.contiguous(),
        tokens.attn_mask,
        kinds_of(tokens),
        tokens.is_causal,
        tokens.offset,
        PRECISIONS.index(recipe.precision),
        scale,
        out,
        lse,
        pv_skips,
        native.isa_number(),
    )
    return out, lse, pv_skips


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    plan: BlockPlan,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(grad_query, grad_key, grad_value)`, added up in fp32, in the caller's dtypes."""
    if recipe.precision == "half" and query.dtype == torch.float32:
        # Its scores are those of rounded numbers, its products those of the caller's.
        return backward.attend_backward(
            grad_out, grad_lse, query, key, value, out, plan, tokens, scale=scale, recipe=recipe
        )
    delta = (grad_out.float() * out.float()).sum(-1) - grad_lse.float()
    grads = [torch.empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
    native.ops().backward(
        query,
        key,
        value,
        grad_out,
        delta.contiguous(),
        _pv_skip(recipe, query.shape[1]),
        plan.counts.contiguous(),
        plan.indices.contiguous(),
        tokens.attn_mask,
        kinds_of(tokens),
        tokens.is_causal,
        tokens.offset,
        scale,
        *grads,
        native.isa_number(),
    )
    dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))
    return dq, dk, dv


def _pv_skip(recipe: Recipe, Hq: int) -> Tensor | None:
    if recipe.pv_skip is None:
        return None
    return torch.tensor(heads_of(recipe.pv_skip, Hq, none=math.inf), dtype=torch.float32)
