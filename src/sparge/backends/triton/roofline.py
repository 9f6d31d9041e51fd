"""What attention costs on a card that nothing was measured on: a `Crossover` from its properties.

    dense:  2 · D products of a pair / (matrix throughput · dense_share)
    ours:   (products at 8 bits, 16 bits or fp32 + instructions of the loop) / our_share,
            nothing of it overlapped

It favours dense attention mildly: an unknown card is not gambled on, and is measured by the first
call that might profit (cost.py). No number here was measured: throughputs are typed from vendors'
documents (rates.py), instructions are counted in compiled kernels (instructions.py). A card that is
not in the table has no estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...routing.crossover import (
    DENSE_LSE,
    DENSE_WAY,
    DTYPES,
    HEAD_DIMS,
    Crossover,
    UnitCosts,
    name_of,
)
from ...values.recipe import PRECISIONS
from .instructions import instructions_of
from .rates import DENSE_SHARE, Throughput, rates_of, uses_legacy_int8

WORDS = "roofline estimate, nothing was measured on this card"
OUR_CALL, DENSE_CALL = 3e-4, 1e-5
"""Seconds: about eight launches through Python, and one from C++."""
BANDWIDTH_SHARE = 0.4
"""Of memory's peak, in the passes of `prepare`."""
LSE_BYTES = 40
"""Per pair that dense attention moves for an LSE: ten passes over fp32 scores (../dense.py)."""


@dataclass(frozen=True)
class Card:
    """An accelerator as torch describes it. clock in Hz, bandwidth in bytes per second; 0 where
    torch does not tell."""

    name: str
    architecture: str
    processors: int = 0
    clock: float = 0.0
    bandwidth: float = 0.0


def card_of(kind: str, index: int = 0) -> Card:
    """The accelerator of a type and index."""
    module: Any = torch.get_device_module(kind)
    facts = module.get_device_properties(index)

    def number(name: str) -> int:
        return int(getattr(facts, name, 0) or 0)

    return Card(
        str(getattr(facts, "name", kind)),
        _architecture(facts),
        number("multi_processor_count"),
        number("clock_rate") * 1e3,
        number("memory_clock_rate") * 1e3 * 2 * number("memory_bus_width") / 8,
    )


def _architecture(facts: Any) -> str:
    """`sm_90`, `gfx942`, or a number of Intel's; "" where torch does not tell."""
    if amd := getattr(facts, "gcnArchName", None):
        return str(amd).partition(":")[0]  # without features, such as :sramecc+:xnack-
    if hasattr(facts, "major"):
        return f"sm_{facts.major}{facts.minor}"
    return str(getattr(facts, "architecture", ""))


def roofline(card: Card, triton: str = "") -> Crossover | str:
    """The estimate for a card, or why there is none. triton: the version that compiles for it."""
    rates = rates_of(card.name, card.architecture, triton)
    if rates is None:
        return f"the throughput of {card.name} ({card.architecture or 'unknown'}) is not known here"
    if not (card.processors and card.clock and card.bandwidth):
        return f"torch does not tell the clocks and the memory of {card.name}"
    legacy = uses_legacy_int8(card.architecture, triton)
    costs = {}
    for dtype, name in DTYPES.items():
        for D in HEAD_DIMS:
            for way in (DENSE_WAY, DENSE_LSE):
                costs[name_of(name, D, way)] = _dense_costs(card, rates, dtype, D, way)
            for way in PRECISIONS:
                instructions = instructions_of(card.architecture, way, D, legacy=legacy)
                costs[name_of(name, D, way)] = _our_costs(card, rates, dtype, D, way, instructions)
    return Crossover(costs, estimated_by=WORDS)


def _dense_costs(card: Card, rates: Throughput, dtype: torch.dtype, D: int, way: str) -> UnitCosts:
    rate: float = rates.half
    share = rates.dense_share
    if way == DENSE_LSE:
        rate, share = rates.half / 2, DENSE_SHARE  # TF32, if it is allowed
    elif dtype == torch.float32:
        rate, share = rates.dense_fp32, DENSE_SHARE
    element = 2 * D / (rate * card.processors * card.clock * share)
    moved = LSE_BYTES / card.bandwidth if way == DENSE_LSE else 0.0
    return UnitCosts(DENSE_CALL, 0.0, element + moved)


def _our_costs(
    card: Card, rates: Throughput, dtype: torch.dtype, D: int, way: str, instructions: float
) -> UnitCosts:
    clocks = sum(D / rate for rate in _rates_of(rates, way)) + instructions / rates.lanes
    # `prepare` reads a row twice, for statistics and for codes, and writes codes and transposes.
    row_bytes = D * (2 * dtype.itemsize + 2)
    token = row_bytes / (card.bandwidth * BANDWIDTH_SHARE)
    element = clocks / (card.processors * card.clock * rates.our_share)
    return UnitCosts(OUR_CALL, token, element)


def _rates_of(rates: Throughput, precision: str) -> tuple[int, int]:
    """Of the products with K and with V."""
    if precision == "exact":
        return rates.fp32, rates.fp32
    if precision == "half":
        return rates.half, rates.half
    return rates.int8, rates.fp8 or rates.half if precision == "int8-fast" else rates.half
