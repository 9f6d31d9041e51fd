"""The last stage: attention over the blocks of a plan, by attend_kernel.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import BLOCK_Q, Call
from ...values.stages import Attended, Prepared, PreparedKeys, PreparedQueries
from ...values.tokenmask import TokenMask
from . import attend_kernel
from .architectures import Tiles
from .arguments import (
    LOG2E,
    Lists,
    Packed,
    PooledPlan,
    architecture,
    hides,
    lists_of,
    mask_kind,
    mask_of,
    most_of,
    per_head,
    pools_of,
    sizes_of,
    types_of,
)
from .attend_kernel import Tensors
from .attend_tiles import How
from .launch import DoesNotFit, launch
from .operands import (
    KeysOnDevice,
    key_rows,
    make_keys,
    packed_of,
    pooled_entries,
    query_rows,
    value_rows,
)
from .primitives import Rows, Strides, ValueTypes

EVERY_HEAD, NOT_RAISED, RAISED = 0, 1, 2
"""Key heads that a launch attends, by the flags of those that an error budget raised."""
T = TypeVar("T")
_smaller: dict[tuple[str, Tiles], Tiles] = {}
"""By architecture, what is launched in place of tiles that did not fit a card. The table was
compiled for, so only a card with less shared memory than its architecture gets here."""


def attend(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    """Heads that an error budget raised run in the caller's own precision, by a second launch: both
    look at the flags on the device."""
    return in_tiles_that_fit(call, lambda: _attend_all(call, prepared, plan, tokens))


def _attend_all(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    queries, keys, packed = prepared.queries, prepared.keys, packed_of(prepared)
    lists = lists_of(plan, tokens, ascending=call.recipe.pv_skip is not None)
    pools = _pools(keys, plan, tokens)
    done = _empty(call, plan.counts)
    if plan.measured is None or not call.recipe.quantized:
        attend_lists(call, queries, keys, lists, pools, tokens, done, packed=packed)
        return _finished(done)
    raised = (plan.measured[2] > 0).any(0).view(call.Hk, -1).any(1).to(torch.uint8)
    attend_lists(
        call, queries, keys, lists, pools, tokens, done, packed=packed, raised=raised,
        which=NOT_RAISED,
    )  # fmt: skip
    own = in_own_precision(call)
    assert queries.own is not None
    assert keys.own_key is not None
    theirs = make_keys(own, keys.own_key, keys.own_value, None, coded=False)
    again = _empty(own, plan.counts)._replace(out=done.out, lse=done.lse)
    attend_lists(
        own, PreparedQueries(queries.own), theirs, lists, pools, tokens, again, packed=packed,
        raised=raised, which=RAISED,
    )  # fmt: skip
    of_heads = raised.repeat_interleave(call.Hq // call.Hk)[:, None] != 0
    skips = torch.where(of_heads, _finished(again).pv_skips, _finished(done).pv_skips)
    return done._replace(pv_skips=skips)


def in_own_precision(call: Call) -> Call:
    return replace(call, recipe=replace(call.recipe, precision=call.own_precision))


def _empty(call: Call, counts: Tensor) -> Attended:
    """Outputs to be written; skips of the second filter apart for each program of a query block."""
    tiles = tiles_of(call)
    out = counts.new_empty((call.B, call.Hq, call.Lq, call.Dv), dtype=call.dtype)
    lse = counts.new_empty((call.B, call.Hq, call.Lq), dtype=torch.float32)
    return Attended(out, lse, counts.new_empty((*counts.shape, BLOCK_Q // tiles.block_m)))


def _finished(done: Attended) -> Attended:
    skips = done.pv_skips
    skips = skips[..., 0] if skips.shape[-1] == 1 else skips.sum(-1, dtype=torch.int32)
    return Attended(done.out, done.lse, skips)


def attend_lists(
    call: Call,
    queries: PreparedQueries,
    keys: PreparedKeys,
    lists: Lists,
    pools: Tensor | None,
    tokens: TokenMask,
    done: Attended,
    *,
    packed: Packed,
    raised: Tensor | None = None,
    which: int = EVERY_HEAD,
) -> None:
    """One launch over the lists of every query block."""
    tiles, recipe = tiles_of(call), call.recipe
    sizes = sizes_of(call, packed, tokens.offset)
    filters, filter_from = recipe.pv_skip is not None, None
    if filters:
        device = lists.counts.device
        filter_from = per_head(recipe.pv_skip, call.Hq, math.inf, LOG2E, torch.float32, device)
    q, k, mask = query_rows(call, queries), key_rows(call, keys), mask_of(tokens)
    values, value_types = _values_by_unit(call, keys)
    group = 0 if keys.entries is None or pools is None else keys.entries.group
    launch(
        attend_kernel.attend_blocks,
        (sizes.n_q * (BLOCK_Q // tiles.block_m), call.Hq, call.B),
        tiles.options,
        tensors=Tensors(
            q=q.data,
            k=k.data,
            v=values.data,
            out=done.out,
            lse=done.lse,
            q_scale=q.scale,
            k_scale=k.scale,
            v_scale=values.scale,
            lse_shift=queries.lse_shift,
            counts=lists.counts,
            block_lists=lists.blocks,
            n_full=lists.n_full,
            pv_skips=done.pv_skips,
            pv_skip=filter_from,
            mask=mask.data,
            pooled=pooled_entries(call, keys, pools),
            raised=raised,
            pack=packed.of_queries(),
        ),
        q_strides=q.strides,
        k_strides=k.strides,
        v_strides=values.strides,
        out_strides=Strides(*done.out.stride()[:3]),
        mask_strides=mask.strides,
        Hq=call.Hq,
        group=call.Hq // call.Hk,
        **sizes._asdict(),
        scale_log2=abs(call.scale) * LOG2E,
        headroom=_headroom(call, packed),
        TYPES=types_of(call),
        VALUES=value_types,
        HOW=How(
            BLOCK_M=tiles.block_m,
            ENTRIES=tiles.entries,
            POOL_GROUP=group,
            OUT_MOST=most_of(call.dtype),
            NEGATE=call.scale < 0,
            CAUSAL=hides(tokens, packed),
            MASK=mask_kind(tokens),
            FILTERS=filters,
            RAISED=which,
        ),
    )


def _headroom(call: Call, packed: Packed) -> float:
    """By how many octaves weights are lowered, so that no sum of values overflows fp32; of a pack,
    1 for what its table says of each sequence. Sums of fp16 values cannot overflow."""
    if call.dtype == torch.float16:
        return 0.0
    return 1.0 if packed else float((call.Lk - 1).bit_length())


def _values_by_unit(call: Call, keys: PreparedKeys) -> tuple[Rows, ValueTypes]:
    """8-bit values are summed in units of a power of two: logarithms in place of scales."""
    values, types = value_rows(call, keys)
    if values.scale is not None:
        logs = keys.v_logs if isinstance(keys, KeysOnDevice) else None
        values = values._replace(
            scale=values.scale.clamp(min=1e-37).log2() if logs is None else logs
        )
    return values, types


def _pools(keys: PreparedKeys, plan: BlockPlan, tokens: TokenMask) -> Tensor | None:
    """Which blocks are pooled: as `select` of this call found, or read off the plan."""
    if keys.entries is None:
        return None
    return plan.pools if isinstance(plan, PooledPlan) else pools_of(plan, tokens)


def tiles_of(call: Call) -> Tiles:
    """The tiles that a call is attended in on its card."""
    found, recipe = architecture(call), call.recipe
    uneven = call.D % 16 != 0 or call.Dv % 16 != 0
    tiles = found.tiles_for(
        recipe.precision,
        max(call.D, call.Dv),
        filters=recipe.pv_skip is not None,
        masked=call.has_mask,
        uneven=uneven,
    )
    return _smaller.get((found.name, tiles), tiles)


def in_tiles_that_fit(call: Call, attend: Callable[[], T]) -> T:
    """`attend()`, again with smaller tiles for as long as its kernel does not fit the card."""
    while True:
        try:
            return attend()
        except DoesNotFit:
            shrunk = [_shrink(each) for each in (call, in_own_precision(call))]
            if not any(shrunk):
                raise


def _shrink(call: Call) -> bool:
    now, name = tiles_of(call), architecture(call).name
    less = now.smaller()
    if less is None:
        return False
    replaced = [key for key, tiles in _smaller.items() if tiles == now and key[0] == name]
    _smaller.update(dict.fromkeys([(name, now), *replaced], less))
    return True
