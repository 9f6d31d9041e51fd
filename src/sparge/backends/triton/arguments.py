"""Numbers of a call as the kernels take them: sizes, types, packs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.device_constants import constant
from ...values.call import BLOCK_K, BLOCK_Q, Call, diagonal_offset, half_dtype, n_blocks
from ...values.recipe import PerHeadOrOff, heads_of
from .architectures import Architecture, architecture_of
from .primitives import Pack, Sequence, Sizes, Types, ValueTypes

LOG2E = math.log2(math.e)
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


# --- sizes and types ----------------------------------------------------------------------------


def block_dim(D: int) -> int:
    """Channels of a tile of Q or K: a power of two, of at least what int8 units take at once."""
    return max(32, int(triton.next_power_of_2(D)))


def value_dim(Dv: int) -> int:
    """Channels of a tile of V."""
    return max(16, int(triton.next_power_of_2(Dv)))


def rotated(D: int) -> int:
    """Channels that one Hadamard transform takes."""
    return 1 << (D.bit_length() - 1)


def held_in(call: Call) -> torch.dtype:
    """The type that P and V, and in unquantized precisions Q and K, are multiplied in."""
    return torch.float32 if call.recipe.precision == "exact" else half_dtype(call.dtype)


def most_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def unit_rows(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def within(offset: int, Lq: int, Lk: int) -> int:
    """An offset of the same meaning that 32 bits can hold."""
    return max(-Lq, min(offset, Lk))


def per_head(
    numbers: PerHeadOrOff, Hq: int, none: float, factor: float, dtype: torch.dtype, device: Any
) -> Tensor:
    """One number for each query head, on the device."""
    return constant(tuple(x * factor for x in heads_of(numbers, Hq, none=none)), dtype, device)


def architecture(call: Call) -> Architecture:
    """Of the card that the call runs on."""
    found = architecture_of(*call.where)
    assert isinstance(found, Architecture)
    return found


def types_of(call: Call) -> Types:
    held = held_in(call)
    exact = architecture(call).fp32 if call.recipe.precision == "exact" else ""
    return Types(call.D, block_dim(call.D), TYPES[held], most_of(held), exact)


def value_types(call: Call, fp8: torch.dtype | None = None) -> ValueTypes:
    """fp8: the type of 8-bit values, None where they have more bits."""
    p_max = 1.0 if fp8 is None else most_of(fp8)
    return ValueTypes(call.Dv, value_dim(call.Dv), p_max, math.log2(p_max))


# --- packs --------------------------------------------------------------------------------------


NO_PACK = Pack()


@dataclass(frozen=True)
class Packed:
    """Sequences of different lengths, all in one launch. Query and key blocks of all sequences are
    numbered one after another; none holds rows of two sequences.

    sequences: how many, 0 for a plain batch. n_q, n_k: blocks of all of them; most_k: key blocks of
    the longest. of_queries, of_keys: for kernels with a program for each query or key block."""

    sequences: int = 0
    n_q: int = 0
    n_k: int = 0
    most_k: int = 0
    of_queries: Pack = NO_PACK
    of_keys: Pack = NO_PACK
    cuts: tuple[tuple[int, ...], ...] = ()
    align: str = "top_left"

    def __bool__(self) -> bool:
        return self.sequences > 0

    def tiles(self, per_tile: int) -> Tensor | None:
        """Groups of query blocks that one program takes: `(sequence, first block of it)`."""
        return _tiles(self.cuts[0], per_tile, self.of_queries.table.device) if self else None


NOT_PACKED = Packed()
PACKS = 16
"""Tables are kept for this many packs. A copy to the device waits for it; the layers of a model ask
for the same pack one after another, and a captured graph finds its tables where they were."""


@lru_cache(maxsize=PACKS)
def pack(q_cuts: tuple[int, ...], k_cuts: tuple[int, ...], align: str, device: Any) -> Packed:
    """The tables of sequences cut at these rows; every sequence has queries and keys."""
    cuts = q_cuts, k_cuts
    rows: list[Sequence] = []
    of_q: list[int] = []
    of_k: list[int] = []
    q_block = k_block = most_k = 0
    for seq, ((q0, q1), (k0, k1)) in enumerate(zip(*map(pairwise, cuts), strict=True)):
        Lq, Lk = q1 - q0, k1 - k0
        offset = within(diagonal_offset(Lq, Lk, align), Lq, Lk)
        rows.append(
            Sequence(
                q_row0=q0,
                Lq=Lq,
                k_row0=k0,
                Lk=Lk,
                q_block0=q_block,
                k_block0=k_block,
                offset=offset,
                octaves=(Lk - 1).bit_length(),
            )
        )
        n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
        of_q += [seq] * n_q
        of_k += [seq] * n_k
        q_block, k_block, most_k = q_block + n_q, k_block + n_k, max(most_k, n_k)
    table, of_q_block, of_k_block = (_copied(x, device) for x in (rows, of_q, of_k))
    queries, keys = Pack(table, of_q_block), Pack(table, of_k_block)
    return Packed(len(rows), q_block, k_block, most_k, queries, keys, cuts, align)


@lru_cache(maxsize=2 * PACKS)
def _tiles(cuts: tuple[int, ...], per_tile: int, device: torch.device) -> Tensor:
    made = [
        [seq, first]
        for seq, (start, stop) in enumerate(pairwise(cuts))
        for first in range(0, n_blocks(stop - start, BLOCK_Q), per_tile)
    ]
    return _copied(made, device)


def _copied(numbers: list[Any], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32).to(device)


def sizes_of(call: Call, packed: Packed, offset: int = 0) -> Sizes:
    """offset: of the diagonal, where a kernel looks at it."""
    n_k, n_blocks_k = packed.most_k or call.n_k, packed.n_k or call.n_k
    offset = within(offset, call.Lq, call.Lk)
    return Sizes(call.Lq, call.Lk, packed.n_q or call.n_q, n_k, n_blocks_k, offset)
