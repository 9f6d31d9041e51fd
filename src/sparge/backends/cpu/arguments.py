"""Our nouns as the native core takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...qtensor import QTensor
from ...tokenmask import TokenMask
from . import library as native


def parts_of(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None, int]:
    """`(numbers or codes, scale, rows per scale)`."""
    if isinstance(x, QTensor):
        return x.codes, x.scale.contiguous(), x.rows_per_scale
    return x, None, 1


def kinds_of(tokens: TokenMask) -> Tensor | None:
    """Kinds of blocks under a mask of the caller's, found once for all stages of a call; without
    a mask the kernels read them off the diagonal."""
    mask = tokens.attn_mask
    if mask is None:
        return None
    known: Tensor | None = tokens.__dict__.get("_kinds")
    if known is None:
        n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
        known = mask.new_empty((*mask.shape[:2], n_q, n_k), dtype=torch.int8)
        facts = (tokens.Lq, tokens.Lk, tokens.is_causal, tokens.offset)
        native.ops().block_kinds(mask, *facts, known, native.isa_number())
        object.__setattr__(tokens, "_kinds", known)
    return known
