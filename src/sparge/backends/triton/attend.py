"""Online softmax over the kept blocks: one program for `BLOCK_M` rows of a query block of a head.

    out = acc / row_sum,  lse = ln2 · (row_max + log2 row_sum) + lse_shift

after a walk over full blocks, partial blocks and pooled entries (tiles.py). Rows with
nothing to attend give zeros and -inf; a row that is not finite, or keeps a block that is not, NaN.
"""

# ruff: noqa: SIM102 - an if on a constant is resolved when the kernel is compiled
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values.blockplan import BlockPlan, raised_heads
from ...values.call import Call
from ...values.stages import Attended, Prepared, PreparedQueries
from ...values.tokenmask import TokenMask
from .architectures import Tiles
from .arguments import LOG2E, Packed, architecture, most_of, per_head, sizes_of, types_of
from .blocks import Lists, hides, lists_of, mask_kind, mask_of
from .launch import DoesNotFit, launch
from .operands import (
    KeysOnDevice,
    in_own_precision,
    key_rows,
    keys_of,
    pooled_entries,
    query_rows,
    value_rows,
)
from .primitives import (
    BLOCK_K,
    BLOCK_Q,
    ROW_GROUP,
    PooledEntries,
    Rows,
    Strides,
    View,
    as_held,
    sequence_of,
    wide,
)
from .tiles import Blocks, How, Queries, Sums, keys_of_head, walk_blocks, walk_pooled

LN2 = tl.constexpr(0.6931471805599453)

EVERY_HEAD, NOT_RAISED, RAISED = 0, 1, 2
"""Key heads that a launch attends, by the flags of those that an error budget raised."""


