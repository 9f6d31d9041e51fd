"""Which rows of a sequence each rank holds, and how rows change hands.

contiguous   rank r has the r-th part; lengths are the ranks' own
zigzag       2 · world equal parts, of which rank r has part r and part 2 · world - 1 - r: under
             a causal mask every rank then has as much to do
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..values.call import BLOCK_K, BLOCK_Q, Call, n_blocks
from .exchange import Exchange, to_bytes

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
class Sharding:
    """pieces: ascending and without gaps; a rank's rows are its pieces, one after another."""

    pieces: tuple[Piece, ...]

    @classmethod
    def cut(cls, cuts: Sequence[int], ranks: Iterable[int]) -> Sharding:
        """The rows between two cuts to each of the ranks, which may be named again; empty pieces
        are left out."""
        ends = zip(pairwise(cuts), ranks, strict=True)
        pieces = (Piece(start, stop, rank) for (start, stop), rank in ends)
        return cls(tuple(piece for piece in pieces if len(piece)))

    @property
    def total(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    def of(self, rank: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.rank == rank)

    def length(self, rank: int) -> int:
        return sum(map(len, self.of(rank)))

    def recut(self, moved: Callable[[int], int]) -> Sharding:
        """The same with every cut `c` at `moved(c)`."""
        cuts = [*(piece.start for piece in self.pieces), self.total]
        return Sharding.cut(list(map(moved, cuts)), [piece.rank for piece in self.pieces])

    def on_blocks(self, block: int) -> Sharding:
        """The same with every cut at the nearest multiple of `block`, so that no block is cut.

        Fewer than `block` rows change hands at a cut. Pieces that become empty are left out.
        """

        def rounded(cut: int) -> int:
            nearest = (cut + block // 2) // block * block
            return self.total if cut == self.total else min(nearest, self.total)

        return self.recut(rounded)

    def blocks(self, block: int) -> Sharding:
        """Which rank has which block, of rows that are cut between blocks."""
        return self.recut(lambda cut: n_blocks(cut, block))

    def split(self, rows: Tensor, rank: int, dim: int = 2) -> list[Tensor]:
        """The pieces that a rank's tensor consists of, as views."""
        lengths = [len(piece) for piece in self.of(rank)]
        return list(torch.split(rows, lengths, dim)) if lengths else []

    def views(self, whole: Tensor, rank: int, dim: int = 2) -> list[Tensor]:
        """A rank's pieces of a tensor of the whole sequence."""
        return [whole.narrow(dim, piece.start, len(piece)) for piece in self.of(rank)]

    def take(self, whole: Tensor, rank: int, dim: int = 2) -> Tensor:
        """A rank's rows of a tensor of the whole sequence."""
        views = self.views(whole, rank, dim)
        return torch.cat(views, dim) if views else whole.narrow(dim, 0, 0)


def contiguous(lengths: Sequence[int]) -> Sharding:
    """Each rank's rows behind those of the rank before; ranks may have none."""
    return Sharding.cut([0, *accumulate(lengths)], range(len(lengths)))


def zigzag(total: int, world: int, block: int = 1) -> Sharding:
    """Equal parts, to whole blocks of rows, dealt there and back again."""
    n = n_blocks(total, block)
    cuts = [min(n * i // (2 * world) * block, total) for i in range(2 * world)] + [total]
    return Sharding.cut(cuts, [*range(world), *reversed(range(world))])


def sharding_of(layout: str, lengths: Sequence[int], what: str) -> Sharding:
    """That of a layout in which the ranks have these lengths, or an error."""
    if layout == "contiguous":
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
    q_rows: Sharding
    k_rows: Sharding

    @cached_property
    def q_blocks(self) -> Sharding:
        return self.q_rows.blocks(BLOCK_Q)

    @cached_property
    def k_blocks(self) -> Sharding:
        return self.k_rows.blocks(BLOCK_K)


def overlap(x: Tensor, own: Sequence[Piece], other: Sequence[Piece]) -> list[Tensor]:
    """Views of the rows (dimension 2) that are in both, ascending. own: what x consists of."""
    views, at = [], 0
    for piece in own:
        for part in other:
            start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
            if start < stop:
                views.append(x.narrow(2, at + start - piece.start, stop - start))
        at += len(piece)
    return views


def reshard(
    exchange: Exchange, tensors: Sequence[Tensor], old: Sharding, new: Sharding
) -> list[Tensor]:
    """Rows (dimension 2) of tensors `[B, H, L, …]`, sharded in another way."""
    if old == new:
        return list(tensors)
    ranks, had, has = range(exchange.world), old.of(exchange.rank), new.of(exchange.rank)
    n = new.length(exchange.rank)
    made = [x.new_empty((*x.shape[:2], n, *x.shape[3:])) for x in tensors]
    send = {to: [v for x in tensors for v in overlap(x, had, new.of(to))] for to in ranks}
    into = {of: [v for x in made for v in overlap(x, has, old.of(of))] for of in ranks}
    exchange.swap("move", {to: to_bytes(x, exchange.device) for to, x in send.items()}, into)
    return made


def shard(x: Tensor, *, layout: str = "contiguous", group: Any = None, dim: int = 2) -> Tensor:
    """This rank's rows of a tensor that every rank has whole; `dim` is the sequence."""
    group = dist.group.WORLD if group is None else group
    total, world, rank = x.shape[dim], dist.get_world_size(group), dist.get_rank(group)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if layout == "zigzag":
        held = zigzag(total, world)
    else:
        held = Sharding.cut([total * i // world for i in range(world + 1)], range(world))
    if not held.of(rank):
        raise ValueError(
            f"a sequence of {total} rows leaves rank {rank} of {world} without any; use fewer ranks"
        )
    return held.take(x, rank, dim)


def unshard(x: Tensor, *, layout: str = "contiguous", group: Any = None, dim: int = 2) -> Tensor:
    """The whole tensor on every rank, of parts that `shard` cut; `dim` is the sequence."""
    group = dist.group.WORLD if group is None else group
    exchange = Exchange(group, x.device)
    rows = x.movedim(dim, 0).contiguous()
    with exchange.guarded():
        found = exchange.gather_rows("agree", torch.tensor([rows.shape[0]]))
        lengths: list[int] = found.flatten().tolist()
    held, ranks = sharding_of(layout, lengths, "x"), range(exchange.world)
    whole = rows.new_empty((held.total, *rows.shape[1:]))
    message = to_bytes(held.split(rows, exchange.rank, dim=0), x.device)
    with exchange.guarded():
        into = {of: held.views(whole, of, dim=0) for of in ranks}
        exchange.swap("move", dict.fromkeys(ranks, message), into)
    return whole.movedim(0, dim).contiguous()
