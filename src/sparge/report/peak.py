"""The machine's own peak: the fastest matrix product that torch does here, now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from .entries import DTYPES
from .race import threads

SIZES = (256, 1024)
SECONDS = 0.3
"""Spent on each product; the best of its runs is taken, as a peak is."""
TOO_SLOW = 2.0


def gemm_peaks(counts: Iterable[int]) -> dict[int, dict[str, Any]]:
    """By number of threads."""
    found = {}
    for n in counts:
        with threads(n):
            found[n] = gemm_peak()
    return found


def gemm_peak() -> dict[str, Any]:
    """GFLOP/s of square products with the present threads, and the largest of them as `peak`."""
    return _peak_of({name: _rate(dtype) / 1e9 for name, dtype in DTYPES.items()})


def larger(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of the same products measured twice: what disturbed one need not have disturbed both."""
    return _peak_of({name: max(one["gflops"][name], other["gflops"][name]) for name in DTYPES})


def _peak_of(rates: dict[str, float]) -> dict[str, Any]:
    best = max(rates, key=lambda name: rates[name])
    return {"gflops": rates, "peak": rates[best], "of": best}


def _rate(dtype: torch.dtype) -> float:
    """The larger product is left out where the smaller shows that it would take seconds: torch
    has no fast bf16 product for processors without instructions for it."""
    best = 0.0
    for size in SIZES:
        flops = 2 * size**3
        if best and flops / best > TOO_SLOW:
            break
        best = max(best, flops / _seconds(torch.ones(size, size, dtype=dtype)))
    return best


def _seconds(x: torch.Tensor) -> float:
    best = float("inf")
    stop = time.perf_counter() + SECONDS
    while time.perf_counter() < stop:
        start = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - start)
    return best
