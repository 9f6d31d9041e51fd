"""The fastest matrix product of torch on this machine: the peak that a row is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sparge.support.turns import HOST, take_turns, timer

from ..measuring import threads
from .contender import DTYPES

SIZES, ACCELERATOR_SIZES = (256, 1024), (1024, 8192)
SECONDS = 0.3  # spent on each product; the fastest run counts
TOO_SLOW = 2.0  # seconds of one product that is not worth measuring
Rates = dict[str, float]


def gemm_rates(counts: Iterable[int], device: str = "cpu") -> dict[int, Rates]:
    """GFLOP/s of square products, by number of threads and by dtype."""
    found = {}
    for n in counts:
        with threads(n):
            found[n] = {name: _rate(dtype, device) / 1e9 for name, dtype in DTYPES.items()}
    return found


def gemm_peaks(*measured: Mapping[int, Rates]) -> dict[int, dict[str, Any]]:
    """The best of several measurements, by number of threads; `peak` is the largest rate."""
    peaks = {}
    for n in measured[0]:
        rates = {name: max(each[n][name] for each in measured) for name in DTYPES}
        best = max(rates, key=rates.__getitem__)
        peaks[n] = {"gflops": rates, "peak": rates[best], "of": best}
    return peaks


def _rate(dtype: torch.dtype, device: str) -> float:
    """FLOP/s. The larger product is skipped where the smaller one shows that it takes seconds:
    torch has no fast bf16 product for processors without bf16 instructions."""
    best = 0.0
    for size in SIZES if device in HOST else ACCELERATOR_SIZES:
        flops = 2 * size**3
        if best and flops / best > TOO_SLOW:
            break
        best = max(best, flops / _seconds(torch.ones(size, size, dtype=dtype, device=device)))
    return best


def _seconds(x: torch.Tensor) -> float:
    timed = timer(x.device.type)
    return min(take_turns([lambda: timed(lambda: x @ x)[0]], seconds=SECONDS)[0])
