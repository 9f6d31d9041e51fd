"""NOUN packed sequences of different lengths, as the kernels read them: all in one launch.

Query and key blocks of all sequences are numbered one after another; none holds rows of two
sequences. Tables say to which sequence a block belongs and where the sequence lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...values.geometry import BLOCK_K, BLOCK_Q, diagonal_offset, n_blocks
from .shapes import within


@dataclass(frozen=True)
class Packed:
    """sequences: how many, 0 for a plain batch. n_q, n_k: blocks of all of them; most_k: key blocks
    of the longest. table int32 `[sequences, 8]`: first row, length, first key row, keys, first
    query block, first key block, offset, octaves of its keys. of_q, of_k: the sequence of each
    block."""

    sequences: int = 0
    n_q: int = 0
    n_k: int = 0
    most_k: int = 0
    table: Tensor | None = None
    of_q: Tensor | None = None
    of_k: Tensor | None = None
    cuts: tuple[tuple[int, ...], ...] = ()
    align: str = "top_left"

    def __bool__(self) -> bool:
        return self.sequences > 0

    def arguments(self, *, of: str = "") -> dict[str, Any]:
        """What a kernel is told; `of`: whose blocks it has programs for."""
        given: dict[str, Any] = {"seqs": self.table, "PACKED": bool(self)}
        if of:
            given["seq_of_block"] = self.of_q if of == "queries" else self.of_k
        return given

    def tiles(self, per_tile: int) -> Tensor | None:
        """Groups of query blocks that one program takes: `(sequence, first block of it)`."""
        if not self or self.table is None:
            return None
        return _tiles(self.cuts[0], per_tile, self.table.device)


NOT_PACKED = Packed()
PACKS = 16
"""Tables are kept for this many packs. A copy to the device waits for it; the layers of a model ask
for the same pack one after another, and a captured graph finds its tables where they were."""


def pack(cuts: tuple[list[int], list[int]], align: str, device: torch.device) -> Packed:
    """The tables of sequences cut at these rows; every sequence has queries and keys."""
    return _pack((tuple(cuts[0]), tuple(cuts[1])), align, device)


@lru_cache(maxsize=PACKS)
def _pack(
    cuts: tuple[tuple[int, ...], tuple[int, ...]], align: str, device: torch.device
) -> Packed:
    rows: list[list[int]] = []
    of_q: list[int] = []
    of_k: list[int] = []
    q_block = k_block = most_k = 0
    for seq, ((q0, q1), (k0, k1)) in enumerate(zip(*map(pairwise, cuts), strict=True)):
        Lq, Lk = q1 - q0, k1 - k0
        offset = within(diagonal_offset(Lq, Lk, align), Lq, Lk)
        rows.append([q0, Lq, k0, Lk, q_block, k_block, offset, (Lk - 1).bit_length()])
        n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
        of_q += [seq] * n_q
        of_k += [seq] * n_k
        q_block, k_block, most_k = q_block + n_q, k_block + n_k, max(most_k, n_k)
    table, of_q_block, of_k_block = (_copied(x, device) for x in (rows, of_q, of_k))
    return Packed(len(rows), q_block, k_block, most_k, table, of_q_block, of_k_block, cuts, align)


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
