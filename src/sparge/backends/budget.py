"""The error as the knob: the steps that `KeepError` tries, the rows it checks, the step it takes.

    step s    keeps what KeepMass(1 - max_error · FACTORS[s]) keeps; behind the last, everything
    error     of a step and head: relative L1 over the checked rows, kept blocks against all
    taken     the sparsest step whose error is at most max_error, and at most max_error / factor
              where the step keeps less than mass 1 - max_error

A checked row is none of those that predict: blocks are chosen by what the sampled rows attend, so
these see about 0.75 of the error that other rows do. Why a sparser step must stay further below:
the error of a mass is known to be about 1 - mass, and few rows may all be lucky ones (LAB.md).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..geometry import BLOCK_Q, n_blocks, sampled_rows
from ..recipe import KeepError, heads_of

FACTORS = tuple(2.0 ** (2 - step / 4) for step in range(17))
"""4 … 1/4: sparsest first, each mass a little more than the one before."""
LEAST_MASS = 1e-9
"""Of steps whose factor is more than the budget has room for: one block."""
FEW_BLOCKS, ENOUGH_BLOCKS = 16, 64
"""Twice FEW_BLOCKS query blocks and more have a checked row in every second one, thrice
ENOUGH_BLOCKS in every third, and so on: 16 rows of 4096, 32 of 8192, 64 of 16384 and more."""


@lru_cache(maxsize=64)
def masses_of(keep: KeepError, Hq: int) -> tuple[tuple[float, ...], ...]:
    """The mass of every step, `[Hq][steps]`, rising."""
    errors = heads_of(keep.max_error, Hq, none=1.0)
    return tuple(tuple(max(1.0 - e * factor, LEAST_MASS) for factor in FACTORS) for e in errors)


@lru_cache(maxsize=64)
def checked_rows(Lq: int, sample_rows: int) -> tuple[int, ...]:
    """One row of each query block, or of every few: spread over the places in a block, and none of
    the sampled ones where there are others."""
    n_q = n_blocks(Lq, BLOCK_Q)
    apart = max(1, min(2, n_q // FEW_BLOCKS), n_q // ENOUGH_BLOCKS)
    rows = []
    for i_q in range(apart - 1, n_q, apart):
        valid = min(BLOCK_Q, Lq - i_q * BLOCK_Q)
        # 79 is about the golden section of 128, and odd: every place comes once in 128 blocks.
        place = (i_q + 1) * 79 % BLOCK_Q * valid // BLOCK_Q
        sampled = set(sampled_rows(valid, sample_rows))
        others = (p % valid for p in range(place, place + valid) if p % valid not in sampled)
        rows.append(i_q * BLOCK_Q + next(others, place))
    return tuple(rows)


def take_step(wrong: Tensor, whole: Tensor, keep: KeepError) -> tuple[Tensor, Tensor]:
    """`(step, error)` of every head `[B, Hq]`, from sums of |kept - all| `[B, Hq, steps]` and of
    |all| `[B, Hq]`, fp64; step `len(FACTORS)` is everything, with error 0."""
    # In plain numbers: a dozen tensor operations on so few take longer than the check itself.
    budget = heads_of(keep.max_error, wrong.shape[1], none=1.0)
    steps, errors = [], []
    for of_batch, sizes in zip(wrong.tolist(), whole.tolist(), strict=True):
        for head, (sums, size) in enumerate(zip(of_batch, sizes, strict=True)):
            step, error = _sparsest(sums, size, budget[head])
            steps.append(step)
            errors.append(error)
    device, shape = wrong.device, whole.shape
    return (
        torch.tensor(steps, device=device).view(shape),
        torch.tensor(errors, dtype=torch.float64, device=device).view(shape),
    )


def _sparsest(wrong: list[float], whole: float, budget: float) -> tuple[int, float]:
    """Of one head. Nothing measured, or nothing finite, meets no bound."""
    for step, factor in enumerate(FACTORS):
        error = wrong[step] / whole if whole else math.nan
        if error <= budget * min(1.0, 1.0 / factor):
            return step, error
    return len(FACTORS), 0.0
