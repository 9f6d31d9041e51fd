"""Sums and exponentials whose bits depend on nothing but the numbers that go in.

BLAS and vector libraries may add in another order, or take another code path, when the shape,
the alignment or the number of threads changes. The reference promises the same bits whatever
batch, thread count or query cut surrounds a row, so it is made of elementwise IEEE additions
and multiplications only, in an order that the length of the sum alone decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# Taylor coefficients of 2**f; for |f| <= 1/2 the rest is below half an ulp at these degrees.
_DEGREE = {torch.float32: 7, torch.float64: 13}
_EXP2_TERMS = [LN2**k / math.factorial(k) for k in range(14)]


def fold_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by adding the upper half onto the lower half until one is left."""
    x = x.movedim(dim, 0)
    n = x.shape[0]
    while n > 1:
        half = (n + 1) // 2
        lower = x[:half].clone()
        lower[: n - half] += x[half:n]
        x, n = lower, half
    return x[0]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` for `a [n, K]` and `b [m, K]`, the products of each sum added one after another.

    Each step is an `[n, m]` operation: for a tile too small for torch to wake its threads, whose
    waits on a busy machine cost twenty times the work.
    """
    columns, rows = a.T.unsqueeze(2), b.T.contiguous()
    total = columns[0] * rows[0]
    product = torch.empty_like(total)
    for column, row in zip(columns[1:], rows[1:], strict=True):
        total += torch.mul(column, row, out=product)
    return total


def exp2(x: Tensor) -> Tensor:
    """2**x for x <= 0, fp32 or fp64; results below the smallest normal number are zero."""
    bits, int_dtype, mantissa = (
        (1023, torch.int64, 52) if x.dtype == torch.float64 else (127, torch.int32, 23)
    )
    lowest = float(1 - bits)
    part = x.clamp(min=lowest)
    # Adding and taking away 1.5 · 2^mantissa rounds to a whole number; torch.round wakes threads.
    rounder = 1.5 * 2.0**mantissa
    whole = part.add(rounder).sub_(rounder)
    part -= whole
    terms = _EXP2_TERMS[: _DEGREE[x.dtype] + 1]
    power = torch.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        power.mul_(part).add_(term)
    exponent = whole.nan_to_num_(0.0).to(int_dtype).add_(bits).bitwise_left_shift_(mantissa)
    return power.mul_(exponent.view(x.dtype)).masked_fill_(x < lowest, 0.0)


def shift_of(row_max: Tensor) -> Tensor:
    """What scores are lowered by before exp2: their maximum, or 0 where there is none (-inf)."""
    return row_max.masked_fill(row_max == -math.inf, 0.0)


def prefix_sum(x: Tensor) -> Tensor:
    """Running sums over the last dimension, in steps that double; `x` is overwritten."""
    step = 1
    while step < x.shape[-1]:
        x[..., step:] += x[..., :-step].clone()
        step *= 2
    return x


def mean_over_rows(x: Tensor, counts: Tensor | int) -> Tensor:
    """Mean over dim -2 of rows padded with zeros, `counts` being the valid ones.

    Scaled by a power of two before adding, so that it is finite whenever its inputs are.
    """
    exponent = max(x.shape[-2] - 1, 0).bit_length()
    total = fold_sum(x * 2.0**-exponent, dim=-2)
    if isinstance(counts, int):
        return total * (2.0**exponent / counts)
    return total * (2.0**exponent / counts.to(x.dtype)).unsqueeze(-1)
