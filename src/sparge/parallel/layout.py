"""Which rows of a sequence each rank holds, and how rows change hands.

contiguous   rank r has the r-th part; lengths are the ranks' own
zigzag       2 · world equal parts, of which rank r has part r and part 2 · world - 1 - r: under
             a causal mask every rank then has as much to do
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..values.call import BLOCK_K, BLOCK_Q, Call, n_blocks
from .exchange import Exchange, Spec, from_bytes, size_of, to_bytes

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Piece:
    """Rows `start … stop-1` of the sequence, held by a rank."""

    start: int
    stop: int
    rank: int

    def __len__(self) -> int:
        return self.stop - self.start

    def blocks(self, block: int) -> range:
        """The blocks of the sequence that it covers."""
        return range(self.start // block, n_blocks(self.stop, block))


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
        return [i for piece in self.q_layout.of(rank) for i in piece.blocks(BLOCK_Q)]

    def k_blocks(self, rank: int) -> list[int]:
        """The key blocks that a rank has, ascending."""
        return [i for piece in self.k_layout.of(rank) for i in piece.blocks(BLOCK_K)]


def places(blocks: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64).to(device)


def reshard(
    exchange: Exchange, tensors: Sequence[Tensor], old: Layout, new: Layout, purpose: str
) -> list[Tensor]:
    """Rows (dimension 2) of tensors `[B, H, L, …]` in another layout."""
    if old == new:
        return list(tensors)
    rank, ranks = exchange.rank, range(exchange.world)
    sending = {to: _shared(old.of(rank), new.of(to)) for to in ranks}
    coming = {of: _shared(old.of(of), new.of(rank)) for of in ranks}
    sends = {
        to: [_rows(x, old.of(rank), part) for x in tensors for part in parts]
        for to, parts in sending.items()
    }
    specs = {
        of: [
            Spec((*x.shape[:2], len(part), *x.shape[3:]), x.dtype)
            for x in tensors
            for part in parts
        ]
        for of, parts in coming.items()
    }
    found = exchange.swap_tensors(purpose, sends, specs)
    out = [x.new_empty((*x.shape[:2], new.length(rank), *x.shape[3:])) for x in tensors]
    for of, parts in coming.items():
        for whole in out:
            for part in parts:
                _rows(whole, new.of(rank), part).copy_(next(found[of]))
    return out


def _shared(ours: Sequence[Piece], theirs: Sequence[Piece]) -> list[Piece]:
    """Rows that are in both, ascending."""
    overlaps = ((max(a.start, b.start), min(a.stop, b.stop), b.rank) for a in ours for b in theirs)
    return [Piece(*ends) for ends in sorted(overlaps) if ends[0] < ends[1]]


def _rows(x: Tensor, held: Sequence[Piece], part: Piece) -> Tensor:
    """The rows of `part`, a view; `held`: what x consists of."""
    at = 0
    for piece in held:
        if piece.start <= part.start and part.stop <= piece.stop:
            return x.narrow(2, at + part.start - piece.start, len(part))
        at += len(piece)
    raise AssertionError("a part lies within one piece")


def place_rows(whole: Tensor, layout: Layout, rank: int, rows: Tensor, *, dim: int) -> None:
    """Rows of a rank to where they stand in the sequence."""
    at = 0
    for piece in layout.of(rank):
        whole.narrow(dim, piece.start, len(piece)).copy_(rows.narrow(dim, at, len(piece)))
        at += len(piece)


def pieces_of(x: Tensor, layout: Layout, rank: int) -> list[Tensor]:
    """The pieces that a rank's tensor consists of, as views."""
    if not (held := layout.of(rank)):
        return []
    return list(torch.split(x, [len(piece) for piece in held], dim=2))


def shard(x: Tensor, *, layout: str = "contiguous", group: Any = None, dim: int = 2) -> Tensor:
    """This rank's rows of a tensor that every rank has whole; `dim` is the sequence."""
    group = dist.group.WORLD if group is None else group
    held = _layout(layout, x.shape[dim], dist.get_world_size(group))
    parts = [x.narrow(dim, piece.start, len(piece)) for piece in held.of(dist.get_rank(group))]
    if not parts:
        raise ValueError(
            f"a sequence of {x.shape[dim]} rows leaves rank {dist.get_rank(group)} of "
            f"{held.world} without any; use fewer ranks"
        )
    return torch.cat(parts, dim)


def unshard(x: Tensor, *, layout: str = "contiguous", group: Any = None, dim: int = 2) -> Tensor:
    """The whole tensor on every rank, of parts that `shard` cut; `dim` is the sequence."""
    group = dist.group.WORLD if group is None else group
    exchange = Exchange(group, x.device)
    rows = x.movedim(dim, 0).contiguous()
    with exchange.guarded():
        found = exchange.gather_numbers("agree", torch.tensor([rows.shape[0]]))
        lengths = [length for (length,) in found]
        specs = [Spec((length, *rows.shape[1:]), x.dtype) for length in lengths]
        sizes = [size_of([spec]) for spec in specs]
        parts = exchange.gather("move", to_bytes([rows], x.device), sizes)
    held = layout_of(layout, lengths, "x")
    whole = rows.new_empty((sum(lengths), *rows.shape[1:]))
    for rank, spec in enumerate(specs):
        place_rows(whole, held, rank, from_bytes(parts[rank], [spec])[0], dim=0)
    return whole.movedim(0, dim).contiguous()


def _layout(name: str, total: int, world: int) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {name!r}")
    if name == "zigzag":
        return zigzag(total, world)
    cuts = [total * i // world for i in range(world + 1)]
    return contiguous([stop - start for start, stop in pairwise(cuts)])
