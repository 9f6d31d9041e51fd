"""One sequence over several processes: which heads and which tokens a process has in attention.

Engines split a sequence by tokens outside of attention. Inside, Ulysses gives every process the
whole sequence and some of the heads; a ring leaves it its tokens, with all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..engine.check import check_recipe
from ..values.recipe import Recipe
from .tokens import Placed

ULYSSES = "ulysses"
ONE_SELECTION = "ring, one selection over the whole sequence"
PER_CHUNK = "ring, per-chunk selection"
GATHERED = "ring, own attention over gathered keys"
"""How calls of a layer ran, in its report."""


@dataclass(frozen=True)
class HeadShare:
    """The query heads of one process: `start` to `stop - 1`, of `heads` in all."""

    start: int
    stop: int
    heads: int

    @lru_cache(maxsize=1024)  # noqa: B019 - kept by value, and small
    def recipe_of(self, recipe: Recipe) -> Recipe:
        """A recipe for all heads, as it is for these; numbers for another count are refused."""
        check_recipe(recipe, self.heads)
        return recipe.heads(self.start, self.stop)


def share_heads(heads: int, rank: int, world: int) -> HeadShare:
    """The heads of a rank: as many for each, in order; the last has fewer where they do not divide.

    This is how diffusers, DeepSpeed and yunchang deal them out. More ranks than can have one each
    are refused.
    """
    most = -(-heads // world)
    start, stop = rank * most, min((rank + 1) * most, heads)
    if start >= stop:
        raise ValueError(
            f"heads must be at least one for each rank: {heads} heads over {world} ranks, {most} "
            f"each, leave none for rank {rank}; use fewer ranks for Ulysses, or a ring"
        )
    return HeadShare(start, stop, heads)


@dataclass(frozen=True)
class Shards:
    """Where the tokens of a sequence are, if each of its streams was split over the ranks.

    streams: tokens of each, such as text and visual ones, in the order of a rank's own sequence.
    The sequence of one process is all of the first stream, then all of the second. Streams are
    split as `torch.tensor_split` does, which is an equal split where they divide.
    """

    streams: tuple[int, ...]
    world: int

    def held_by(self, first: int, last: int) -> int:
        """How many tokens ranks `first` to `last - 1` hold."""
        return len(tokens_of_ranks(self, first, last))

    @property
    def in_order(self) -> bool:
        """Whether the parts of all ranks, one after the other, are the sequence as it was."""
        return sum(n > 0 for n in self.streams) < 2


# Indexes are kept, and used in any mode.


@lru_cache(maxsize=64)
def tokens_of_ranks(shards: Shards, first: int, last: int) -> Tensor:
    """Positions in the sequence of one process of the tokens of these ranks, in their order."""
    with torch.inference_mode(False), torch.device("cpu"):
        streams = torch.arange(sum(shards.streams)).split(shards.streams)
        parts = [stream.tensor_split(shards.world) for stream in streams]
        return torch.cat([part[rank] for rank in range(first, last) for part in parts])


@lru_cache(maxsize=64)
def order_within(
    shards: Shards, first: int, last: int, placed: Placed | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The index that puts the tokens of these ranks in order among themselves, and the one back.

    placed: visual tokens follow their order in the whole picture or video, less those of other
    ranks; tokens in front of it come first, and those behind it last. None is the order of one
    process.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        places = torch.arange(sum(shards.streams))
        places = places if placed is None else placed.restore(places, dim=0)
        index = torch.argsort(places[tokens_of_ranks(shards, first, last)])
        return index.to(device), torch.argsort(index).to(device)


@lru_cache(maxsize=64)
def places_in_ring(shards: Shards, ring: int, placed: Placed | None) -> Tensor:
    """Where each token of the sequence of one process stands in a ring of so many ranks.

    placed: the ranks have put their tokens in order (`order_within`).
    """
    cpu, parts = torch.device("cpu"), []
    with torch.inference_mode(False), cpu:
        for i in range(ring):
            span = shards.world * i // ring, shards.world * (i + 1) // ring
            mine = tokens_of_ranks(shards, *span)
            if placed is not None:
                mine = mine[order_within(shards, *span, placed, cpu)[0]]
            parts.append(mine)
        return torch.argsort(torch.cat(parts))
