"""The architectures that kernels are launched on, how, and the grids that they take.

`compiled`: found by compiling for the target and reading the result (`sparge bench --static`):
the largest tile without spilled registers, within shared memory, with loads as deep as intended.
Nothing here was timed on a GPU.

Grids are `(blocks, heads, batch)`; that of `classify_blocks`, which reads a mask of the caller's,
is `(key blocks, query blocks, batch and heads of the mask)`. A query block is up to eight programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ...values.backend import host
from ...values.call import BLOCK_Q, Call

INTERPRETER = "interpreter"
KINDS = ("cuda", "xpu")
"""Types of devices; torch calls AMD's `cuda` too."""


@dataclass(frozen=True)
class Tiles:
    """How the attention kernel is launched.

    block_m: query rows of a program; a query block of 128 rows is one, two or four programs.
    entries: pooled entries of a tile. registers: of a thread, where the compiler's choice spills.
    """

    block_m: int
    num_warps: int
    num_stages: int
    entries: int = 16
    registers: int | None = None

    @property
    def programs(self) -> int:
        """Of a query block."""
        return BLOCK_Q // self.block_m

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told."""
        given = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return given if self.registers is None else {**given, "maxnreg": self.registers}

    def smaller(self) -> Tiles | None:
        """What to try where these do not fit a card: first without loads that run ahead, then with
        half the rows."""
        if self.num_stages > 1:
            return replace(self, num_stages=1, registers=None)
        return replace(self, block_m=self.block_m // 2) if self.block_m > 16 else None


@dataclass(frozen=True)
class Architecture:
    """name: as torch names it. rows: how the attention kernel is launched, by `tiles_for`. fp8: the
    type of 8-bit P and V, or None. shared: bytes of shared memory that a program may have. source:
    where the numbers come from."""

    name: str
    rows: Mapping[tuple[str, int], Tiles]
    fp8: torch.dtype | None
    shared: int
    source: str

    @property
    def tiles(self) -> Tiles:
        """Of the default recipe at head dim 128."""
        return self.tiles_for("int8", 128)

    def tiles_for(
        self,
        precision: str,
        D: int,
        *,
        filters: bool = False,
        masked: bool = False,
        uneven: bool = False,
    ) -> Tiles:
        """filters: the second filter is on. masked: a mask is given. Both take registers. uneven: a
        head dim is no multiple of 16."""
        way = "int8" if precision == "int8-fast" else precision
        way = "int8+more" if way == "int8" and (filters or masked) else way
        size = 64 if D <= 64 else 128 if D <= 128 else 256
        older = self.rows.get((f"{way}+older", size)) if filters or uneven else None
        return older or self.rows[way, size]

    def row_options(self, precision: str, *, masked: bool) -> dict[str, int]:
        """Of a program that scores sampled rows. Warps as many as registers need. One stage where
        there are few: three TF32 products of a deeper loop spill, and on sm_100 resemble a
        miscompilation that later versions of Triton mend (its issue 10821)."""
        if self.name.startswith(("gfx11", "gfx12")):
            return {"num_warps": 8 if precision.startswith("int8") else 16, "num_stages": 1}
        few = self.name.startswith("gfx") or (precision.startswith("int8") and not masked)
        return {"num_warps": 4 if few else 8, "num_stages": 1 if precision == "exact" else 2}

    def most_sampled(self, precision: str, D: int) -> int:
        """Rows of a query block that one program can score: more take shared memory that cards do
        not have, and three TF32 products of 64 would be chained on sm_100 (see `row_options`)."""
        if self.name == INTERPRETER or precision.startswith("int8"):
            return 128
        if precision == "exact":
            return 32 if D <= 128 else 16
        return 128 if D <= 128 else 64

    @property
    def fp32(self) -> str:
        """How fp32 is multiplied. Three TF32 products lose about as much as one rounding of fp32,
        and leave registers free that fp32 arithmetic takes; AMD's matrix units multiply fp32."""
        return "tf32x3" if self.name.startswith("sm_") else "ieee"


_Each = tuple[Tiles, Tiles, Tiles]
"""Tiles for head dims up to 64, 128 and 256."""


