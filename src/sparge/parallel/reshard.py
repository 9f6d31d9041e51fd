"""Rows change hands: from one layout of a sequence to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Exchange
from .layout import Layout, Piece
from .messages import Spec, from_bytes, size_of, to_bytes


def reshard(
    exchange: Exchange, tensors: Sequence[Tensor], old: Layout, new: Layout, purpose: str
) -> list[Tensor]:
    """Rows (dimension 2) of tensors `[B, H, L, …]` in another layout."""
    if old == new:
        return list(tensors)
    rank, ranks = exchange.rank, range(exchange.world)
    sending = {to: _shared(old.of(rank), new.of(to)) for to in ranks}
    coming = {of: _shared(old.of(of), new.of(rank)) for of in ranks}
    device = exchange.device
    messages = {
        to: to_bytes([_rows(x, old.of(rank), part) for x in tensors for part in parts], device)
        for to, parts in sending.items()
    }
    specs = {
        of: [_spec(x, len(part)) for x in tensors for part in parts] for of, parts in coming.items()
    }
    found = exchange.swap(purpose, messages, {of: size_of(specs[of]) for of in ranks})
    out = [x.new_empty((*x.shape[:2], new.length(rank), *x.shape[3:])) for x in tensors]
    for of, parts in coming.items():
        received = iter(from_bytes(found[of], specs[of]))
        for whole in out:
            for part in parts:
                _rows(whole, new.of(rank), part).copy_(next(received))
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


def _spec(x: Tensor, length: int) -> Spec:
    return Spec((*x.shape[:2], length, *x.shape[3:]), x.dtype)


def pieces_of(x: Tensor, layout: Layout, rank: int) -> list[Tensor]:
    """The pieces that a rank's tensor consists of, as views."""
    if not (held := layout.of(rank)):
        return []
    return list(torch.split(x, [len(piece) for piece in held], dim=2))
