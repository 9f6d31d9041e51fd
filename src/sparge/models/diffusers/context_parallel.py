"""diffusers' context parallelism: the tokens of a model are split over processes.

  ulysses    every process gets the whole sequence and some heads, and runs the route of the layer
  ring       every process keeps its tokens; `sparge.parallel.ring_attention` selects blocks over
             the whole sequence once, and moves what was selected
  both       Ulysses within the processes of one place of the ring

Text and visual tokens are split apart, so the sequence that Ulysses collects has the text of the
first process, its part of the picture, the text of the second, and so on. It is put back in the
order of one process for the call, which makes plans those of one process.

In a ring every process reorders its own tokens alone: visual tokens follow the order of the whole
picture or video, less those that other processes hold. The ring selects over all of them. What a
ring cannot serve (masks, dense parts of a run) is the model's own attention of this process'
queries over the keys of all, which diffusers' ring gathers in full, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from ...values.recipe import Recipe, recipe_with_protected
from ..route import GRADIENT, Route, SdpaCall, wants_gradient
from ..tokens import Placed, TokenMap, absolute_ranges, ranges_of
from ..ulysses import (
    GATHERED,
    ULYSSES,
    HeadShare,
    Shards,
    order_within,
    places_in_ring,
    share_heads,
    to_sequence,
)

UNKNOWN_SPLIT = "tokens that are split over the processes in a way that is not known"
MASKED = "a mask: the ring has none"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_parallel(route: Route, call: SdpaCall, config: Any) -> Any:
    """Attention of this process' part of a sequence; the call's tensors are `[B, L, H, D]`.

    Returns the output, or `(out, lse)` with the LSE `[B, L, H]`. diffusers has neither causal calls
    nor shared key heads here, and they are refused.
    """
    for name in ("is_causal", "enable_gqa"):
        if getattr(call, name):
            raise ValueError(f"{name} must be False under diffusers' context parallelism, got True")
    if wants_gradient(call.query, call.key, call.value):
        return _own_parallel(route, call, config)
    split = config.context_parallel_config
    if split.ring_degree > 1:
        return attend_ring(route, call, split)
    share = share_heads(call.query.shape[2], split._ulysses_local_rank, split.ulysses_degree)
    serve = partial(_serve_heads, route, split, share, call.query.shape[1])
    result = dispatch._templated_context_parallel_attention(
        call.query,
        call.key,
        call.value,
        **call.options,
        return_lse=call.return_lse,
        forward_op=serve,
        backward_op=_no_backward,
        _parallel_config=config,
    )
    route.site.tally.add_parallel(ULYSSES)
    return result


def _own_parallel(route: Route, call: SdpaCall, config: Any) -> Any:
    """diffusers' own parallel attention, counted, which has a gradient for some backends."""
    own: Any = route.own
    backend = dispatch.AttentionBackendName.NATIVE if own is None else own.now()
    given = {**call.options, "backend": backend, "parallel_config": config}
    out = dispatch.dispatch_attention_fn(call.query, call.key, call.value, **given)
    route.site.note_own(GRADIENT, 0.0, 0)
    return out


def _no_backward(*_: Any, **__: Any) -> Any:
    raise AssertionError("calls that want a gradient take diffusers' own attention")


# --- which tokens and heads a process has -------------------------------------------------------


def split_of(route: Route, L: int, world: int) -> Shards | None:
    """How the L tokens of self-attention are split over the ranks; None where nothing is known."""
    found = None if route.tokens is None else route.tokens.map_of(L)
    return None if found is None else Shards(_streams(found, L), world)


def _streams(found: TokenMap, L: int) -> tuple[int, ...]:
    """What a model splits apart: text, and the visual tokens with what stands behind them."""
    start = found.start(L)
    assert start is not None, "a map is found by its number of tokens"
    return (start, L - start) if start else (prod(found.grid), L - prod(found.grid))


