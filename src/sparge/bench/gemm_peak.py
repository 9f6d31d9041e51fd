"""The fastest matrix product of torch on this machine: the peak that a row is compared with."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from ..support.turns import take_turns, threads
from .lineup import DTYPES

SIZES = (256, 1024)
SECONDS = 0.3  # spent on each product; the fastest run counts
TOO_SLOW = 2.0  # seconds of one product that is not worth measuring


def gemm_peaks(counts: Iterable[int]) -> dict[int, dict[str, Any]]:
    """By number of threads."""
    found = {}
    for n in counts:
        with threads(n):
            found[n] = gemm_peak()
    return found


def gemm_peak() -> dict[str, Any]:
    """GFLOP/s of square products by dtype under torch's current threads; `peak` is the largest."""
    return _peak_of({name: _rate(dtype) / 1e9 for name, dtype in DTYPES.items()})


def larger(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The better of two measurements of the same products, by dtype."""
    return _peak_of({name: max(one["gflops"][name], other["gflops"][name]) for name in DTYPES})


def _peak_of(rates: dict[str, float]) -> dict[str, Any]:
    best = max(rates, key=lambda name: rates[name])
    return {"gflops": rates, "peak": rates[best], "of": best}


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
    def product() -> float:
        start = time.perf_counter()
        x @ x
        return time.perf_counter() - start

    return min(take_turns([product], seconds=SECONDS)[0])
