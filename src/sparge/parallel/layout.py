"""Which rows of a sequence each rank holds.

contiguous   rank r has the r-th part; lengths are the ranks' own
zigzag       2 · world equal parts, of which rank r has part r and part 2 · world - 1 - r: under
             a causal mask every rank then has as much to do
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..values.call import Call
from ..values.geometry import BLOCK_K, BLOCK_Q, n_blocks

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Piece:
    """Rows `start … stop-1` of the sequence, held by a rank."""

    start: int
    stop: int
    rank: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """pieces: ascending and without gaps; a rank's rows are its pieces, one after another."""

    pieces: tuple[Piece, ...]
    world: int

    @property
    def total(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    def of(self, rank: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.rank == rank)

    def length(self, rank: int) -> int:
        return sum(map(len, self.of(rank)))

    def on_blocks(self, block: int) -> Layout:
        """The same with every cut at the nearest multiple of `block`, so that no block is cut.

        Fewer than `block` rows change hands at a cut. Pieces that become empty are left out.
        """

        def rounded(cut: int) -> int:
            nearest = (cut + block // 2) // block * block
            return self.total if cut == self.total else min(nearest, self.total)

        moved = (Piece(rounded(p.start), rounded(p.stop), p.rank) for p in self.pieces)
        return Layout(tuple(piece for piece in moved if len(piece)), self.world)


def contiguous(lengths: Sequence[int]) -> Layout:
    """Each rank's rows behind those of the rank before; ranks may have none."""
    cuts = [0, *accumulate(lengths)]
    pieces = (Piece(start, stop, rank) for rank, (start, stop) in enumerate(pairwise(cuts)))
    return Layout(tuple(piece for piece in pieces if len(piece)), len(lengths))


def zigzag(total: int, world: int, block: int = 1) -> Layout:
    """Equal parts, to whole blocks of rows, dealt there and back again."""
    n = -(-total // block)
    cuts = [min(n * i // (2 * world) * block, total) for i in range(2 * world)] + [total]
    owners = [*range(world), *reversed(range(world))]
    parts = zip(pairwise(cuts), owners, strict=True)
    pieces = (Piece(start, stop, rank) for (start, stop), rank in parts)
    return Layout(tuple(piece for piece in pieces if len(piece)), world)


def layout_of(name: str, lengths: Sequence[int], what: str) -> Layout:
    """The layout of this name in which the ranks have these lengths, or an error."""
    if name == "contiguous":
        return contiguous(lengths)
    found = zigzag(sum(lengths), len(lengths))
    for rank, length in enumerate(lengths):
        if found.length(rank) != length:
            raise ValueError(
                f"{what}: layout 'zigzag' gives rank {rank} {found.length(rank)} of "
                f"{sum(lengths)} rows, its tensor has {length}; cut the whole with "
                "sparge.parallel.shard(x, layout='zigzag')"
            )
    return found


@dataclass(frozen=True)
class Held:
    """A rank's queries, keys and values, cut at blocks, and where all ranks' rows lie. call: of the
    whole sequence."""

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    q_layout: Layout
    k_layout: Layout

    def q_blocks(self, rank: int) -> list[int]:
        """The query blocks that a rank has, ascending."""
        return [i for piece in self.q_layout.of(rank) for i in q_blocks_of(piece)]

    def k_blocks(self, rank: int) -> list[int]:
        """The key blocks that a rank has, ascending."""
        return [i for piece in self.k_layout.of(rank) for i in k_blocks_of(piece)]


def q_blocks_of(piece: Piece) -> range:
    return range(piece.start // BLOCK_Q, n_blocks(piece.stop, BLOCK_Q))


def k_blocks_of(piece: Piece) -> range:
    return range(piece.start // BLOCK_K, n_blocks(piece.stop, BLOCK_K))


def places(blocks: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64).to(device)
