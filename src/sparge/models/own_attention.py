"""Why a model's own attention runs in place of sparge: one list of reasons for every framework."""

from __future__ import annotations

import torch
from torch import Tensor

from ..values.geometry import MAX_HEAD_DIM

CROSS = "cross-attention: its keys are of other tokens than its queries"
ONE_QUERY = "one query (decode): dense attention is faster"
GRADIENT = "a gradient is wanted: torch's own is faster; sparge runs under no_grad"


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def why_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    left_out: str,
    dropout: float = 0.0,
    shared_heads: bool = True,
    cross: bool = True,
    lengths: tuple[int, int] | None = None,
) -> str:
    """Why the model's own attention must run a call, or "".

    left_out: why the settings leave this call dense, or "". shared_heads: several query heads may
    share a key head. cross: attention to other tokens is served, too. lengths: of the queries and
    of the keys, where the tensors are parts of them.
    """
    if left_out:
        return left_out
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return f"tensors of {query.dim()} dimensions; sparge takes 4: [B, H, L, D]"
    if query.shape[0] != key.shape[0] or key.shape[0] != value.shape[0]:
        return "a batch of keys that is broadcast"
    heads = {key.shape[1], value.shape[1]}
    if not shared_heads and heads not in ({query.shape[1]}, {1}):
        return "heads that are broadcast"
    Lq, Lk = (query.shape[2], key.shape[2]) if lengths is None else lengths
    if Lq != Lk and not cross:
        return CROSS
    if dropout > 0.0:
        return f"dropout {dropout}: sparge has none"
    if Lq == 1:
        return ONE_QUERY
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an empty tensor"
    if wants_gradient(query, key, value):
        return GRADIENT
    head_dim = max(query.shape[3], value.shape[3])
    return f"head dim {head_dim} is over {MAX_HEAD_DIM}" if head_dim > MAX_HEAD_DIM else ""
