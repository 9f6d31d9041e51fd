"""Symmetric int8: `scale = max|x| / 127`, codes rounded to nearest even, said plainly.

Keys are smoothed first, `k' = k - mean(k)` over the sequence of each head: softmax does not
change, since every score of a row loses the same `q · mean`, and int8 loses far less. That
constant is handed on as `lse_shift`. A group that is all zero has scale 0; one that is not
finite has scale NaN and codes 0, so that nothing plausible can come of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...geometry import BLOCK_K, in_blocks
from ...qtensor import Operands, QTensor
from ...support.ordered_sums import fold_sum, mean_over_rows


def quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    precision: str,
    q_rows_per_scale: int = 1,
    k_rows_per_scale: int = 1,
) -> Operands:
    """Operands of `"int8"` and `"int8-fast"`; a backend names the granularity it gets free."""
    smooth, mean = smooth_keys(key)
    return Operands(
        query=quantize_rows(query.float(), q_rows_per_scale),
        key=quantize_rows(smooth, k_rows_per_scale),
        value=quantize_channels(value) if precision == "int8-fast" else value,
        lse_shift=_lse_shift(query, mean, scale),
    )


def smooth_keys(key: Tensor) -> tuple[Tensor, Tensor]:
    """`(k - mean, mean)`, fp32, the mean `[B, Hk, D]` over the sequence of each head."""
    key = key.float()
    mean = mean_over_rows(key, key.shape[-2])
    return key - mean.unsqueeze(-2), mean


def quantize_rows(x: Tensor, rows_per_scale: int = 1) -> QTensor:
    """One scale for `rows_per_scale` consecutive rows of `x [B, H, L, D]`."""
    groups = in_blocks(x, -2, rows_per_scale)
    scale = groups.abs().amax((-1, -2)) / 127
    codes, scale = _codes(groups, scale[..., None, None])
    return QTensor(
        codes.flatten(2, 3)[:, :, : x.shape[2]], scale[..., 0, 0].contiguous(), rows_per_scale
    )


def quantize_channels(value: Tensor) -> QTensor:
    """One scale per key block and channel of V: they stay outside the sum over keys."""
    groups = in_blocks(value.float(), -2, BLOCK_K)
    scale = groups.abs().amax(-2, keepdim=True) / 127
    codes, scale = _codes(groups, scale)
    codes = codes.flatten(2, 3)[:, :, : value.shape[2]]
    return QTensor(codes, scale.squeeze(-2).contiguous(), BLOCK_K, per_channel=True)


def _codes(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.where(torch.isfinite(scale), scale, torch.nan)
    codes = torch.where(scale > 0, x / scale, 0.0).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def _lse_shift(query: Tensor, mean: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // mean.shape[1]
    mean = mean.repeat_interleave(group, dim=1)
    return fold_sum(query.float() * mean.unsqueeze(-2), dim=-1) * scale