def _rows(
    int8: _Each, half: _Each, exact: _Each, more: _Each | None = None
) -> dict[tuple[str, int], Tiles]:
    """By way of computing. more: of int8 with a mask or the second filter, if others."""
    ways = {"int8": int8, "int8+more": more or int8, "half": half, "exact": exact}
    sizes = (64, 128, 256)
    return {(way, D): ways[way][i] for way in ways for i, D in enumerate(sizes)}


_WHOLE = Tiles(block_m=128, num_warps=8, num_stages=3)
_HALF_ROWS = Tiles(block_m=64, num_warps=8, num_stages=2)
_EXACT = (Tiles(32, 8, 1), Tiles(16, 8, 1), Tiles(16, 8, 1))
# Left alone, the compiler may take 128 registers, for two programs at a time, and spill for it.
_ROOMY = replace(_WHOLE, registers=208)
# 16 rows to each warp, as its matrix instruction takes them.
_MMA_SYNC = _rows(
    int8=(_ROOMY, _WHOLE, Tiles(32, 4, 2)),
    half=(_WHOLE, _HALF_ROWS, Tiles(32, 8, 2)),
    exact=_EXACT,
    more=(_ROOMY, _HALF_ROWS, Tiles(32, 4, 2)),
)
# Products of a group of warps, with accumulators of their own on sm_100: more fits.
_WHOLE_TO_128 = (_WHOLE, _WHOLE, _HALF_ROWS)
_WGMMA = _rows(int8=_WHOLE_TO_128, half=_WHOLE_TO_128, exact=_EXACT)
# Before Triton 3.8, sums in tensor memory that are reduced to flags do not compile, nor do loads
# ahead of rows that are no multiple of 16 long: tiles of 32 rows are multiplied as on sm_80.
_SM_100 = {
    **_WGMMA,
    **{("half+older", D): Tiles(32, warps, 2) for D, warps in ((64, 4), (128, 8), (256, 8))},
}
# sm_103 and sm_110 multiply int8 as sm_80 does, and 16 bits as sm_100 does.
_MIXED = {**_SM_100, ("int8", 64): _ROOMY, ("int8+more", 64): _ROOMY}
_WAVES = (Tiles(128, 4, 2), Tiles(128, 4, 2), Tiles(64, 4, 1))
_CDNA = _rows(
    int8=_WAVES,
    half=_WAVES,
    exact=(Tiles(128, 4, 2), Tiles(64, 4, 1), Tiles(32, 4, 1)),
)
# Few registers, and none of their own for accumulators: "exact" spills at every tile that was
# tried, "int8" beyond head dim 128; there tiles that spill nothing need twice the instructions.
_RDNA = _rows(
    int8=(Tiles(64, 4, 1), Tiles(32, 8, 1), Tiles(64, 8, 1)),
    half=(Tiles(64, 16, 1), Tiles(32, 16, 1), Tiles(16, 16, 1)),
    exact=(Tiles(16, 8, 1), Tiles(16, 8, 1), Tiles(16, 8, 1)),
)
# Every way that programs may share a query block.
_INTERPRETED = _rows(
    int8=_WHOLE_TO_128,
    half=(_HALF_ROWS, _HALF_ROWS, Tiles(32, 8, 2)),
    exact=_WHOLE_TO_128,
)
_FN, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_KB = 1024
TABLE = {
    name: Architecture(name, rows, fp8, shared * _KB, source)
    for name, rows, fp8, shared, source in (
        ("sm_80", _MMA_SYNC, None, 163, "compiled"),
        ("sm_86", _MMA_SYNC, None, 99, "compiled"),
        ("sm_87", _MMA_SYNC, None, 163, "as sm_80"),
        ("sm_89", _MMA_SYNC, _FN, 99, "compiled"),
        ("sm_90", _WGMMA, _FN, 227, "compiled"),
        ("sm_100", _SM_100, _FN, 227, "compiled"),
        ("sm_103", _MIXED, _FN, 227, "compiled"),
        ("sm_110", _MIXED, _FN, 227, "compiled"),
        ("sm_120", _MMA_SYNC, _FN, 99, "compiled"),
        ("sm_121", _MMA_SYNC, _FN, 99, "as sm_120"),
        ("gfx90a", _CDNA, None, 64, "as gfx942"),
        ("gfx942", _CDNA, _FNUZ, 64, "compiled"),
        ("gfx950", _CDNA, _FN, 160, "as gfx942"),
        ("gfx1100", _RDNA, None, 64, "compiled"),
        ("gfx1101", _RDNA, None, 64, "as gfx1100"),
        ("gfx1102", _RDNA, None, 64, "as gfx1100"),
        ("gfx1151", _RDNA, None, 64, "as gfx1100"),
        ("gfx1200", _RDNA, _FN, 64, "as gfx1100"),
        ("gfx1201", _RDNA, _FN, 64, "as gfx1100"),
        ("xpu", _RDNA, None, 64, "a cautious guess; neither compiled nor run"),
        (INTERPRETER, _INTERPRETED, _FN, 1 << 20, "Triton's interpreter, for tests"),
    )
}
_assumed: str | None = None
"""A plain global, which a graph being traced can read; only tools set it."""


