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

from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from ...values.recipe import Recipe, recipe_with_protected
from ..route import GRADIENT, Route, SdpaCall, wants_gradient
from ..tokens import absolute_ranges, ranges_of
from ..ulysses import (
    GATHERED,
    ULYSSES,
    HeadShare,
    Shards,
    order_within,
    places_in_ring,
    share_heads,
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
        # diffusers' own parallel attention, which has a gradient for some backends.
        own: Any = route.own
        backend = dispatch.AttentionBackendName.NATIVE if own is None else own.now()
        given = {**call.options, "backend": backend, "parallel_config": config}
        out = dispatch.dispatch_attention_fn(call.query, call.key, call.value, **given)
        route.site.note_own(GRADIENT, 0.0, 0)
        return out
    split = config.context_parallel_config
    if split.ring_degree > 1:
        return attend_ring(route, call, split)
    share = share_heads(call.query.shape[2], split._ulysses_local_rank, split.ulysses_degree)
    serve = partial(_serve_heads, route, split, share, call.query.shape[1])
    result = dispatch._templated_context_parallel_attention(
        **call._asdict(), forward_op=serve, backward_op=None, _parallel_config=config
    )
    route.site.tally.add_parallel(ULYSSES)
    return result


# --- which tokens and heads a process has -------------------------------------------------------


def split_of(route: Route, L: int, world: int) -> Shards | None:
    """How the L tokens of self-attention are split over the ranks; None where nothing is known."""
    found = None if route.tokens is None else route.tokens.map_of(L)
    if found is None:
        return None
    # What a model splits apart: text, and the visual tokens with what stands behind them.
    first = found.start(L) or prod(found.grid)
    return Shards((first, L - first), world)


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
        return tuple(rows_of(x, index) for x in result)
    return result.index_select(2, index)


def heads_first(call: SdpaCall) -> SdpaCall:
    """A call of tensors `[B, L, H, D]`, as diffusers has them, with `[B, H, L, D]`."""
    return call.map(lambda x: x.permute(0, 2, 1, 3))


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
    call = heads_first(call)._replace(attn_mask=mask)
    shards = split_of(route, Lq, world) if Lq == Lk else None
    if shards is not None and shards.held_by(rank, rank + 1) != local:
        return heads_last(route.run_own(UNKNOWN_SPLIT, call))
    if shards is None or shards.in_order:
        return heads_last(route.serve(call, share=share))
    index, back = order_within(shards, 0, world, None, call.query.device)
    call = call.map(lambda x: rows_of(x, index))._replace(attn_mask=_in_order(mask, index))
    return heads_last(rows_of(route.serve(call, share=share), back))


def _in_order(mask: Tensor | None, index: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.index_select(-2, index)
    return mask.index_select(-1, index) if mask.shape[-1] > 1 else mask


# --- the ring -----------------------------------------------------------------------------------


def attend_ring(route: Route, call: SdpaCall, split: Any) -> Any:
    """The same in a ring, with Ulysses inside or without."""
    degree, heads, keys = split.ulysses_degree, call.query.shape[2], call.key.shape[1]
    if heads % degree:
        raise ValueError(
            f"heads must divide by ulysses_degree {degree} in a ring, got {heads} heads"
        )
    share = share_heads(heads, split._ulysses_local_rank, degree)
    if degree > 1:
        call = call.map(lambda x: _exchange(x, split, 2, 1))
    call, group = heads_first(call), split._ring_mesh.get_group()
    q_lengths, k_lengths = _agree(group, call, own=route.site.recipe_now() is None)
    L, n_keys = sum(q_lengths), sum(k_lengths)
    recipe, reason = route.decide(call, share=share, lengths=(L, n_keys))
    shards = split_of(route, L, split.ring_degree * degree) if n_keys == L else None
    if shards is not None:
        known = [shards.held_by(i * degree, (i + 1) * degree) for i in range(split.ring_degree)]
        reason = reason or ("" if known == q_lengths else UNKNOWN_SPLIT)
    if call.attn_mask is not None:
        reason = reason or MASKED
    if recipe is None or reason:
        mask = _whole_mask(call.attn_mask, split, keys, k_lengths)
        mask = mask_of_heads(mask, share, call.lengths[0], n_keys)
        key, value = (gather_parts(x, 2, k_lengths, group) for x in (call.key, call.value))
        result = route.run_own(reason, call._replace(key=key, value=value, attn_mask=mask))
        route.site.tally.add_parallel(GATHERED)
    else:
        result = _select_once(route, call, recipe, shards, split)
    result = heads_last(result)
    if degree == 1:
        return result
    if not call.return_lse:
        return _exchange(result, split, 1, 2)
    out, lse = result
    return _exchange(out, split, 1, 2), _exchange(lse[..., None], split, 1, 2)[..., 0]


def _select_once(
    route: Route, call: SdpaCall, recipe: Recipe, shards: Shards | None, split: Any
) -> Any:
    """`sparge.parallel.ring_attention`; its tokens in order, where it is known how they are split,
    and the recipe's protected ranges and those of text where the ring has them."""
    back = None
    if shards is not None:
        assert route.tokens is not None
        L = sum(shards.streams)
        placed = route.tokens.place(L)
        if ranges := [*absolute_ranges(recipe.protect, L), *route.tokens.protected(L)]:
            places = places_in_ring(shards, split.ring_degree, placed)
            chosen = torch.cat([places[a:b] for a, b in ranges]).unique()
            recipe = recipe_with_protected(recipe, ranges_of(chosen))
        if placed is not None:
            first, n = split._ring_local_rank * split.ulysses_degree, split.ulysses_degree
            index, back = order_within(shards, first, first + n, placed, call.query.device)
            call = call.map(lambda x: rows_of(x, index))
    given: dict[str, Any] = {"scale": call.scale, "return_lse": call.return_lse}
    group = split._ring_mesh.get_group()
    out, lse = route.site.attend_ring(*call[:3], recipe=recipe, group=group, **given)
    result = (out, lse) if call.return_lse else out
    return result if back is None else rows_of(result, back)


def _agree(group: Any, call: SdpaCall, *, own: bool) -> tuple[list[int], list[int]]:
    """Numbers of queries and of keys of every rank; raises on all if some want their own attention.

    Ranks that go different ways would wait for each other until the group's time-out.
    """
    mine = torch.tensor([*call.lengths, own], device=call.query.device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    queries, keys, owns = torch.stack(parts).T.tolist()
    if len({*owns}) > 1:
        ways = [f"rank {i} {'its own' if own else 'sparse'}" for i, own in enumerate(owns)]
        raise RuntimeError(
            f"the processes of a ring must run one kind of attention, got {', '.join(ways)}; give "
            "all of them the same recipe, schedule and context"
        )
    return queries, keys


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


def _whole_mask(mask: Tensor | None, split: Any, keys: int, k_lengths: list[int]) -> Tensor | None:
    """A mask over the keys of all; one of this process' keys is gathered.

    keys: of this process alone, before Ulysses.
    """
    if mask is None or mask.shape[-1] != keys or keys == sum(k_lengths):
        return mask
    if split.ulysses_degree > 1:  # an equal split: diffusers has no other with both
        k_lengths = [keys] * (split.ring_degree * split.ulysses_degree)
    return gather_parts(mask, mask.dim() - 1, k_lengths, split._flattened_mesh.get_group())


def _exchange(x: Tensor, split: Any, scatter: int, gather: int) -> Tensor:
    """All heads of some tokens to some heads of more tokens, or back, by Ulysses."""
    group = split._ulysses_mesh.get_group()
    made: Tensor = dispatch._all_to_all_dim_exchange(x.contiguous(), scatter, gather, group)
    return made
