"""The mean key from sums over key blocks, as csrc/ops_prepare.cpp makes it of all keys at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...values.geometry import BLOCK_K, BLOCK_Q
from . import library


def sum_keys(key: Tensor) -> Tensor:
    """fp32 `[B, Hk, n, D]`, of rows scaled by 1 / 128, so that a sum of finite rows is finite."""
    B, Hk, L, D = key.shape
    # A short block is filled up with zeros, which add nothing: sums of 64 rows are pooled tokens
    # times a power of two.
    whole = F.pad(key, (0, 0, 0, -L % BLOCK_K))
    pooled = torch.empty((B, Hk, whole.shape[2] // BLOCK_K, D), dtype=torch.float32)
    nothing = (None, None, None, pooled, None, None, 1.0, None)
    library.ops().statistics(whole, BLOCK_K, *nothing, library.isa_number())
    return pooled * (BLOCK_K / BLOCK_Q)


def mean_of_sums(sums: Tensor, n_keys: int) -> Tensor:
    """Added in order, in fp64."""
    total = sums.double().cumsum(2)[:, :, -1]
    return (total * BLOCK_Q / n_keys).float()