@contextmanager
def assume(name: str) -> Iterator[Architecture]:
    """Launch as on this architecture, to compile for one that is not here."""
    global _assumed
    before, _assumed = _assumed, name
    try:
        yield TABLE[name]
    finally:
        _assumed = before


def assumed() -> bool:
    return _assumed is not None


def architecture_of(kind: str, index: int = 0) -> Architecture | str:
    """The architecture of a device, or why it is not served."""
    if _assumed is not None:
        return TABLE[_assumed]
    if kind == "cpu":
        return TABLE[INTERPRETER]
    if kind == "xpu":
        return TABLE["xpu"]
    return _named(host(kind, index).device(kind).capability.split(":")[0])


def _named(name: str) -> Architecture | str:
    if name in TABLE:
        return TABLE[name]
    served = ", ".join(n for n in TABLE if n not in (INTERPRETER, "xpu"))
    if name.startswith("sm_") and name[3:].isdigit() and int(name[3:]) < 80:
        return (
            f"{name} is too old: it has no int8 and bf16 matrix instructions; served are {served}"
        )
    return f"the architecture {name or 'of this device'} is not known; served are {served}"


MOST_OF_AXIS = 65_535
"""Programs along the second and third axis, of CUDA. Taken for other platforms, too: their own
limits were not looked up, and are checked by no card yet."""
MOST_OF_FIRST = 2**31 - 1
"""Along the first axis, of CUDA."""
MOST_OF_FIRST_AMD = 2**32 // (8 * 64) - 1
"""Assumed for AMD: fewer than 2^32 threads, eight wavefronts of 64 in a program."""
PROGRAMS_PER_BLOCK = 8
"""Most programs that share a query block: 128 rows, 16 each."""


def why_too_large(call: Call, architecture: str) -> str | None:
    """Why no grid holds the call, and the way out; None if one does."""
    first = MOST_OF_FIRST_AMD if architecture.startswith("gfx") else MOST_OF_FIRST
    axes = [
        ("batch entries", call.B, MOST_OF_AXIS, "split the batch into several calls"),
        ("query heads", call.Hq, MOST_OF_AXIS, "split the heads into several calls"),
        (
            "programs for the query blocks",
            call.n_q * PROGRAMS_PER_BLOCK,
            first,
            "split the queries into several calls",
        ),
        ("key blocks", call.n_k, first, "split the keys, and merge the results by their LSE"),
    ]
    if call.has_mask:
        # Of the mask's own batch and heads a call does not tell which are expanded.
        axes += [
            ("query blocks under a mask", call.n_q, MOST_OF_AXIS, "split the queries"),
            ("heads of a mask in all batch entries", call.B * call.Hq, MOST_OF_AXIS, "split it"),
        ]
    for what, n, most, way_out in axes:
        if n > most:
            return f"a launch takes at most {most:,} {what}, and the call has {n:,}; {way_out}"
    return None


def why_too_many(sequences: int) -> str | None:
    """The same of a pack, whose sequences take the place of the batch."""
    if sequences <= MOST_OF_AXIS:
        return None
    return (
        f"a launch takes at most {MOST_OF_AXIS:,} packed sequences, got {sequences:,}; "
        "split the pack into several calls"
    )
