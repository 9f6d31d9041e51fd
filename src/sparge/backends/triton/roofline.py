"""What attention costs on a card that nothing was measured on: a `Crossover` from its properties.

    dense:  2 · D products of a pair / (matrix throughput · DENSE_SHARE)
    ours:   (products at 8 bits, 16 bits or fp32 + INSTRUCTIONS of the softmax) / OUR_SHARE,
            nothing of it overlapped

Every assumption is on dense attention's side: an unknown card is not gambled on. No number here was
measured; throughputs are typed from the sources named beside them. A card that is not in the table
gets no estimate, and `auto` runs dense attention on it until `sparge doctor --calibrate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...recipe import PRECISIONS
from ..crossover import DENSE_LSE, DENSE_WAY, DTYPES, HEAD_DIMS, WAYS, Crossover, UnitCosts, name_of

WORDS = "roofline estimate, nothing was measured on this card"
DENSE_SHARE = 0.7
"""Of the peak that FlashAttention reaches: 0.6 to 0.75 in its papers, for long sequences."""
OUR_SHARE = 0.6
INSTRUCTIONS = 20
"""Issued per query-key pair beside the products. The compiled loops have 13 to 19."""
OUR_CALL, DENSE_CALL = 3e-4, 1e-5
"""Seconds: about eight launches through Python, and one from C++."""
BANDWIDTH_SHARE = 0.4
"""Of memory's peak, in the passes of `prepare`."""
LSE_BYTES = 40
"""Per pair that dense attention moves for an LSE: ten passes over fp32 scores (../dense.py)."""


@dataclass(frozen=True)
class Throughput:
    """Per clock of one multiprocessor (of AMD: compute unit, or pair of them in gfx11 and gfx12).

    half, int8, fp8, fp32: multiply-adds; half with fp32 accumulation, fp32 without tensor cores,
    fp8 0 where there is none. dense_fp32: of dense attention with fp32 inputs. lanes: of 32 bits
    that get an instruction.
    """

    half: int
    int8: int
    fp8: int
    fp32: int
    dense_fp32: float
    lanes: int
    source: str


def _nvidia(half: int, int8: int, fp8: int, source: str, fp32: int = 128) -> Throughput:
    """torch computes fp32 by three TF32 products, each at half of fp16's rate (`DefaultGemmType` in
    its memory-efficient kernel), whether TF32 is allowed or not."""
    return Throughput(half, int8, fp8, fp32, max(half / 6, fp32), 128, source)


def _amd(
    half: int, int8: int, fp8: int, source: str, fp32: int = 128, lanes: int = 64
) -> Throughput:
    """fp32 has matrix instructions at a quarter to an eighth of fp16's rate."""
    return Throughput(half, int8, fp8, fp32, max(half / 4, fp32), lanes, source)


# GeForce cards accumulate in fp32 at half of the rate given for 8.6, 8.9 and 12.0, for dense
# attention and for ours; to count on that would favour ours.
THROUGHPUTS = {
    "sm_80": _nvidia(1024, 2048, 0, "NVIDIA A100 whitepaper", fp32=64),
    "sm_86": _nvidia(512, 1024, 0, "NVIDIA GA102 whitepaper, A40 data sheet"),
    "sm_87": _nvidia(1024, 2048, 0, "NVIDIA Jetson AGX Orin technical brief"),
    "sm_89": _nvidia(512, 1024, 1024, "NVIDIA Ada whitepaper, L40S data sheet"),
    "sm_90": _nvidia(2048, 4096, 4096, "NVIDIA H100 whitepaper"),
    "sm_100": _nvidia(4096, 8192, 8192, "NVIDIA Blackwell architecture brief, B200"),
    "sm_103": _nvidia(4096, 256, 8192, "NVIDIA B300 data sheet; little int8"),
    "sm_120": _nvidia(512, 1024, 1024, "NVIDIA RTX Blackwell whitepaper, RTX PRO 6000"),
    "sm_121": _nvidia(512, 1024, 1024, "as sm_120"),
    "gfx90a": _amd(512, 512, 0, "AMD CDNA 2 whitepaper, MI250X", fp32=64),
    "gfx942": _amd(1024, 2048, 2048, "AMD CDNA 3 whitepaper, MI300X"),
    "gfx950": _amd(2048, 4096, 4096, "AMD CDNA 4 whitepaper, MI355X"),
    "gfx1100": _amd(512, 512, 0, "AMD RDNA 3 guide, RX 7900 XTX", lanes=128),
    "gfx1101": _amd(512, 512, 0, "as gfx1100", lanes=128),
    "gfx1200": _amd(1024, 2048, 2048, "as gfx1201", lanes=128),
    "gfx1201": _amd(1024, 2048, 2048, "AMD RDNA 4 launch material, RX 9070 XT", lanes=128),
}


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


def roofline(card: Card) -> Crossover | str:
    """The estimate for a card, or why there is none."""
    rates = THROUGHPUTS.get(card.architecture)
    if rates is None:
        return f"the throughput of {card.name} ({card.architecture or 'unknown'}) is not known here"
    if not (card.processors and card.clock and card.bandwidth):
        return f"torch does not tell the clocks and the memory of {card.name}"
    costs = {
        name_of(name, D, way): _unit_costs(card, rates, dtype, D, way)
        for dtype, name in DTYPES.items()
        for D in HEAD_DIMS
        for way in WAYS
    }
    return Crossover(costs, estimated_by=WORDS)


def _unit_costs(card: Card, rates: Throughput, dtype: torch.dtype, D: int, way: str) -> UnitCosts:
    per_second = card.processors * card.clock
    if way in (DENSE_WAY, DENSE_LSE):
        rate = rates.dense_fp32 if dtype == torch.float32 else rates.half
        if way == DENSE_LSE:
            rate = rates.half / 2  # TF32, if it is allowed
        element = 2 * D / (rate * per_second * DENSE_SHARE)
        moved = LSE_BYTES / card.bandwidth if way == DENSE_LSE else 0.0
        return UnitCosts(DENSE_CALL, 0.0, element + moved)
    clocks = sum(D / rate for rate in _rates_of(rates, way)) + INSTRUCTIONS / rates.lanes
    # `prepare` reads a row twice, for statistics and for codes, and writes codes and transposes.
    row_bytes = D * (2 * dtype.itemsize + 2)
    token = row_bytes / (card.bandwidth * BANDWIDTH_SHARE)
    return UnitCosts(OUR_CALL, token, clocks / (per_second * OUR_SHARE))


def _rates_of(rates: Throughput, precision: str) -> tuple[int, int]:
    """Of the products with K and with V."""
    assert precision in PRECISIONS
    if precision == "exact":
        return rates.fp32, rates.fp32
    if precision == "half":
        return rates.half, rates.half
    return rates.int8, rates.fp8 or rates.half if precision == "int8-fast" else rates.half
