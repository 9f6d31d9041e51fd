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

    def recipe_of(self, recipe: Recipe) -> Recipe:
        """A recipe for all heads, as it is for these; numbers for another count are refused."""
        return _recipe_of_heads(recipe, self)


@lru_cache(maxsize=1024)
def _recipe_of_heads(recipe: Recipe, share: HeadShare) -> Recipe:
    check_recipe(recipe, share.heads)
    return recipe.heads(share.start, share.stop)


def share_heads(heads: int, rank: int, world: int) -> HeadShare:
    """The heads of a rank: as many for each, in order; the last has fewer where they do not divide.

    This is how diffusers, DeepSpeed and yunchang deal them out. More ranks than can have one each
    are refused.
    """
    each = -(-heads // world)
    start, stop = rank * each, min((rank + 1) * each, heads)
    if start >= stop:
        raise ValueError(
            f"heads must be at least one for each rank: {heads} heads over {world} ranks, {each} "
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
        return sum(_bound(n, last, self.world) - _bound(n, first, self.world) for n in self.streams)

    @property
    def in_order(self) -> bool:
        """Whether the parts of all ranks, one after the other, are the sequence as it was."""
        return sum(n > 0 for n in self.streams) < 2


def _bound(tokens: int, rank: int, world: int) -> int:
    """The first token of a rank, where the first ranks hold one more if they do not divide."""
    each, more = divmod(tokens, world)
    return rank * each + min(rank, more)


@lru_cache(maxsize=64)
def tokens_of_ranks(shards: Shards, first: int, last: int) -> Tensor:
    """Positions in the sequence of one process of the tokens of these ranks, in their order."""
    parts = []
    with torch.inference_mode(False), torch.device("cpu"):  # kept, and used in any mode
        for rank in range(first, last):
            offset = 0
            for n in shards.streams:
                a, b = _bound(n, rank, shards.world), _bound(n, rank + 1, shards.world)
                parts.append(torch.arange(offset + a, offset + b))
                offset += n
        return torch.cat(parts)


@lru_cache(maxsize=64)
def to_sequence(shards: Shards, device: torch.device, *, back: bool = False) -> Tensor:
    """The index that takes the parts of all ranks, one after the other, to the sequence of one
    process; or `back` from it."""
    with torch.inference_mode(False), torch.device("cpu"):
        index = tokens_of_ranks(shards, 0, shards.world)
        return (index if back else torch.argsort(index)).to(device)


@lru_cache(maxsize=64)
def order_within(
    shards: Shards, first: int, last: int, placed: Placed, device: torch.device, *, back: bool
) -> Tensor:
    """The index that puts the tokens of these ranks in order among themselves; or `back`.

    Visual tokens follow their order in the whole picture or video, less those of other ranks;
    tokens in front of it come first, and those behind it last.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        mine = tokens_of_ranks(shards, first, last)
        index = torch.argsort(placed.restore(torch.arange(sum(shards.streams)), dim=0)[mine])
        return (torch.argsort(index) if back else index).to(device)


@lru_cache(maxsize=64)
def places_in_ring(shards: Shards, ring: int, placed: Placed | None) -> Tensor:
    """Where each token of the sequence of one process stands in a ring of so many ranks.

    placed: the ranks have put their tokens in order (`order_within`).
    """
    each = shards.world // ring
    cpu = torch.device("cpu")
    with torch.inference_mode(False), cpu:
        parts = []
        for first in range(0, shards.world, each):
            mine = tokens_of_ranks(shards, first, first + each)
            if placed is not None:
                mine = mine[order_within(shards, first, first + each, placed, cpu, back=False)]
            parts.append(mine)
        return torch.argsort(torch.cat(parts))
