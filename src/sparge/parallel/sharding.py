"""A whole sequence to the ranks' parts, and back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange
from .layout import LAYOUTS, Layout, contiguous, layout_of, zigzag
from .messages import Spec, from_bytes, size_of, to_bytes
from .reshard import place_rows


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
        length = torch.tensor([rows.shape[0]]).view(torch.uint8).to(x.device)
        found = exchange.gather("agree", length)
        lengths = [int(x.cpu().clone().view(torch.int64)) for x in found]
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


__all__ = ["shard", "unshard"]
