"""Triton's intermediate code as text → what each loop multiplies, and how deep its loads are.

From the TTIR: matrix products of each loop as the kernel says them. From the TTGIR, after
pipelining: the buffers in shared memory that a loop's loads go through. Such a buffer is allocated
without a value, and has one dimension more than its tile; that dimension is its depth. Without
pipelining there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

_LOC = re.compile(r"\s+loc\(.*$")
_DOT = re.compile(r"= tt\.dot .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x\w+>")
_LOOP = re.compile(r"\bscf\.(?:for|while)\b")
_ANY_DOT = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b(?!_)")
_BUFFER = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<((?:\d+x)+)(\w+),")
_USE = re.compile(r"ttg\.memdesc_index (%\w+)\[")

KINDS = {"i8": "int8", "f16": "half", "bf16": "half", "f32": "single"}


@dataclass(frozen=True)
class Product:
    """One matrix product of a loop: `[m, k] @ [k, n]`. kind: int8, half, fp8 or single."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def macs(self) -> int:
        return self.m * self.n * self.k


@dataclass(frozen=True)
class Buffer:
    """Shared memory for `depth` tiles, so that loads run ahead of their use."""

    depth: int
    tile: tuple[int, ...]
    dtype: str


def products_of_loops(ttir: str) -> list[tuple[Product, ...]]:
    """Of each innermost loop that multiplies matrices, in order."""
    found = []
    for lines in _innermost(ttir, _DOT):
        dots = [dot for line in lines if (dot := _DOT.search(line))]
        found.append(tuple(_product(*dot.groups()) for dot in dots))
    return found


def _product(m: str, k: str, dtype: str, n: str) -> Product:
    return Product(KINDS.get(dtype, "fp8"), int(m), int(n), int(k))


def buffers_of_loops(ttgir: str) -> list[tuple[Buffer, ...]]:
    """Of each innermost loop that multiplies matrices, in order; scalars do not count."""
    buffers = {name: _buffer(shape, dtype) for name, shape, dtype in _BUFFER.findall(ttgir)}
    found = []
    for lines in _innermost(ttgir, _ANY_DOT):
        names = dict.fromkeys(use for line in lines for use in _USE.findall(line))
        used = [buffers[name] for name in names if name in buffers]
        found.append(tuple(x for x in used if prod(x.tile) > 1))
    return found


def _buffer(shape: str, dtype: str) -> Buffer:
    depth, *tile = map(int, shape.rstrip("x").split("x"))
    return Buffer(depth, tuple(tile), dtype)


@dataclass
class _Region:
    is_loop: bool
    lines: list[str] = field(default_factory=list)
    is_outer: bool = False


def _innermost(text: str, holds: re.Pattern[str]) -> Iterator[list[str]]:
    """The lines of each loop that holds such an operation, and no other loop that does."""
    regions: list[_Region] = []
    for raw in text.splitlines():
        line = _LOC.sub("", raw).rstrip()
        for region in regions:
            region.lines.append(line)
        if line.lstrip().startswith("}") and regions:
            done = regions.pop()
            if done.is_loop and any(map(holds.search, done.lines)):
                if not done.is_outer:
                    yield done.lines
                for region in regions:
                    region.is_outer = True
        if line.endswith("{"):
            regions.append(_Region(bool(_LOOP.search(line))))
