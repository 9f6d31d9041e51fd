"""Symmetric int8 codes (`scale = max|x| / 127`, round to nearest even) and block statistics.

The mean key of each head is subtracted first; softmax is invariant to it (every score of a row
changes by the same `q · mean`) and int8 loses far less. That constant is returned as `lse_shift`.
Rows of q and k are rotated before they are coded (rotation.py), which does not change the scores.
A group that is all zero has scale 0; one that is not finite has scale NaN and codes 0, so that no
plausible number can result from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...support.ordered_sums import fold_sum, mean_over_rows
from ...values.call import BLOCK_K, BLOCK_Q, Call, block_sizes, in_blocks, work_dtype
from ...values.recipe import QUANTIZED
from ...values.stages import Pooled, PreparedKeys, PreparedQueries, QTensor, group_means
from .rotation import rotate


def prepare_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    *,
    mean: Tensor | None = None,
    to_plan: bool,
    to_attend: bool,
) -> PreparedKeys:
    recipe, pools_blocks = call.recipe, to_plan and call.pools_blocks
    if mean is None and (recipe.quantized or pools_blocks):
        mean = mean_key(key)
    coded: Tensor | QTensor = key
    if recipe.quantized and (to_attend or call.samples_rows):
        coded = quantize_rows(smooth_keys(key, mean))
    # Planning alone scores rows with the codes of q and k; V is read as it came.
    v: Tensor | QTensor = key if value is None else value
    entries = None
    if value is not None and (to_attend or call.measures_error):
        if recipe.precision == "int8-fast":
            v = quantize_channels(value)
        if recipe.pools:
            entries = pool(key, value, recipe.pool_group, recipe.precision, mean)
    pooled = similarity = None
    if pools_blocks:
        pooled, similarity = block_statistics(smooth_keys(key, mean), BLOCK_K)
    return PreparedKeys(coded, v, key, value, mean, pooled, similarity, entries)


def prepare_queries(
    call: Call, query: Tensor, *, mean: Tensor | None, to_plan: bool, to_attend: bool
) -> PreparedQueries:
    rows: Tensor | QTensor = query
    lse_shift = pooled = similarity = None
    if call.recipe.quantized and (to_attend or call.samples_rows):
        rows = quantize_rows(query.float())
        lse_shift = None if mean is None else _lse_shift(query, mean, call.scale)
    if to_plan and call.pools_blocks:
        pooled, similarity = block_statistics(query, BLOCK_Q)
    return PreparedQueries(rows, query, lse_shift, pooled, similarity)


def pool(
    key: Tensor, value: Tensor, group: int, precision: str, mean: Tensor | None = None
) -> Pooled:
    """Means over groups of keys and values, as the precision holds keys and values."""
    # What is not coded has the caller's dtype, as keys and values have: 16 bits stay 16 bits.
    dtype = work_dtype(key.dtype) if precision == "exact" else key.dtype
    v = group_means(value, group)
    values = quantize_channels(v) if precision == "int8-fast" else v.to(dtype)
    if precision in QUANTIZED:
        return Pooled(quantize_rows(group_means(smooth_keys(key, mean), group)), values, group)
    return Pooled(group_means(key, group).to(dtype), values, group)


def block_statistics(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pooled token `[B, H, n, D]` and self-similarity `[B, H, n]` of each block of `x`.

    The self-similarity is the mean of all pairwise cosines of the block's rows.
    """
    x = x.float()
    sizes = block_sizes(x.shape[2], block, x.device)
    largest = x.abs().amax(-1, keepdim=True)
    # Divided by its largest entry first, so that squares neither overflow nor vanish.
    unit = torch.where(largest == 0, 0.0, x / largest)
    norm = fold_sum(unit * unit, dim=-1).sqrt().unsqueeze(-1)
    unit = torch.where(largest == 0, 0.0, unit / norm)
    mean = mean_over_rows(in_blocks(x, -2, block), sizes)
    mean_unit = mean_over_rows(in_blocks(unit, -2, block), sizes)
    return mean, fold_sum(mean_unit * mean_unit, dim=-1)


def mean_key(key: Tensor) -> Tensor:
    """The mean `[B, Hk, D]` over the sequence of each head, fp32."""
    return mean_over_rows(key.float(), key.shape[-2])


def smooth_keys(key: Tensor, mean: Tensor | None = None) -> Tensor:
    """`k - mean`, fp32; by default with the mean of these keys."""
    return key.float() - (mean_key(key) if mean is None else mean).unsqueeze(-2)


def quantize_rows(x: Tensor, rows_per_scale: int = 1) -> QTensor:
    """Codes of the rotated rows of `x [B, H, L, D]`, a scale for `rows_per_scale` of them."""
    # Rotation can make a number 16 times as large: groups near the end of fp32 are lowered for it.
    largest = in_blocks(x, -2, rows_per_scale).abs().amax((-1, -2))
    lowered = torch.where(largest > 2.0**100, 2.0**-8, 1.0)
    of_row = lowered.repeat_interleave(rows_per_scale, dim=2)[:, :, : x.shape[2]]
    coded = code_rows(rotate(x * of_row.unsqueeze(-1)), rows_per_scale)
    return QTensor(coded.codes, coded.scale / lowered, rows_per_scale)


def code_rows(x: Tensor, rows_per_scale: int = 1) -> QTensor:
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