def mask_of_heads(mask: Tensor | None, share: HeadShare, Lq: int, Lk: int) -> Tensor | None:
    """The mask of these heads; one that is not of all queries and keys is refused."""
    if mask is None:
        return None
    rows = mask.shape[-2] if mask.dim() > 1 else 1
    if mask.shape[-1] not in (1, Lk) or rows not in (1, Lq):
        raise ValueError(
            f"attn_mask must be of keys alone, [B, 1, 1, keys of this process], or of all {Lq} "
            f"queries and {Lk} keys under context parallelism; got {list(mask.shape)}"
        )
    if mask.dim() == 4 and mask.shape[1] == share.heads > 1:
        mask = mask[:, share.start : share.stop]
    return mask


def rows_of(result: Any, index: Tensor) -> Any:
    """Some rows, in this order, of an output `[B, H, L, D]`, or of `(out, lse)`."""
    if isinstance(result, tuple):
        return tuple(x.index_select(2, index) for x in result)
    return result.index_select(2, index)


def heads_last(result: Any) -> Any:
    """An output as `[B, L, H, D]`, as diffusers has it; or with its LSE, fp32 `[B, L, H]`."""
    if isinstance(result, tuple):
        out, lse = result
        return out.permute(0, 2, 1, 3), lse.permute(0, 2, 1).float()
    return result.permute(0, 2, 1, 3)


# --- Ulysses ------------------------------------------------------------------------------------


def _serve_heads(
    route: Route, split: Any, share: HeadShare, local: int, _: Any, *given: Any, **__: Any
) -> Any:
    """The attention of one call between the two exchanges of Ulysses: the whole sequence and this
    process' heads.

    local: tokens of this process. given: as in `SdpaCall`, with tensors `[B, L, H, D]`.
    """
    world, rank = split.ulysses_degree, split._ulysses_local_rank
    call = SdpaCall(*given)
    Lq, Lk = call.query.shape[1], call.key.shape[1]
    mask = mask_of_heads(call.attn_mask, share, Lq, Lk)
    query, key, value = (x.permute(0, 2, 1, 3) for x in (call.query, call.key, call.value))
    call = call._replace(query=query, key=key, value=value, attn_mask=mask)
    shards = split_of(route, Lq, world) if Lq == Lk else None
    if shards is not None and shards.held_by(rank, rank + 1) != local:
        return heads_last(route.run_own(UNKNOWN_SPLIT, call))
    if shards is None or shards.in_order:
        return heads_last(route.serve(call, share=share))
    index = to_sequence(shards, query.device)
    query, key, value = (x.index_select(2, index) for x in (query, key, value))
    mask = _in_order(mask, index)
    call = call._replace(query=query, key=key, value=value, attn_mask=mask)
    result = route.serve(call, share=share)
    return heads_last(rows_of(result, to_sequence(shards, query.device, back=True)))


