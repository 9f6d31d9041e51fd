"""The ring of diffusers' context parallelism, by `sparge.parallel.ring_attention`.

Every process keeps its queries, so it reorders its own tokens alone: visual tokens follow the
order of the whole picture or video, less those that other processes hold. The ring selects over
all of them. What a ring cannot serve (masks, dense parts of a run) is the model's own attention of
this process' queries over the keys of all, which diffusers' ring gathers in full, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from ...values.recipe import Recipe
from ..sdpa import Route
from ..tokens import Placed, absolute_ranges, ranges_of
from ..ulysses import (
    GATHERED,
    ONE_SELECTION,
    HeadShare,
    Shards,
    order_within,
    places_in_ring,
    share_heads,
)
from .split import UNKNOWN_SPLIT, heads_last, mask_of_heads, rows_of, split_of

MASKED = "a mask: the ring has none"


@dataclass(frozen=True)
class _Ring:
    """One place in a ring whose places are groups of `each` processes."""

    group: Any
    rank: int
    world: int
    each: int

    @property
    def span(self) -> tuple[int, int]:
        """The ranks, of all processes, whose tokens are at this place."""
        return self.rank * self.each, (self.rank + 1) * self.each


def attend_ring(
    route: Route,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    split: Any,
    return_lse: bool,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    **_: Any,
) -> Any:
    """Attention of this process' part of a sequence in a ring, with Ulysses inside or without.

    Tensors `[B, L, H, D]`; returns the output, or `(out, lse)` with the LSE `[B, L, H]`.
    """
    degree, heads, keys = split.ulysses_degree, query.shape[2], key.shape[1]
    within = split._ulysses_mesh.get_group() if degree > 1 else None
    share = HeadShare(0, heads, heads)
    if degree > 1:
        if heads % degree:
            raise ValueError(
                f"heads must divide by ulysses_degree {degree} in a ring, got {heads} heads"
            )
        share = share_heads(heads, split._ulysses_local_rank, degree)
        query, key, value = (_exchange(x, within, 2, 1) for x in (query, key, value))
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    ring = _Ring(split._ring_mesh.get_group(), split._ring_local_rank, split.ring_degree, degree)
    recipe, _windowed = route.recipes(share)
    lengths = _agree(ring, query, key, own=recipe is None)
    totals = (sum(q for q, _ in lengths), sum(k for _, k in lengths))
    reason = route.why_own(query, key, value, dropout_p, False, recipe, lengths=totals)
    shards = None
    if totals[0] == totals[1]:
        shards = split_of(route, totals[0], ring.world * ring.each)
        reason = reason or _why_unknown_split(shards, ring, lengths)
    if attn_mask is not None:
        reason = reason or MASKED
    if reason:
        mask = _whole_mask(attn_mask, split, share, keys, lengths, ring)
        keys_of = [k for _, k in lengths]
        key, value = (gather_parts(x, 2, keys_of, ring.group) for x in (key, value))
        given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": False, "scale": scale}
        given |= {"attn_mask": mask, "enable_gqa": False, "return_lse": return_lse}
        result = route.run_own(reason, query, key, value, **given)
        route.site.note_parallel(GATHERED)
    else:
        assert recipe is not None
        result = _select_once(route, query, key, value, recipe, shards, ring, scale, return_lse)
        route.site.note_parallel(ONE_SELECTION)
    result = heads_last(result)
    out, lse = result if return_lse else (result, None)
    if degree > 1:
        out = _exchange(out, within, 1, 2)
        lse = None if lse is None else _exchange(lse[..., None], within, 1, 2)[..., 0]
    return out if lse is None else (out, lse)


def _select_once(
    route: Route,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    shards: Shards | None,
    ring: _Ring,
    scale: float | None,
    return_lse: bool,
) -> Any:
    from ...parallel import ring_attention

    placed = None if shards is None else route.place(sum(shards.streams))
    back = None
    if shards is not None:
        recipe = _protected(route, recipe, shards, ring, placed)
    if shards is not None and placed is not None:
        index = order_within(shards, *ring.span, placed, query.device, back=False)
        back = order_within(shards, *ring.span, placed, query.device, back=True)
        query, key, value = (x.index_select(2, index) for x in (query, key, value))
    result: Any = ring_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        group=ring.group,
        scale=scale,
        recipe=recipe,
        backend=route.site.backend,
        return_lse=return_lse,
        label=route.site.label,
    )
    return result if back is None else rows_of(result, back)


def _protected(
    route: Route, recipe: Recipe, shards: Shards, ring: _Ring, placed: Placed | None
) -> Recipe:
    """The recipe whose protected ranges, and those of text, are where the ring has them."""
    L = sum(shards.streams)
    ranges = absolute_ranges(recipe.protect, L)
    found = None if route.tokens is None else route.tokens.map_of(L)
    if route.tokens is not None and route.tokens.protect_text and found is not None:
        ranges += found.others(L)
    if not ranges:
        return recipe
    places = places_in_ring(shards, ring.world, placed)
    chosen = torch.cat([places[a:b] for a, b in ranges]).unique()
    return replace(recipe, protect=ranges_of(chosen))


def _why_unknown_split(shards: Shards | None, ring: _Ring, lengths: list[tuple[int, int]]) -> str:
    if shards is None:
        return ""
    spans = [(rank * ring.each, (rank + 1) * ring.each) for rank in range(ring.world)]
    known = [shards.tokens_of(*span) for span in spans]
    return "" if known == [q for q, _ in lengths] else UNKNOWN_SPLIT


def _agree(ring: _Ring, query: Tensor, key: Tensor, *, own: bool) -> list[tuple[int, int]]:
    """Queries and keys of every rank; raises on all of them if some want their own attention.

    Ranks that go different ways would wait for each other until the group's time-out.
    """
    mine = torch.tensor([query.shape[2], key.shape[2], own], device=query.device)
    told = torch.stack(_all_gather(mine, ring)).tolist()
    if len({int(row[2]) for row in told}) > 1:
        ways = [f"rank {i} its own" if row[2] else f"rank {i} sparse" for i, row in enumerate(told)]
        raise RuntimeError(
            f"the processes of a ring must run one kind of attention, got {', '.join(ways)}; give "
            "all of them the same recipe, schedule and context"
        )
    return [(int(row[0]), int(row[1])) for row in told]


def _all_gather(x: Tensor, ring: _Ring) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(ring.world)]
    dist.all_gather(parts, x, group=ring.group)
    return parts


def gather_parts(x: Tensor, dim: int, sizes: list[int], group: Any) -> Tensor:
    """The parts of all ranks along a dimension; `sizes` of them."""
    most, shape = max(sizes), list(x.shape)
    shape[dim] = most
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([part.narrow(dim, 0, size) for part, size in pairs], dim)


def _whole_mask(
    mask: Tensor | None,
    split: Any,
    share: HeadShare,
    keys: int,
    lengths: list[tuple[int, int]],
    ring: _Ring,
) -> Tensor | None:
    """The mask of this place's queries over the keys of all; one of this process' keys is gathered.

    keys: of this process alone, before Ulysses.
    """
    if mask is None:
        return None
    sizes = [k for _, k in lengths]
    if mask.shape[-1] == keys != sum(sizes):
        if ring.each > 1:  # an equal split: diffusers has no other with both
            sizes = [keys] * (ring.world * ring.each)
        mask = gather_parts(mask, mask.dim() - 1, sizes, split._flattened_mesh.get_group())
    return mask_of_heads(mask, share, lengths[ring.rank][0], sum(k for _, k in lengths))


def _exchange(x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
    """All heads of some tokens to some heads of more tokens, or back."""
    made: Tensor = dispatch._all_to_all_dim_exchange(x.contiguous(), scatter, gather, group)
    return made
