"""Call metadata and tensors as arguments of `torch.ops.sparge_cpu`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...values.call import Call
from ...values.geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...values.qtensor import Pooled, QTensor
from ...values.recipe import heads_of
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from . import library

ROWS_PER_SCALE = 1
"""Rows of Q and K that share a scale; the ops take any number."""


def parts_of(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None]:
    """Numbers, or codes and their scales."""
    return (x.codes, x.scale.contiguous()) if isinstance(x, QTensor) else (x, None)


def pooled_parts(pooled: Pooled | None) -> tuple[Any, ...]:
    """`pooled_key, pooled_value, pooled_k_scale, pooled_v_scale, pool_group`."""
    if pooled is None:
        return None, None, None, None, 1
    (k, k_scale), (v, v_scale) = parts_of(pooled.key), parts_of(pooled.value)
    return k, v, k_scale, v_scale, pooled.group


def scored_parts(prepared: Prepared) -> tuple[Any, ...]:
    """`query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale`."""
    (q, q_scale), (k, k_scale) = parts_of(prepared.queries.rows), parts_of(prepared.keys.key)
    return q, k, q_scale, ROWS_PER_SCALE, k_scale, ROWS_PER_SCALE


def min_similarity(call: Call) -> Tensor | None:
    """Of each query head; None without a similarity test, as always for `KeepAll`."""
    least = call.recipe.min_similarity
    if least is None or not call.predicts:
        return None
    return torch.tensor(heads_of(least, call.Hq, none=-1.0))


def token_parts(tokens: TokenMask) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """`mask, kinds, is_causal, offset`."""
    kinds = tokens.kinds
    if kinds is None and tokens.attn_mask is not None:
        kinds = block_kinds(tokens)
    return tokens.attn_mask, kinds, tokens.is_causal, tokens.offset


def block_kinds(tokens: TokenMask) -> Tensor:
    """Kinds of blocks under the caller's mask. Without one, the kernels derive them from the
    diagonal."""
    mask = tokens.attn_mask
    assert mask is not None
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    kinds = mask.new_empty((*mask.shape[:2], n_q, n_k), dtype=torch.int8)
    facts = (tokens.Lq, tokens.Lk, tokens.is_causal, tokens.offset)
    library.ops().block_kinds(mask, *facts, kinds, library.isa_number())
    return kinds
