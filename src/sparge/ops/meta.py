"""Shapes, dtypes and strides of what the ops return, for graphs that are traced and not run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import work_dtype
from ..dispatch.choose import get_backend
from ..geometry import BLOCK_K, BLOCK_Q, n_blocks
from ..recipe import recipe_from_json


def fake_plan(query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, Hq, Lq = query.shape[:3]
    n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(key.shape[2], BLOCK_K)
    rows = (B, Hq, n_q)
    return (
        query.new_empty(rows, dtype=torch.int32),
        query.new_empty((*rows, n_k), dtype=torch.int32),
        query.new_empty(rows, dtype=torch.int32),
    )


def fake_quantize(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    fast, backend = recipe_from_json(rest[3]).precision == "int8-fast", get_backend(rest[-1])
    B, Hk, Lk, Dv = value.shape
    n_q = n_blocks(query.shape[2], backend.q_rows_per_scale)
    n_k = n_blocks(Lk, backend.k_rows_per_scale)
    codes: dict[str, Any] = {"dtype": torch.int8}
    scales: dict[str, Any] = {"dtype": torch.float32}
    return (
        query.new_empty(query.shape, **codes),
        query.new_empty((*query.shape[:2], n_q), **scales),
        key.new_empty(key.shape, **codes),
        key.new_empty((B, Hk, n_k), **scales),
        value.new_empty(value.shape, **codes) if fast else value.new_empty(0),
        value.new_empty((B, Hk, n_blocks(Lk, BLOCK_K), Dv) if fast else (0,), **scales),
        query.new_empty(query.shape[:3], **scales),
    )


def _attended(query: Tensor, Dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    B, Hq, Lq = query.shape[:3]
    return (
        query.new_empty((B, Hq, Lq, Dv), dtype=dtype),
        query.new_empty((B, Hq, Lq), dtype=work_dtype(dtype)),
        query.new_empty((B, Hq, n_blocks(Lq, BLOCK_Q)), dtype=torch.int32),
    )


def fake_attend(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _attended(query, value.shape[3], query.dtype)


def fake_attend_quantized(
    q_codes: Tensor, q_scale: Tensor, k_codes: Tensor, k_scale: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _attended(q_codes, v.shape[3], rest[-4])


def fake_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (query, key, value))
    return q, k, v


def fake_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, lse, _ = _attended(query, value.shape[3], query.dtype)
    counts, indices, allowed = fake_plan(query, key)
    return out, lse, counts, indices, allowed


def fake_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    Tq, Hq = query.shape[:2]
    lse = query.new_empty((Hq, Tq), dtype=work_dtype(query.dtype))
    return query.new_empty((Tq, Hq, value.shape[2])), lse
