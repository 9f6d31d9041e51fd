"""Exact attention of a few rows, in plain torch: what errors are measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from ..values.call import work_dtype
from ..values.tokenmask import TokenMask


def row_weights(
    query: Tensor, key: Tensor, tokens: TokenMask, b: int, h: int, rows: Tensor, *, scale: float
) -> Tensor:
    """Softmax weights `[rows, Lk]` of some rows of one query head, fp32 (fp64 for fp64 inputs).

    A row that may attend nothing has weights of zero, as `attention` returns zeros for it.
    """
    work = work_dtype(query.dtype)
    h_k = h * key.shape[1] // query.shape[1]
    scores = query[b, h, rows].to(work) @ key[b, h_k].to(work).mT * scale
    allowed, bias = tokens.region(b, h, rows, slice(None), query.device)
    scores = scores if bias is None else scores + bias
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(nothing, 0.0)


def row_outputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: TokenMask,
    b: int,
    h: int,
    rows: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention output `[rows, Dv]` of some rows of one query head, in the same dtype."""
    weights = row_weights(query, key, tokens, b, h, rows, scale=scale)
    h_k = h * key.shape[1] // query.shape[1]
    return weights @ value[b, h_k].to(weights.dtype)
