"""Dense attention by torch's own kernels: what `auto` routes to where it is faster.

SDPA itself where it says the same thing; where it cannot (an LSE, a bottom-right diagonal), the
queries go in slices with the token mask of each slice, so that long ones stay within bounds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.autocast import without_autocast
from ..values.call import Call, slices_of, work_dtype
from ..values.tokenmask import TokenMask

# Scores held at once where we compute them ourselves: 16M fp32 numbers are 64 MB.
_SCORES = 1 << 24


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, tokens: TokenMask, *, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`(out, lse or None)`, every allowed pair attended."""
    gqa = _decided(query.shape[1] != key.shape[1])
    diagonal = _decided(tokens.is_causal and not tokens.hides_nothing)
    mask = tokens.attn_mask
    apart = diagonal and (mask is not None or tokens.offset != 0)
    # torch gives NaN gradients to rows that a mask leaves nothing, so those go in slices too.
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not need_lse and not apart and not (wants_grad and mask is not None):
        mask = None if mask is None else _as_sdpa_takes_it(mask, query.dtype)
        if diagonal and _decided(scale <= 0):
            # torch's causal kernel masks with -inf before it scales: NaN unless scale > 0.
            query, scale = (-query, -scale) if _decided(scale < 0) else (query * 0.0, 1.0)
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=diagonal, scale=scale, enable_gqa=gqa
        )
        return out, None
    if gqa:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    slices = [slice(0, tokens.Lq)]
    if not torch.compiler.is_compiling():  # a loop in a graph is compiled anew for every length
        step = max(16, _SCORES // (query.shape[0] * query.shape[1] * tokens.Lk))
        slices = slices_of(tokens.Lq, step)
    parts = [
        _attend_slice(
            query[:, :, rows], key, value, _slice_bias(tokens, rows, query), scale, need_lse
        )
        for rows in slices
    ]
    out = torch.cat([part[0] for part in parts], 2)
    lses = [part[1] for part in parts if part[1] is not None]
    return out, torch.cat(lses, 2) if need_lse else None


def sdpa_arguments(call: Call) -> dict[str, Any] | None:
    """What `attend_dense` gives torch's SDPA besides the tensors; None where it does more."""
    diagonal = call.is_causal and call.offset < call.Lk - 1
    if call.has_mask or call.return_lse or (diagonal and (call.offset or call.scale <= 0)):
        return None
    return {"is_causal": diagonal, "scale": call.scale, "enable_gqa": call.Hq != call.Hk}


def _decided(condition: bool) -> bool:
    """A plain bool: of a dynamic shape in a compiled graph, a condition is a symbol until asked."""
    if condition:  # noqa: SIM103
        return True
    return False


def _attend_slice(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Some rows over all keys. Rows without a key attend evenly for a moment, then are zeroed."""
    nothing = (bias == -math.inf).all(-1, keepdim=True)
    bias = bias.masked_fill(nothing, 0.0)
    if not need_lse:
        out = F.scaled_dot_product_attention(query, key, value, bias, scale=scale)
        return out.masked_fill(nothing, 0.0), None
    work = work_dtype(query.dtype)
    with without_autocast(query.device.type):
        scores = query.to(work) @ key.to(work).mT * scale + bias
        lse = torch.logsumexp(scores, -1)
        # Not exp(scores - lse): under a bias as low as finfo.min, the LSE has lost its digits.
        out = torch.softmax(scores, -1) @ value.to(work)
    out = out.masked_fill(nothing, 0.0).to(query.dtype)
    return out, lse.masked_fill(nothing.squeeze(-1), -math.inf)


def _slice_bias(tokens: TokenMask, rows: slice, query: Tensor) -> Tensor:
    """Additive mask of some rows, `[1|B, 1|Hq, rows, Lk]`, fp32 or fp64."""
    work = work_dtype(query.dtype)
    bias = torch.zeros((1, 1, rows.stop - rows.start, tokens.Lk), dtype=work, device=query.device)
    if tokens.is_causal:
        q_pos = torch.arange(rows.start, rows.stop, device=query.device) + tokens.offset
        future = torch.arange(tokens.Lk, device=query.device) > q_pos[:, None]
        bias = bias.masked_fill(future, -math.inf)
    if tokens.attn_mask is not None:
        mask = tokens.attn_mask
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
    return bias


def _as_sdpa_takes_it(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """SDPA takes bool, fp32 and the query's dtype; fp32 beside fp64 queries it does not.

    An fp32 bias is never rounded to 16 bits: positions of a long sequence would run together.
    """
    widen = dtype == torch.float64 and mask.dtype == torch.float32
    return mask.double() if widen else mask
