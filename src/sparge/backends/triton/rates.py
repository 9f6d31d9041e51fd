"""What the Triton backend costs on a card before it was measured there, and how it is measured.

The first call that might profit measures what its kind needs (dtype, precision, head dim): seconds,
mostly compilation. `sparge doctor --calibrate` measures everything: a minute or more. Until then
unit costs are estimated from the properties of the card:

    dense:  2 · D products of a pair / (matrix throughput · dense_share)
    ours:   (products at 8 bits, 16 bits or fp32 + instructions of the loop) / our_share,
            nothing of it overlapped

It favours dense attention mildly, so that an unknown card is measured, not gambled on. A card that
is not in the tables has no estimate. No number here was measured: throughputs are typed from
vendors' documents, named beside the numbers, and instructions of one query-key pair are counted in
the machine code of the attention kernel's loop over full blocks (`sparge bench --static`; a test
compares them). A loop of `n` instructions for a tile of `block_m` queries and 64 keys gives each
pair n · threads / (64 · block_m).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ...values.backend import (
    DENSE_LSE,
    DTYPES,
    HEAD_DIMS,
    WAYS,
    Measuring,
    Place,
    Rates,
    UnitCosts,
    name_of,
)
from ...values.recipe import PRECISIONS
from .architectures import KINDS
from .packages import numbers_of, triton_version

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


def roofline(card: Card, triton: str = "") -> dict[str, UnitCosts] | str:
    """The estimate for a card, or why there is none. triton: the version that compiles for it."""
    rates = rates_of(card.name, card.architecture, triton)
    if rates is None:
        return f"the throughput of {card.name} ({card.architecture or 'unknown'}) is not known here"
    if not (card.processors and card.clock and card.bandwidth):
        return f"torch does not tell the clocks and the memory of {card.name}"
    legacy = uses_legacy_int8(card.architecture, triton)
    costs = {}
    for (dtype, name), D, way in product(DTYPES.items(), HEAD_DIMS, WAYS):
        if way in PRECISIONS:
            instructions = instructions_of(card.architecture, way, D, legacy=legacy)
            found = _our_costs(card, rates, dtype, D, way, instructions)
        else:
            found = _dense_costs(card, rates, dtype, D, way)
        costs[name_of(name, D, way)] = found
    return costs


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


# --- throughputs ------------------------------------------------------------------------------

DENSE_SHARE = 0.7
"""Of the 16-bit peak that dense attention reaches: FlashAttention-2 has 0.6 to 0.7 of an A100's,
FlashAttention-3 0.75 of an H100's in their papers, FlashAttention-4 0.71 of a B200's."""
GEFORCE_DENSE_SHARE = 0.92
"""At half of the rate, products hide more of the softmax: SpargeAttention's paper has dense
attention at 166 TFLOP/s on a 4090, whose peak is 165 at the nominal clock and 180 at 2.75 GHz."""
OUR_SHARE = 0.6
"""Of what products and instructions alone would give us, one after the other."""
GEFORCE_OUR_SHARE = 0.75
"""More, for the same reason. That paper's own kernels have 508 TOP/s there at sparsity 0.46, with
PV added in fp16 at the full rate: 0.83 of that sum."""


@dataclass(frozen=True)
class Throughput:
    """Per clock of one multiprocessor (of AMD: compute unit, or pair of them in gfx11 and gfx12).

    half, int8, fp8, fp32: multiply-adds; half with fp32 accumulation, fp32 without tensor cores,
    fp8 0 where there is none. dense_fp32: of dense attention with fp32 inputs. lanes: of 32 bits
    that get an instruction. dense_share: of the 16-bit peak, what dense attention reaches;
    our_share: of products and instructions one after the other, what ours does.
    """

    half: int
    int8: int
    fp8: int
    fp32: int
    dense_fp32: float
    lanes: int
    source: str
    dense_share: float = DENSE_SHARE
    our_share: float = OUR_SHARE


def _nvidia(half: int, int8: int, fp8: int, source: str, fp32: int = 128) -> Throughput:
    """torch computes fp32 by three TF32 products, each at half of fp16's rate (`DefaultGemmType` in
    its memory-efficient kernel), whether TF32 is allowed or not."""
    return Throughput(half, int8, fp8, fp32, max(half / 6, fp32), 128, source)


def _amd(
    half: int, int8: int, fp8: int, source: str, fp32: int = 128, lanes: int = 64
) -> Throughput:
    """fp32 has matrix instructions at a quarter to an eighth of fp16's rate."""
    return Throughput(half, int8, fp8, fp32, max(half / 4, fp32), lanes, source)


# 8.6, 8.9 and 12.0: of professional cards, and of names that are not known. That favours dense
# attention, which has nothing but 16-bit products.
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
GEFORCE = {
    "sm_86": "NVIDIA GA102 whitepaper, GeForce RTX 3090",
    "sm_89": "NVIDIA Ada whitepaper, GeForce RTX 4090",
    "sm_120": "NVIDIA RTX Blackwell whitepaper, GeForce RTX 5090",
}
"""Architectures that GeForce cards share with professional ones, and the source of their rates."""
CONSUMER_NAMES = ("geforce", "titan")
"""In the names of cards at half of the rate, those of laptops included: `NVIDIA GeForce RTX 4090
Laptop GPU`. Professional ones are called RTX A6000, RTX 6000 Ada Generation, RTX PRO 6000, A10,
A40, L4, L40 or L40S."""
LEGACY_INT8_RATE = 2048
"""Of sm_100 where Triton, before 3.8, multiplies int8 by the instruction of sm_80 (IMMA instead of
UTCIMMA in the machine code): its rate is not published, and taken to be that of sm_80."""
OWN_INT8_SINCE = (3, 8)