class Tensors(NamedTuple):
    """Pointers of attend_blocks: operands, then what is written, then the plan. lse, lse_shift
    `[B, Hq, Lq]`; counts `[B, Hq, n_q]`; block_lists `[B, Hq, n_q, n_k]`, blocks that need no mask
    first, n_full: how many these are, which without a mask of the caller's the kernel finds out;
    pv_skips `[B, Hq, n_q, programs]`, of each program of a query block; pv_skip: of each head, what
    the second filter skips from; raised: a flag of each key head."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    lse_shift: Any
    counts: Any
    block_lists: Any
    n_full: Any
    pv_skips: Any
    pv_skip: Any
    mask: Any
    pooled: Any
    raised: Any
    pack: Any


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset"])
def attend_blocks(
    tensors, q_strides, k_strides, v_strides, out_strides, mask_strides, Hq, group,
    Lq, Lk, n_q, n_k, n_blocks_k, offset, scale_log2, headroom,
    TYPES: tl.constexpr, VALUES: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The whole of one program. q, k and v with scales are 8-bit codes."""
    q = Rows(tensors.q, tensors.q_scale, q_strides)
    k = Rows(tensors.k, tensors.k_scale, k_strides)
    v = Rows(tensors.v, tensors.v_scale, v_strides)
    mask = View(tensors.mask, mask_strides)
    pooled, pack = tensors.pooled, tensors.pack
    CODED: tl.constexpr = q.scale is not None
    FAST: tl.constexpr = v.scale is not None
    BLOCK_M: tl.constexpr = HOW.BLOCK_M
    BLOCK_DV: tl.constexpr = VALUES.BLOCK_DV
    PARTS: tl.constexpr = BLOCK_Q // BLOCK_M
    # Late query blocks have the most keys under a diagonal: they go first.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    i, part = pid // PARTS, pid % PARTS
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if HOW.RAISED != 0:
        if (tl.load(tensors.raised + h // group) != 0) != (HOW.RAISED == 2):
            return
    seq = 0
    if pack.table is not None:
        seq = tl.load(pack.seq_of_block + i)
    own = sequence_of(pack, seq, Lq, Lk, offset)
    i_q = i - own.q_block0
    first_row = i_q * BLOCK_Q + part * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    valid = m < own.Lq - first_row
    h_k = (h // group).to(tl.int64)
    Hk = Hq // group
    head, key_head = b * Hq + h, b * Hk + h_k
    d, dv = tl.arange(0, TYPES.BLOCK_D), tl.arange(0, BLOCK_DV)

    # Scalars carry what may pass 2^31; vectors, of which each costs registers, do not.
    token = wide(own.q_row0 + first_row)
    q_at = q.data + b * q.strides.b + wide(h) * q.strides.h + token * q.strides.n
    q_at += m[:, None] * q.strides.n + d[None, :]
    tokens = head * Lq + token
    factor = tl.full([BLOCK_M], scale_log2, tl.float32)
    # own_q [BLOCK_M, BLOCK_D]
    if CODED:
        own_q = tl.load(q_at, mask=valid[:, None], other=0)
        factor *= tl.load(q.scale + tokens + m, mask=valid, other=0.0)
        if HOW.NEGATE:
            own_q = (0 - own_q.to(tl.int32)).to(tl.int8)
    else:
        own_q = tl.load(q_at, mask=valid[:, None] & (d < TYPES.D)[None, :], other=0.0)
        size = tl.max(tl.abs(own_q.to(tl.float32)), 1)
        # A sum tells NaN, which a maximum may not.
        odd = tl.sum(own_q.to(tl.float32) * 0.0, 1) + size * 0.0
        factor += odd
        own_q = as_held(own_q, TYPES)
        if HOW.NEGATE:
            own_q = (0.0 - own_q.to(tl.float32)).to(TYPES.HELD)

    row = head * n_q + i
    if not HOW.FILTERS:  # not kept in registers until the end
        tl.store(tensors.pv_skips + row * PARTS + part, 0)
    block_list = tensors.block_lists + row * n_k
    count = tl.load(tensors.counts + row)
    limit = own.Lk
    if HOW.CAUSAL:
        limit = tl.minimum(own.Lk, i_q * BLOCK_Q + own.offset + 1)
    if HOW.MASK:
        full = tl.load(tensors.n_full + row)
    else:
        # Only the last three blocks of an ascending list may be cut: by the diagonal of 128 rows
        # or by the end of the keys. Scalar loads: a bound that comes from a reduction looks
        # divergent to Triton before 3.9, which then spills.
        full = count
        for back in tl.static_range(1, 4):
            listed = count - back >= 0
            block = tl.load(block_list + count - back, mask=listed, other=0)
            full -= (listed & ((block + 1) * BLOCK_K > limit)).to(tl.int32)

    keys = keys_of_head(k, mask, own, h, h_k, b, key_head * n_blocks_k)
    v_base = v.data + b * v.strides.b + h_k * v.strides.h
    v_logs = v.scale
    if FAST:  # padded to whole blocks, as codes of k are
        v_base += own.k_block0 * BLOCK_K
        v_logs = v.scale + key_head * n_blocks_k + own.k_block0
    else:
        v_base += wide(own.k_row0) * v.strides.n
    if pack.table is not None:
        headroom *= own.octaves.to(tl.float32)
    skip_from = 0.0
    if HOW.FILTERS:
        skip_from = tl.load(tensors.pv_skip + h)

    lowest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = Sums(
        row_max=lowest,
        # A query that is not finite makes its row NaN, whatever it attends.
        row_sum=factor * 0.0,
        acc=tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        unit=lowest,
        top=lowest,
        n_skips=0,
    )
    rows = first_row + m
    n_groups = tl.cdiv(tl.minimum(tl.maximum(own.Lq - first_row, 0), BLOCK_M), ROW_GROUP)
    queries = Queries(own_q, factor, rows, valid, n_groups)
    values = Rows(v_base, v_logs, v.strides)
    blocks = Blocks(keys, values, block_list, headroom, pv_skip=skip_from)
    sums = walk_blocks(sums, queries, blocks, 0, full, rows, TYPES, VALUES, HOW, MASKED=False)
    # Made here, not to take registers before.
    last_key = rows * 0 + own.Lk - 1
    if HOW.CAUSAL:
        last_key = tl.minimum(rows + own.offset, last_key)
    sums = walk_blocks(
        sums, queries, blocks, full, count, last_key, TYPES, VALUES, HOW, MASKED=True
    )
    if FAST:
        # From units of its own to that of row_sum.
        unit = tl.where(sums.row_max == float("-inf"), 0.0, sums.unit)
        acc = sums.acc * tl.math.exp2(unit)[:, None]
        row_max = sums.row_max + headroom
        sums = Sums(row_max, sums.row_sum, acc, sums.unit, sums.top, sums.n_skips)
    if HOW.POOL_GROUP:
        PER_BLOCK: tl.constexpr = BLOCK_K // HOW.POOL_GROUP
        first = key_head * (n_blocks_k * PER_BLOCK)
        first += own.k_block0 * PER_BLOCK
        entry_scale = pooled.scale
        if CODED:
            entry_scale = pooled.scale + first
        entries = PooledEntries(
            k=pooled.k + first * TYPES.BLOCK_D,
            v=pooled.v + first * BLOCK_DV,
            scale=entry_scale,
            blocks=pooled.blocks + row * n_k,
        )
        n_entries = tl.cdiv(tl.maximum(limit, 0), HOW.POOL_GROUP)
        sums = walk_pooled(
            sums, queries, entries, keys.k.scale, n_entries, own.Lk, headroom, TYPES, VALUES, HOW
        )

    nothing = sums.row_sum == 0.0
    # Values that are not finite leave sums that are not: the whole row is NaN.
    broken = tl.max((tl.abs(sums.acc) < float("inf")).to(tl.int32) ^ 1, 1) != 0
    row_sum = tl.where(broken, float("nan"), sums.row_sum)
    average = sums.acc / tl.where(nothing, 1.0, row_sum)[:, None]  # [BLOCK_M, BLOCK_DV]
    average = tl.where(average > HOW.OUT_MOST, HOW.OUT_MOST, average)
    average = tl.where(average < -HOW.OUT_MOST, -HOW.OUT_MOST, average)
    out_at = tensors.out + b * out_strides.b + wide(h) * out_strides.h + token * out_strides.n
    tl.store(
        out_at + m[:, None] * out_strides.n + dv[None, :],
        average.to(tensors.out.dtype.element_ty),
        mask=valid[:, None] & (dv < VALUES.DV)[None, :],
    )
    row_lse = (sums.row_max + tl.math.log2(row_sum)) * LN2
    if CODED:
        row_lse += tl.load(tensors.lse_shift + tokens + m, mask=valid, other=0.0)
    row_lse = tl.where(nothing, float("-inf"), row_lse)
    tl.store(tensors.lse + tokens + m, row_lse, mask=valid)
    if HOW.FILTERS:
        tl.store(tensors.pv_skips + row * PARTS + part, sums.n_skips)


def attend(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    """Heads that an error budget raised run in the caller's own precision, by a second launch: both
    look at the flags on the device."""
    queries, keys = prepared.queries, keys_of(prepared)
    ascending, pooled = call.recipe.pv_skip is not None, keys.entries is not None
    lists = lists_of(plan, tokens, ascending=ascending, pooled=pooled)
    if plan.measured is None or not call.recipe.quantized:
        return attend_lists(call, queries, keys, lists, tokens)
    assert queries.own is not None
    assert keys.raised is not None
    flags = raised_heads(plan.measured).view(call.Hk, -1).any(1).to(torch.uint8)
    done = attend_lists(call, queries, keys, lists, tokens, raised=flags, which=NOT_RAISED)
    again = attend_lists(
        in_own_precision(call),
        PreparedQueries(queries.own),
        keys.raised,
        lists,
        tokens,
        into=(done.out, done.lse),
        raised=flags,
        which=RAISED,
    )
    of_heads = flags.repeat_interleave(call.Hq // call.Hk)[:, None] != 0
    return done._replace(pv_skips=torch.where(of_heads, again.pv_skips, done.pv_skips))


def attend_lists(
    call: Call,
    queries: PreparedQueries,
    keys: KeysOnDevice,
    lists: Lists,
    tokens: TokenMask,
    *,
    into: tuple[Tensor, Tensor] | None = None,
    raised: Tensor | None = None,
    which: int = EVERY_HEAD,
) -> Attended:
    """One launch over the lists of every query block, with smaller tiles for as long as the kernel
    does not fit the card. into: out and lse to be written, made here by default."""
    recipe, counts, packed = call.recipe, lists.counts, keys.packed
    sizes = sizes_of(call, packed, tokens.offset)
    if into is None:
        out = counts.new_empty((call.B, call.Hq, call.Lq, call.Dv), dtype=call.dtype)
        into = out, counts.new_empty((call.B, call.Hq, call.Lq), dtype=torch.float32)
    out, lse = into
    filters, filter_from = recipe.pv_skip is not None, None
    if filters:
        filter_from = per_head(
            recipe.pv_skip, call.Hq, math.inf, LOG2E, torch.float32, counts.device
        )
    q, k, mask = query_rows(call, queries), key_rows(call, keys), mask_of(tokens)
    values, value_types = value_rows(call, keys)
    if values.scale is not None:  # 8-bit values are summed in units of a power of two
        values = values._replace(scale=keys.v_logs)
    while True:
        tiles = tiles_of(call)
        skips = counts.new_empty((*counts.shape, tiles.programs))
        try:
            launch(
                attend_blocks,
                (sizes.n_q * tiles.programs, call.Hq, call.B),
                tiles.options,
                tensors=Tensors(
                    q=q.data,
                    k=k.data,
                    v=values.data,
                    out=out,
                    lse=lse,
                    q_scale=q.scale,
                    k_scale=k.scale,
                    v_scale=values.scale,
                    lse_shift=queries.lse_shift,
                    counts=counts,
                    block_lists=lists.blocks,
                    n_full=lists.n_full,
                    pv_skips=skips,
                    pv_skip=filter_from,
                    mask=mask.data,
                    pooled=pooled_entries(call, keys, lists.pools),
                    raised=raised,
                    pack=packed.of_queries,
                ),
                q_strides=q.strides,
                k_strides=k.strides,
                v_strides=values.strides,
                out_strides=Strides(*out.stride()[:3]),
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
                    POOL_GROUP=0 if keys.entries is None else keys.entries.group,
                    OUT_MOST=most_of(call.dtype),
                    NEGATE=call.scale < 0,
                    CAUSAL=hides(tokens, packed),
                    MASK=mask_kind(tokens),
                    FILTERS=filters,
                    RAISED=which,
                ),
            )
        except DoesNotFit:
            if not _shrink(call):
                raise
        else:
            break
    skips = skips[..., 0] if tiles.programs == 1 else skips.sum(-1, dtype=torch.int32)
    return Attended(out, lse, skips)


def _headroom(call: Call, packed: Packed) -> float:
    """By how many octaves weights are lowered, so that no sum of values overflows fp32; of a pack,
    1 for what its table says of each sequence. Sums of fp16 values cannot overflow."""
    if call.dtype == torch.float16:
        return 0.0
    return 1.0 if packed else float((call.Lk - 1).bit_length())


_smaller: dict[tuple[str, Tiles], Tiles] = {}
"""By architecture, what is launched in place of tiles that did not fit a card. The table was
compiled for, so only a card with less shared memory than its architecture gets here."""


def tiles_of(call: Call) -> Tiles:
    """The tiles that a call is attended in on its card."""
    found, recipe = architecture(call), call.recipe
    tiles = found.tiles_for(
        recipe.precision,
        max(call.D, call.Dv),
        filters=recipe.pv_skip is not None,
        masked=call.has_mask,
        uneven=call.D % 16 != 0 or call.Dv % 16 != 0,
    )
    while (found.name, tiles) in _smaller:
        tiles = _smaller[found.name, tiles]
    return tiles


def _shrink(call: Call) -> bool:
    """Have smaller tiles from now on, if there are any."""
    now = tiles_of(call)
    less = now.smaller()
    if less is not None:
        _smaller[architecture(call).name, now] = less
    return less is not None
