"""Padded sizes, types and constants that kernels are launched with."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.device_constants import constant
from ...values.call import Call, half_dtype
from ...values.recipe import PerHeadOrOff, heads_of

LOG2E = math.log2(math.e)
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def block_dim(D: int) -> int:
    """Channels of a tile of Q or K: a power of two, of at least what int8 units take at once."""
    return max(32, int(triton.next_power_of_2(D)))


def value_dim(Dv: int) -> int:
    """Channels of a tile of V."""
    return max(16, int(triton.next_power_of_2(Dv)))


def rotated(D: int) -> int:
    """Channels that one Hadamard transform takes."""
    return 1 << (D.bit_length() - 1)


def held_in(call: Call) -> torch.dtype:
    """The type that P and V, and in unquantized precisions Q and K, are multiplied in."""
    return torch.float32 if call.recipe.precision == "exact" else half_dtype(call.dtype)


def tl_type(dtype: torch.dtype) -> Any:
    return _TYPES[dtype]


def most_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def unit_rows(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def within(offset: int, Lq: int, Lk: int) -> int:
    """An offset of the same meaning that 32 bits can hold."""
    return max(-Lq, min(offset, Lk))


def per_head(
    numbers: PerHeadOrOff, Hq: int, none: float, factor: float, dtype: torch.dtype, device: Any
) -> Tensor:
    """One number for each query head, on the device."""
    return constant(tuple(x * factor for x in heads_of(numbers, Hq, none=none)), dtype, device)
