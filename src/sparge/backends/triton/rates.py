"""NOUN what a card multiplies per clock, by its architecture and its name.

Typed from the sources named beside the numbers; none was measured. NVIDIA sells one chip under two
kinds of names: GeForce cards add 16-bit and fp8 products in fp32 at half of the rate of the
professional ones, and int8 at the full rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .packages import numbers_of

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
LEGACY_INT8 = 2048
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
        return replace(rates, int8=LEGACY_INT8, source=source)
    if architecture in GEFORCE and any(word in name.lower() for word in CONSUMER_NAMES):
        halved = _nvidia(rates.half // 2, rates.int8, rates.fp8 // 2, GEFORCE[architecture])
        return replace(halved, dense_share=GEFORCE_DENSE_SHARE, our_share=GEFORCE_OUR_SHARE)
    return rates


def uses_legacy_int8(architecture: str, triton: str) -> bool:
    numbers = numbers_of(triton)
    return architecture == "sm_100" and bool(numbers) and numbers < OWN_INT8_SINCE
