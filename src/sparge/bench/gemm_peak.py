"""The fastest matrix product of torch on this machine: the peak that a row is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..support.turns import take_turns, threads, timed
from .lineup import DTYPES

SIZES = (256, 1024)
SECONDS = 0.3  # spent on each product; the fastest run counts
TOO_SLOW = 2.0  # seconds of one product that is not worth measuring
Rates = dict[str, float]


def gemm_rates(counts: Iterable[int]) -> dict[int, Rates]:
    """GFLOP/s of square products, by number of threads and by dtype."""
    found = {}
    for n in counts:
        with threads(n):
            found[n] = {name: _rate(dtype) / 1e9 for name, dtype in DTYPES.items()}
    return found


def gemm_peaks(*measured: Mapping[int, Rates]) -> dict[int, dict[str, Any]]:
    """The best of several measurements, by number of threads; `peak` is the largest rate."""
    peaks = {}
    for n in measured[0]:
        rates = {name: max(each[n][name] for each in measured) for name in DTYPES}
        best = max(rates, key=rates.__getitem__)
        peaks[n] = {"gflops": rates, "peak": rates[best], "of": best}
    return peaks


def _rate(dtype: torch.dtype) -> float:
    """FLOP/s. The larger product is skipped where the smaller one shows that it takes seconds:
    torch has no fast bf16 product for processors without bf16 instructions."""
    best = 0.0
    for size in SIZES:
        flops = 2 * size**3
        if best and flops / best > TOO_SLOW:
            break
        best = max(best, flops / _seconds(torch.ones(size, size, dtype=dtype)))
    return best


def _seconds(x: torch.Tensor) -> float:
    return min(take_turns([lambda: timed(lambda: x @ x)[0]], seconds=SECONDS)[0])
