"""Fake kernels: shapes, dtypes and strides of what the ops return, for graphs being traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...values.call import BLOCK_K, BLOCK_Q, n_blocks, work_dtype
from ...values.recipe import KeepError, recipe_from_json


def plan_tensors(query: Tensor, Lk: int) -> tuple[Tensor, Tensor, Tensor]:
    """counts, indices, allowed."""
    B, Hq, Lq = query.shape[:3]
    rows = (B, Hq, n_blocks(Lq, BLOCK_Q))
    counts, indices, allowed = (
        query.new_empty(shape, dtype=torch.int32)
        for shape in (rows, (*rows, n_blocks(Lk, BLOCK_K)), rows)
    )
    return counts, indices, allowed


def plan(
    query: Tensor, key: Tensor, attn_mask: Any, block_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recipe = recipe_from_json(rest[3])
    measures = isinstance(recipe.keep, KeepError) and block_mask is None
    shape = (3, *query.shape[:2]) if measures else (0,)
    return (*plan_tensors(query, key.shape[2]), query.new_empty(shape, dtype=torch.float64))


def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, Hq, Lq = query.shape[:3]
    return (
        query.new_empty((B, Hq, Lq, value.shape[3])),
        query.new_empty((B, Hq, Lq), dtype=work_dtype(query.dtype)),
        query.new_empty((B, Hq, n_blocks(Lq, BLOCK_Q)), dtype=torch.int32),
    )


def attend_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (query, key, value))
    return q, k, v


def attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, lse, _ = attend(query, key, value)
    return (out, lse, *plan_tensors(query, key.shape[2]))


def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    Tq, Hq = query.shape[:2]
    lse = query.new_empty((Hq, Tq), dtype=work_dtype(query.dtype))
    return query.new_empty((Tq, Hq, value.shape[2])), lse
