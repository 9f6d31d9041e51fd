"""8-bit codes with their scales, and what pooled entries are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..support.ordered_sums import mean_over_rows
from .call import half_dtype, work_dtype
from .geometry import block_sizes, in_blocks, n_blocks

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class QTensor:
    """`x ≈ codes · scale`: symmetric 8-bit codes and the granularity of their scales.

    codes: int8, or fp8 for values on GPUs that multiply it, `[B, H, L, D]`.
    scale: fp32; `[B, H, ceil(L / rows_per_scale)]`, or with `per_channel` one more `D` at the end.
    rows_per_scale: consecutive rows that share a scale; 1 is one scale per token.
    A scale that is not finite marks rows whose numbers were not finite.
    """

    codes: Tensor
    scale: Tensor
    rows_per_scale: int = 1
    per_channel: bool = False

    def __post_init__(self) -> None:
        for name, x, dtypes, words in (
            ("codes", self.codes, CODES, "int8 or fp8"),
            ("scale", self.scale, (torch.float32,), "float32"),
        ):
            if not isinstance(x, Tensor) or x.dtype not in dtypes:
                came = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name} must be {words}, got {came}")
        if isinstance(self.rows_per_scale, bool) or not isinstance(self.rows_per_scale, int):
            raise TypeError(f"rows_per_scale must be a whole number, got {self.rows_per_scale!r}")
        if self.rows_per_scale < 1:
            raise ValueError(f"rows_per_scale must be at least 1, got {self.rows_per_scale}")
        if self.codes.dim() != 4:
            raise ValueError(f"codes must be [B, H, L, D], got shape {list(self.codes.shape)}")
        if self.scale.device != self.codes.device:
            raise ValueError(f"codes are on {self.codes.device}, scale on {self.scale.device}")
        B, H, L, D = self.codes.shape
        groups = (B, H, n_blocks(L, self.rows_per_scale))
        needed = (*groups, D) if self.per_channel else groups
        if tuple(self.scale.shape) != needed:
            raise ValueError(
                f"scale must have shape {needed} for codes {tuple(self.codes.shape)} and "
                f"rows_per_scale {self.rows_per_scale}, got {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def granularity(self) -> str:
        rows = "token" if self.rows_per_scale == 1 else f"{self.rows_per_scale} tokens"
        return f"one scale per {rows}" + (" and channel" if self.per_channel else "")

    def row_scale(self) -> Tensor:
        """The scale of every row, `[B, H, L]` or `[B, H, L, D]`."""
        if self.rows_per_scale == 1:
            return self.scale
        return self.scale.repeat_interleave(self.rows_per_scale, dim=2)[:, :, : self.shape[2]]

    def dequantize(self) -> Tensor:
        scale = self.row_scale()
        return self.codes.float() * (scale if self.per_channel else scale.unsqueeze(-1))


@dataclass(frozen=True)
class Pooled:
    """Means of `group` consecutive keys and values each, for the blocks that are skipped.

    key `[B, Hk, n, D]`, value `[B, Hk, n, Dv]`, `n = ceil(Lk / group)`; in the run's precision.
    Entry `e` stands for keys `e · group …` of key block `e · group // 64`; the last entry for fewer
    keys where `Lk` is no multiple. Means that are not finite are zero here: their block is known
    not to be finite by its own keys and values.
    """

    key: Tensor | QTensor
    value: Tensor | QTensor
    group: int

    def heads(self, keys: slice) -> Pooled:
        """Some key heads."""
        return Pooled(cut_heads(self.key, keys), cut_heads(self.value, keys), self.group)


def group_means(x: Tensor, group: int) -> Tensor:
    """Mean of each `group` rows, fp32 (fp64 for fp64 inputs); 0 where it is not finite."""
    x = x.to(work_dtype(x.dtype))
    means = mean_over_rows(in_blocks(x, -2, group), block_sizes(x.shape[2], group, x.device))
    return means.nan_to_num(0.0, 0.0, 0.0)


def cut_heads(x: Tensor | QTensor, heads: slice) -> Tensor | QTensor:
    """Some heads of a tensor, without a copy of its numbers."""
    if not isinstance(x, QTensor):
        return x[:, heads]
    return replace(x, codes=x.codes[:, heads], scale=x.scale[:, heads].contiguous())


def finite_rows(x: Tensor | QTensor) -> Tensor:
    """Which rows hold only finite numbers, bool `[B, H, L]`."""
    if isinstance(x, QTensor):
        finite = torch.isfinite(x.row_scale())
        return finite.all(-1) if x.per_channel else finite
    return torch.isfinite(x).all(-1)


def working(x: Tensor, precision: str) -> Tensor:
    """The numbers a precision computes with, held in fp32 (fp64 for fp64 in `"exact"`)."""
    if precision == "exact":
        return x if x.dtype == torch.float64 else x.float()
    half, x = half_dtype(x.dtype), x.float()
    # Finite fp32 values beyond the range of 16 bits become its largest number, not infinity.
    most = torch.finfo(half).max
    return torch.where(x.isinf(), x, x.clamp(-most, most)).to(half).float()