def rates_of(name: str, architecture: str, triton: str = "") -> Throughput | None:
    """By what torch calls a card, or None for an architecture that is not in the table. triton:
    the version that compiles the kernels; "" is the newest."""
    rates = THROUGHPUTS.get(architecture)
    if rates is None:
        return None
    if uses_legacy_int8(architecture, triton):
        source = f"{rates.source}; int8 by Triton {triton} as on sm_80"
        return replace(rates, int8=LEGACY_INT8_RATE, source=source)
    if architecture in GEFORCE and any(word in name.lower() for word in CONSUMER_NAMES):
        halved = _nvidia(rates.half // 2, rates.int8, rates.fp8 // 2, GEFORCE[architecture])
        return replace(halved, dense_share=GEFORCE_DENSE_SHARE, our_share=GEFORCE_OUR_SHARE)
    return rates


def uses_legacy_int8(architecture: str, triton: str) -> bool:
    numbers = numbers_of(triton)
    return architecture == "sm_100" and bool(numbers) and numbers < OWN_INT8_SINCE


# --- instructions of a pair --------------------------------------------------------------------

Counts = Mapping[str, tuple[float, float]]
"""By precision, at head dims 64 and 128; about 3 % above the most that was counted with Triton 3.6
to 3.9."""


def _counts(*pairs: tuple[float, float]) -> Counts:
    """In the order of `PRECISIONS`: int8, int8-fast, half and exact."""
    return dict(zip(PRECISIONS, pairs, strict=True))


# Products of one warp (mma.sync). "half" at 128 and "exact" have small tiles, for the registers.
_WARP = _counts((12.9, 17.3), (13.3, 17.5), (12.6, 36.0), (32.0, 104.0))
_SM_90 = _counts((10.8, 12.7), (12.7, 14.4), (11.3, 13.2), (32.0, 107.0))
_SM_100 = _counts((11.5, 13.0), (12.5, 14.8), (11.6, 14.1), (31.0, 97.0))
_CDNA = _counts((17.4, 21.9), (11.8, 15.0), (16.5, 23.6), (23.3, 47.0))
# Few registers: tiles of 16 and 32 queries. fp8 of gfx12 was not compiled; as int8.
_RDNA = _counts((30.0, 110.0), (30.0, 110.0), (35.0, 46.8), (255.0, 480.0))
LEGACY_INT8_COUNTS: Counts = {**_SM_100, "int8": (14.9, 17.2), "int8-fast": (19.9, 27.4)}
"""sm_100 where Triton, before 3.8, multiplies int8 as on sm_80."""
_SM_103: Counts = {**LEGACY_INT8_COUNTS, "int8": (16.9, 21.8), "int8-fast": (24.0, 31.2)}
_FAMILIES = {
    "sm_90": _SM_90,
    "sm_100": _SM_100,
    "sm_103": _SM_103,
    "sm_110": _SM_103,
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), _CDNA),
}


def instructions_of(architecture: str, precision: str, D: int, *, legacy: bool = False) -> float:
    """For a pair, at head dim 64 or 128. legacy: see `LEGACY_INT8_COUNTS`."""
    own = _RDNA if architecture.startswith(("gfx11", "gfx12")) else _WARP
    counts = LEGACY_INT8_COUNTS if legacy else _FAMILIES.get(architecture, own)
    return counts[precision][0 if D <= 64 else 1]


# --- the backend ------------------------------------------------------------------------------


def key_of(place: Place) -> dict[str, str]:
    card = card_of(*place)
    return {
        "device": card.name,
        "architecture": card.architecture,
        "triton": triton_version() or "none",
    }


def _measuring(place: Place) -> Measuring:
    """With 16 heads, 256 and 1024 programs of 128 queries: as many as a card has multiprocessors.
    Inside a call two ways are measured instead of 36."""
    return Measuring(
        str(torch.device(*place)),
        heads=16,
        lengths=(2048, 8192),
        lse_lengths=(2048,),
        seconds=5.0,
        seconds_in_call=0.5,
        fewest_rounds=5,
        warms_up=True,
    )


RATES = Rates(
    KINDS,
    place=lambda kind, index: (kind, index),
    key=key_of,
    estimate=lambda place: roofline(card_of(*place), triton_version() or ""),
    estimated_by="roofline estimate, nothing was measured on this card",
    measuring=_measuring,
    # With what `expected_density` adds for short rows, that is a little more than was measured:
    # 0.70 at 2048 causal tokens (measured: 0.62), 0.55 at 4096 (0.50), 0.48 at 8192 (0.31 to 0.35),
    # 0.42 at 32,768 (0.36); images of 4096 tokens 0.48 (0.28 to 0.35). A cautious number would
    # never be corrected: a layer that runs sparse is learnt from, one that runs dense is not.
    unseen_density=0.4,
    elsewhere="Triton's interpreter runs it on the cpu: for tests only",
    by_kind=True,
)
