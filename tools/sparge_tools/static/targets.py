"""The GPUs that kernels are compiled for: what their compiler is told, and their limits.

Every number is from a vendor's document, named beside it; none was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KB = 1024
MMA, WARP_GROUP_MMA, TENSOR_MEMORY_MMA = "[IHQ]MMA", "[IHQ]GMMA", "UTC[IHQ]MMA"
Version = tuple[int, ...]
NEVER: Version = (99, 0)
WARP_ISSUES = 4
"""Warp instructions that a multiprocessor issues per clock, NVIDIA 8.0 to 12.0."""
MUFU_CLOCKS = 8
"""Clocks of one scheduler per warp instruction of the special function unit: 16 results per clock
and multiprocessor (CUDA C++ Programming Guide, arithmetic throughput)."""


@dataclass(frozen=True)
class Target:
    """name: as the backend names the architecture. shared: bytes of shared memory that one program
    may have. warps, programs, shared_all, registers: of a multiprocessor. macs: multiply-adds per
    clock and multiprocessor by kind of matrix product, at the vendor's dense rates with 32-bit
    sums. matrix: a pattern of the opcodes of its matrix instructions. int8_from: the version of
    Triton from which int8 is multiplied by those; older ones use the instructions of sm_80, and
    NEVER all of them. since: the first version that compiles for it and reads what it compiled."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared: int
    warps: int
    programs: int
    shared_all: int
    registers: int
    macs: dict[str, int]
    source: str
    matrix: str = MMA
    int8_from: Version = (0, 0)
    since: Version = (0, 0)

    def matrix_of(self, kind: str, version: Version) -> str:
        """The pattern of the opcodes that products of a kind are compiled to."""
        return MMA if kind == "int8" and version < self.int8_from else self.matrix

    @property
    def reads_async(self) -> bool:
        """Matrix instructions read shared memory while the kernel goes on, so Triton keeps one
        buffer more."""
        return self.matrix in (WARP_GROUP_MMA, TENSOR_MEMORY_MMA)

    @property
    def is_nvidia(self) -> bool:
        return self.backend == "cuda"

    def gpu_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


_GUIDE = "CUDA C++ Programming Guide, technical specifications; rates: "
_GEFORCE = {"int8": 1024, "half": 256, "fp8": 512}  # professional cards: twice the half and fp8


def _nvidia(
    arch: int, shared: int, warps: int, programs: int, macs: dict[str, int], rates: str, **more: Any
) -> Target:
    """shared: KB of a multiprocessor, of which one program may have all but one."""
    name, source = f"sm_{arch}", _GUIDE + rates
    limits: Any = {"warps": warps, "programs": programs, "registers": 65536}
    limits |= {"shared": (shared - 1) * KB, "shared_all": shared * KB}
    return Target(name, "cuda", arch, 32, macs=macs, source=source, **limits, **more)


def _amd(
    arch: str, warp_size: int, registers: int, macs: dict[str, int], source: str, matrix: str
) -> Target:
    """registers: of a lane, all its waves together."""
    limits: Any = {"warps": 32, "programs": 32, "registers": registers * warp_size}
    limits |= {"shared": 64 * KB, "shared_all": 64 * KB}
    return Target(arch, "hip", arch, warp_size, macs=macs, source=source, matrix=matrix, **limits)


_HOPPER: Any = {"matrix": WARP_GROUP_MMA}
_BLACKWELL: Any = {"matrix": TENSOR_MEMORY_MMA, "int8_from": (3, 8)}
# Triton gives these the instructions of sm_80 for int8; the vendor's int8 rate is low.
_NO_INT8: Any = {"matrix": TENSOR_MEMORY_MMA, "int8_from": NEVER, "since": (3, 7)}
_H100 = {"int8": 4096, "half": 2048, "fp8": 4096}
_B200 = {"int8": 8192, "half": 4096, "fp8": 8192}
_B300 = {"int8": 256, "half": 4096, "fp8": 8192}
_CDNA = {"int8": 2048, "half": 1024, "fp8": 2048}
_RDNA = {"int8": 256, "half": 256}
_NONE = "none published for Jetson Thor"
TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 164, 64, 32, {"int8": 2048, "half": 1024}, "A100 whitepaper"),
        _nvidia(86, 100, 48, 16, {"int8": 1024, "half": 256}, "GA102 whitepaper, GeForce"),
        _nvidia(89, 100, 48, 24, _GEFORCE, "Ada whitepaper, GeForce"),
        _nvidia(90, 228, 64, 32, _H100, "H100 whitepaper", **_HOPPER),
        _nvidia(100, 228, 64, 32, _B200, "B200 data sheet", **_BLACKWELL),
        _nvidia(103, 228, 64, 32, _B300, "B300 data sheet", **_NO_INT8),
        _nvidia(110, 228, 48, 24, {}, _NONE, **_NO_INT8),
        _nvidia(120, 100, 48, 24, _GEFORCE, "RTX Blackwell whitepaper, GeForce"),
        _amd("gfx942", 64, 4 * 512, _CDNA, "CDNA 3 instruction set and white paper", "v_mfma"),
        _amd("gfx1100", 32, 2 * 1536, _RDNA, "RDNA 3 instruction set and white paper", "v_wmma"),
    )
}
NVIDIA = tuple(name for name, target in TARGETS.items() if target.is_nvidia)