def _in_order(mask: Tensor | None, index: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.index_select(-2, index)
    return mask.index_select(-1, index) if mask.shape[-1] > 1 else mask


# --- the ring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ring:
    """One place in a ring whose places are groups of `processes` processes."""

    group: Any
    rank: int
    world: int
    processes: int

    @property
    def span(self) -> tuple[int, int]:
        """The ranks, of all processes, whose tokens are at this place."""
        return self.rank * self.processes, (self.rank + 1) * self.processes


def attend_ring(route: Route, call: SdpaCall, split: Any) -> Any:
    """Attention of this process' part of a sequence in a ring, with Ulysses inside or without.

    The call's tensors are `[B, L, H, D]`; returns the output, or `(out, lse)` with the LSE
    `[B, L, H]`.
    """
    query, key, value = call.query, call.key, call.value
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
    call = call._replace(query=query, key=key, value=value)
    ring = _Ring(split._ring_mesh.get_group(), split._ring_local_rank, split.ring_degree, degree)
    lengths = _agree(ring, query, key, own=route.site.recipe_now() is None)
    totals = (sum(q for q, _ in lengths), sum(k for _, k in lengths))
    recipe, reason = route.decide(call, share=share, lengths=totals)
    shards = None
    if totals[0] == totals[1]:
        shards = split_of(route, totals[0], ring.world * ring.processes)
        reason = reason or _why_unknown_split(shards, ring, lengths)
    if call.attn_mask is not None:
        reason = reason or MASKED
    if recipe is None or reason:
        mask = _whole_mask(call.attn_mask, split, share, keys, lengths, ring)
        sizes = [k for _, k in lengths]
        key, value = (gather_parts(x, 2, sizes, ring.group) for x in (key, value))
        result = route.run_own(reason, call._replace(key=key, value=value, attn_mask=mask))
        route.site.tally.add_parallel(GATHERED)
    else:
        result = _select_once(route, call, recipe, shards, ring)
    result = heads_last(result)
    out, lse = result if call.return_lse else (result, None)
    if degree > 1:
        out = _exchange(out, within, 1, 2)
        lse = None if lse is None else _exchange(lse[..., None], within, 1, 2)[..., 0]
    return out if lse is None else (out, lse)


def _select_once(
    route: Route, call: SdpaCall, recipe: Recipe, shards: Shards | None, ring: _Ring
) -> Any:
    back = None
    query, key, value = call.query, call.key, call.value
    if shards is not None:
        L = sum(shards.streams)
        placed = None if route.tokens is None else route.tokens.place(L)
        recipe = _protected(route, recipe, shards, ring, placed)
        if placed is not None:
            index = order_within(shards, *ring.span, placed, query.device, back=False)
            back = order_within(shards, *ring.span, placed, query.device, back=True)
            query, key, value = (x.index_select(2, index) for x in (query, key, value))
    given = {"group": ring.group, "scale": call.scale, "return_lse": call.return_lse}
    out, lse = route.site.attend_ring(query, key, value, recipe=recipe, **given)
    result = (out, lse) if call.return_lse else out
    return result if back is None else rows_of(result, back)


def _protected(
    route: Route, recipe: Recipe, shards: Shards, ring: _Ring, placed: Placed | None
) -> Recipe:
    """The recipe whose protected ranges, and those of text, are where the ring has them."""
    L = sum(shards.streams)
    ranges = absolute_ranges(recipe.protect, L)
    if route.tokens is not None:
        ranges += route.tokens.protected(L)
    if not ranges:
        return recipe
    places = places_in_ring(shards, ring.world, placed)
    chosen = torch.cat([places[a:b] for a, b in ranges]).unique()
    return recipe_with_protected(recipe, ranges_of(chosen))


def _why_unknown_split(shards: Shards | None, ring: _Ring, lengths: list[tuple[int, int]]) -> str:
    if shards is None:
        return ""
    n = ring.processes
    known = [shards.held_by(rank * n, (rank + 1) * n) for rank in range(ring.world)]
    return "" if known == [q for q, _ in lengths] else UNKNOWN_SPLIT


def _agree(ring: _Ring, query: Tensor, key: Tensor, *, own: bool) -> list[tuple[int, int]]:
    """Queries and keys of every rank; raises on all of them if some want their own attention.

    Ranks that go different ways would wait for each other until the group's time-out.
    """
    mine = torch.tensor([query.shape[2], key.shape[2], own], device=query.device)
    parts = [torch.empty_like(mine) for _ in range(ring.world)]
    dist.all_gather(parts, mine, group=ring.group)
    rows = torch.stack(parts).tolist()
    if len({int(row[2]) for row in rows}) > 1:
        ways = [f"rank {i} its own" if row[2] else f"rank {i} sparse" for i, row in enumerate(rows)]
        raise RuntimeError(
            f"the processes of a ring must run one kind of attention, got {', '.join(ways)}; give "
            "all of them the same recipe, schedule and context"
        )
    return [(int(row[0]), int(row[1])) for row in rows]


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
        if ring.processes > 1:  # an equal split: diffusers has no other with both
            sizes = [keys] * (ring.world * ring.processes)
        mask = gather_parts(mask, mask.dim() - 1, sizes, split._flattened_mesh.get_group())
    return mask_of_heads(mask, share, lengths[ring.rank][0], sum(k for _, k in lengths))


def _exchange(x: Tensor, group: Any, scatter: int, gather: int) -> Tensor:
    """All heads of some tokens to some heads of more tokens, or back."""
    made: Tensor = dispatch._all_to_all_dim_exchange(x.contiguous(), scatter, gather, group)
    return made
