"""The walk of one program over its blocks, and the scores of single rows.

    for each full block, then each partial one (masked), then the pooled entries of skipped blocks:
        x         = q · kᵀ                          int32, or fp32
        block_max = max(x) · factor + headroom      factor = scale · log2(e) · q_scale · k_scale
        p         = 2^(x · factor - row_max)
        row_sum   = row_sum · 2^(old - new row_max) + Σ p
        acc       = acc     · 2^(old - new row_max) + p · V

The factor is applied inside the exponent, after the maximum: it is never negative. A factor of NaN
marks a query or a block that is not finite. `headroom` keeps sums of values at the end of fp32's
range finite; as a part of the maximum it is rounded once, and large scores lose nothing. EXACT is
"", or how fp32 is multiplied.
"""

# ruff: noqa: SIM108 - an if on a constant is resolved when the kernel is compiled
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import (
    BIAS,
    BLOCK_K,
    BOOL_MASK,
    LOG2E,
    LOWEST,
    NO_MASK,
    ROW_GROUP,
    Rows,
    View,
    as_held,
    wide,
)


class How(NamedTuple):
    """What the attention kernel is compiled for, besides types.

    BLOCK_M: query rows of a program. ENTRIES: pooled entries of a tile. POOL_GROUP: keys of an
    entry, 0 without entries. OUT_MOST: the largest number of the output's type. NEGATE: the scale
    is negative. MASK: the kind of the caller's mask. FILTERS: the second filter is on. RAISED: the
    key heads that are attended, by the flag of each: see `raised` in attend.py."""

    BLOCK_M: int
    ENTRIES: int
    POOL_GROUP: int
    OUT_MOST: float
    NEGATE: bool
    CAUSAL: bool
    MASK: int
    FILTERS: bool
    RAISED: int


class Queries(NamedTuple):
    """Rows of a program: x `[rows, BLOCK_D]`; factor of their scores, which rows of the sequence
    they are, and whether they are there, all `[rows]`; n_groups: row groups that the second filter
    counts."""

    x: Any
    factor: Any
    rows: Any
    valid: Any
    n_groups: Any


class Keys(NamedTuple):
    """Keys and mask of one head from the first key of its sequence on: k, the `Rows` with a scale
    for each key block, and the mask, a `View`."""

    k: Any
    mask: Any
    Lk: Any


class Blocks(NamedTuple):
    """The `Keys` of one head, its values, the `Rows` with log2 of the scale of each key block if
    they are fp8, and the list of blocks. pv_skip: what the second filter skips from."""

    keys: Any
    v: Any
    listed: Any
    headroom: Any
    pv_skip: Any


class Sums(NamedTuple):
    """The online softmax so far: row_max, row_sum `[BLOCK_M]`, acc `[BLOCK_M, BLOCK_DV]`. unit,
    top `[BLOCK_M]`: of 8-bit weights, see `add_fp8_tile`. n_skips: row groups skipped."""

    row_max: Any
    row_sum: Any
    acc: Any
    unit: Any
    top: Any
    n_skips: Any


@triton.jit
def under_mask(x, keep, given, MASK: tl.constexpr):
    """`(scores, keep)`: base-2 scores with the caller's mask applied, -inf where a pair may not
    attend. given: of the mask, in the shape of the scores."""
    if MASK == BOOL_MASK:
        keep = keep & (given != 0)
    if MASK == BIAS:
        bias = given.to(tl.float32)
        keep = keep & (bias != float("-inf"))
        x = x + bias * LOG2E
        # A bias as low as the dtype goes is a number, not a mask, and must stay one.
        x = tl.where(x < LOWEST, LOWEST, x)
    return tl.where(keep, x, float("-inf")), keep


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def groups_alive(row_max, block_max, valid, pv_skip, HOW: tl.constexpr):
    """Row groups that the second filter does not skip, a bit for each; rows past the end agree to
    anything."""
    least = tl.full([HOW.BLOCK_M], 0.0, tl.float32) + pv_skip
    low = (row_max - block_max >= least) & (least < float("inf"))
    needs = (low == 0) & valid
    own_bit = 1 << (tl.arange(0, HOW.BLOCK_M) // ROW_GROUP)
    return tl.reduce(tl.where(needs, own_bit, 0), 0, either)


@triton.jit
def count_bits(bits, HOW: tl.constexpr):
    return tl.sum((bits >> tl.arange(0, HOW.BLOCK_M // ROW_GROUP)) & 1, 0)


@triton.jit
def new_maximum(row_max, block_max, GUARD: tl.constexpr, STICKY: tl.constexpr):
    """`(the new maximum, what scores are lowered by)`. GUARD: a row may have no key yet. STICKY:
    once NaN, by a bias, the maximum stays NaN, and the row skips no more."""
    if STICKY:
        new = tl.maximum(row_max, block_max, propagate_nan=tl.PropagateNan.ALL)
    else:
        new = tl.maximum(row_max, block_max)
    shift = new
    if GUARD:
        shift = tl.where(new == float("-inf"), 0.0, new)
    return new, shift


@triton.jit
def add_tile(
    sums, x, factor, block_max, v, dead,
    EXACT: tl.constexpr, GUARD: tl.constexpr, STICKY: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """The `Sums` with one tile added: scores `x [BLOCK_M, n]` times `factor [BLOCK_M]`, values
    `v [n, BLOCK_DV]`. FILTERS: rows in `dead` add nothing."""
    new_max, shift = new_maximum(sums.row_max, block_max, GUARD=GUARD, STICKY=STICKY)
    fade = tl.math.exp2(sums.row_max - shift)
    p = tl.math.exp2(x * factor[:, None] - shift[:, None])  # [BLOCK_M, n]
    if FILTERS:
        p = tl.where(dead[:, None], 0.0, p)
    row_sum = sums.row_sum * fade + tl.sum(p, 1)
    acc = sums.acc * fade[:, None]
    if EXACT != "":
        acc = tl.dot(p, v, acc, input_precision=EXACT)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return Sums(new_max, row_sum, acc, sums.unit, sums.top, sums.n_skips)


@triton.jit
def add_fp8_tile(
    sums, x, factor, block_max, v, v_log, headroom, dead,
    P_LOG: tl.constexpr, GUARD: tl.constexpr, STICKY: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """The same with 8-bit P and V; `acc` is in units of 2^unit of those of row_sum, for each row.

    P has a scale of its own in each row and block, so that blocks far below the row's maximum keep
    their digits. The unit follows that scale and the scale of V, 2^v_log, so that one fused
    multiply-add a number joins a block to the sum; in fp32, because matrix units add 8-bit products
    in fewer digits. Blocks 2^60 below the largest unit seen, `top`, do not lower it further.
    """
    new_max, shift = new_maximum(sums.row_max, block_max, GUARD=GUARD, STICKY=STICKY)
    low = shift + headroom
    drop = sums.row_max + headroom - low
    unit, top = sums.unit + drop, sums.top + drop
    # Codes up to the largest; where scores are so large that this is lost in rounding, up to 1.
    own = block_max - P_LOG
    room = block_max - own
    own = tl.where((room >= 0.0) & (room <= P_LOG + 0.01), own, block_max)
    own = tl.maximum(own, low + (top - 60.0 - v_log))
    if GUARD:
        kept = tl.where(unit == float("-inf"), 0.0, unit - v_log)
        kept = tl.minimum(tl.maximum(kept, -100.0), 100.0)
        own = tl.where(block_max == float("-inf"), low + kept, own)
    p = tl.math.exp2(x * factor[:, None] - own[:, None])  # [BLOCK_M, 64]
    if FILTERS:
        p = tl.where(dead[:, None], 0.0, p)
    above = own - low
    row_sum = sums.row_sum * tl.math.exp2(drop) + tl.sum(p, 1) * tl.math.exp2(above)
    new_unit = above + v_log
    join = unit - new_unit
    if GUARD:
        join = tl.minimum(join, 100.0)  # nothing was summed yet where it is larger
    join = tl.math.exp2(join)
    acc = sums.acc * join[:, None] + tl.dot(p.to(v.dtype), v, max_num_imprecise_acc=BLOCK_K)
    return Sums(new_max, row_sum, acc, new_unit, tl.maximum(top, new_unit), sums.n_skips)


@triton.jit
def load_values(v, i_k, left, TYPES: tl.constexpr, VALUES: tl.constexpr, MASKED: tl.constexpr):
    """`(values of a key block [64, BLOCK_DV], log2 of their scale)`; fp8 is held transposed and
    padded."""
    n, dv = tl.arange(0, BLOCK_K), tl.arange(0, VALUES.BLOCK_DV)
    if v.scale is not None:
        at = v.data + i_k * BLOCK_K + dv[:, None] * v.strides.d + n[None, :]
        own = tl.load(at).T
        scale = tl.load(v.scale + i_k)
    else:
        at = v.data + wide(i_k) * wide(BLOCK_K * v.strides.n)
        at += n[:, None] * v.strides.n + dv[None, :]
        if MASKED:
            own = tl.load(at, mask=(n < left)[:, None] & (dv < VALUES.DV)[None, :], other=0.0)
        elif VALUES.DV != VALUES.BLOCK_DV:
            own = tl.load(at, mask=(dv < VALUES.DV)[None, :], other=0.0)
        else:
            own = tl.load(at)
        own = as_held(own, TYPES)
        scale = 0.0
    return own, scale


@triton.jit
def load_keys(k, i_k, left, TYPES: tl.constexpr, MASKED: tl.constexpr):
    """The keys of a block, transposed `[BLOCK_D, 64]`; codes are padded to whole blocks."""
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, TYPES.BLOCK_D)
    if k.data.dtype.element_ty == tl.int8:
        at = k.data + i_k * (BLOCK_K * TYPES.BLOCK_D)
        own = tl.load(at + n[None, :] * TYPES.BLOCK_D + d[:, None])
    else:
        at = k.data + wide(i_k) * wide(BLOCK_K * k.strides.n)
        at = at + n[None, :] * k.strides.n + d[:, None]
        if MASKED:
            own = tl.load(at, mask=(n < left)[None, :] & (d < TYPES.D)[:, None], other=0.0)
        elif TYPES.D != TYPES.BLOCK_D:
            own = tl.load(at, mask=(d < TYPES.D)[:, None], other=0.0)
        else:
            own = tl.load(at)
        own = as_held(own, TYPES)
    return own


@triton.jit
def products(q, k, TYPES: tl.constexpr):
    """`q [rows, BLOCK_D] · k [BLOCK_D, n]`, int32 of codes, else fp32."""
    if q.dtype == tl.int8:
        x = tl.dot(q, k, out_dtype=tl.int32)
    elif TYPES.EXACT != "":
        x = tl.dot(q, k, input_precision=TYPES.EXACT)
    else:
        x = tl.dot(q, k)
    return x


@triton.jit
def keys_of_head(k, mask, own, h, h_k, b, first_scale):
    """The `Keys` of one head and sequence `own`. first_scale: where the head's scales begin."""
    # Codes are padded to whole blocks; the caller's rows are not.
    CODED: tl.constexpr = k.data.dtype.element_ty == tl.int8
    first = own.k_block0 * BLOCK_K if CODED else own.k_row0
    data = k.data + b * k.strides.b + h_k * k.strides.h + wide(first) * k.strides.n
    base = mask.data
    if mask.data is not None:
        base = mask.data + b * mask.strides.b + wide(h) * mask.strides.h
    scales = k.scale + first_scale + own.k_block0
    return Keys(Rows(data, scales, k.strides), View(base, mask.strides), own.Lk)


@triton.jit
def load_rows(q, at_head, h, b, row0, rows, used, scale_log2, TYPES: tl.constexpr):
    """The `Queries` of some rows, of those `used`; a factor of NaN for a row that is not finite.
    at_head: where the scales of the head begin."""
    d = tl.arange(0, TYPES.BLOCK_D)
    token = (row0 + rows).to(tl.int64)
    base = q.data + b * q.strides.b + wide(h) * q.strides.h
    at = base + token[:, None] * q.strides.n + d[None, :]
    factor = tl.where(used, scale_log2, 0.0)
    if q.scale is not None:
        own = tl.load(at, mask=used[:, None], other=0)
        factor *= tl.load(q.scale + at_head + token, mask=used, other=0.0)
    else:
        own = tl.load(at, mask=used[:, None] & (d < TYPES.D)[None, :], other=0.0)
        factor += tl.sum(own.to(tl.float32) * 0.0, 1)
        own = as_held(own, TYPES)
    return Queries(own, factor, rows, used, 0)


@triton.jit
def score_rows(
    queries, last_key, keys, j, TYPES: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Scores of `Queries` over key block j of a head's `Keys`, base 2, `[rows, 64]`; -inf where
    masked. last_key: that the diagonal shows each row."""
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, TYPES.BLOCK_D)
    first = wide(j) * BLOCK_K
    left = keys.Lk - j * BLOCK_K
    # Not `load_keys`, whose narrow positions cost more here.
    at = keys.k.data + first * keys.k.strides.n + n[None, :] * keys.k.strides.n + d[:, None]
    if queries.x.dtype == tl.int8:
        k = tl.load(at)  # [BLOCK_D, 64]
    else:
        k = tl.load(at, mask=(n < left)[None, :] & (d < TYPES.D)[:, None], other=0.0)
        k = as_held(k, TYPES)
    x = products(queries.x, k, TYPES).to(tl.float32)
    s = x * (queries.factor * tl.load(keys.k.scale + j))[:, None]
    there = (n < left)[None, :] & queries.valid[:, None]
    keep = there
    if CAUSAL:
        keep = keep & (j * BLOCK_K + n[None, :] <= last_key[:, None])
    given = 0
    if MASK:
        at = keys.mask.data + queries.rows[:, None].to(tl.int64) * keys.mask.strides.m
        at = at + (first + n[None, :]) * keys.mask.strides.n
        given = tl.load(at, mask=there, other=0)
    s, keep = under_mask(s, keep, given, MASK)
    return s


@triton.jit
def score_row(
    q, factor, row, last_key, keys, j,
    TYPES: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The same of one row `q [BLOCK_D]`, `[64]`, without matrix products."""
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, TYPES.BLOCK_D)
    left = keys.Lk - j * BLOCK_K
    at = keys.k.data + wide(j) * wide(BLOCK_K * keys.k.strides.n)
    at = at + n[:, None] * keys.k.strides.n + d[None, :]  # [64, BLOCK_D]
    if q.dtype == tl.int32:
        x = tl.sum(tl.load(at).to(tl.int32) * q[None, :], 1).to(tl.float32)
    else:
        k = tl.load(at, mask=(n < left)[:, None] & (d < TYPES.D)[None, :], other=0.0)
        x = tl.sum(as_held(k, TYPES).to(tl.float32) * q[None, :], 1)
    s = x * (factor * tl.load(keys.k.scale + j))
    keep = n < left
    if CAUSAL:
        keep = keep & (j * BLOCK_K + n <= last_key)
    given = 0
    if MASK:
        at = keys.mask.data + wide(row) * keys.mask.strides.m
        at = at + (wide(j) * BLOCK_K + n) * keys.mask.strides.n
        given = tl.load(at, mask=n < left, other=0)
    s, keep = under_mask(s, keep, given, MASK)
    return s


@triton.jit
def walk_blocks(
    sums, queries, blocks, start, stop, last_key,
    TYPES: tl.constexpr, VALUES: tl.constexpr, HOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The `Sums` over listed blocks `start … stop - 1`. MASKED: pairs are hidden, by the end of the
    keys, the diagonal (`last_key [BLOCK_M]`) or the caller's mask. The index of the next block is
    loaded one iteration ahead and V outside of every branch: both keep the loads of K and V
    pipelined. Masked blocks are not: at most three are cut without a mask of the caller's, and the
    tiles of a mask would take more shared memory than cards have."""
    MASK: tl.constexpr = HOW.MASK
    GUARD: tl.constexpr = MASKED and (HOW.CAUSAL or HOW.MASK != NO_MASK)
    STICKY: tl.constexpr = HOW.MASK == BIAS
    FILTERS: tl.constexpr = HOW.FILTERS
    P_LOG: tl.constexpr = VALUES.P_LOG
    EXACT: tl.constexpr = TYPES.EXACT
    FAST: tl.constexpr = blocks.v.scale is not None
    k_rows, mask = blocks.keys.k, blocks.keys.mask
    n = tl.arange(0, BLOCK_K)
    i_k = tl.load(blocks.listed + start, mask=start < stop, other=0)
    for at in tl.range(start, stop, num_stages=1 if MASKED else None):
        first_key = i_k * BLOCK_K
        left = blocks.keys.Lk - first_key
        k = load_keys(k_rows, i_k, left, TYPES, MASKED=MASKED)  # [BLOCK_D, 64]
        own_scale = tl.load(k_rows.scale + i_k)
        v, v_log = load_values(blocks.v, i_k, left, TYPES, VALUES, MASKED=MASKED)  # [64, BLOCK_DV]
        given = 0
        if MASKED and MASK != NO_MASK:
            m_at = mask.data + queries.rows[:, None].to(tl.int64) * mask.strides.m
            m_at += (first_key + n[None, :]).to(tl.int64) * mask.strides.n  # [BLOCK_M, 64]
            given = tl.load(m_at, mask=(n < left)[None, :] & queries.valid[:, None], other=0)
        i_k = tl.load(blocks.listed + at + 1, mask=at + 1 < stop, other=0)
        x = products(queries.x, k, TYPES)  # [BLOCK_M, 64]
        own = queries.factor * own_scale
        if MASKED:
            # One comparison for each pair: `last_key` is the diagonal's or the last one.
            keep = (first_key + n)[None, :] <= last_key[:, None]
            x = x.to(tl.float32)
            if MASK == BIAS:  # x becomes whole scores
                x = x * own[:, None]
                own = tl.full(own.shape, 1.0, tl.float32)
            else:
                own = tl.where(own == 0.0, 1e-37, own)  # zero would turn -inf into NaN
            x, keep = under_mask(x, keep, given, MASK)
            block_max = tl.max(x, 1) * own
            if MASK == BIAS:  # a maximum may not see NaN, and the second filter must
                odd = tl.max((keep & (x != x)).to(tl.int32), 1) != 0
                block_max = tl.where(odd, float("nan"), block_max)
            # Rows that keep a block which is not finite are NaN, and so are those whose every
            # score overflowed.
            lost = block_max == float("-inf")
            if MASK != NO_MASK:
                lost = lost & (tl.max(keep.to(tl.int32), 1) != 0)
            else:
                # Not `first_key <= last_key`, which would be kept in registers through both loops.
                lost = lost & (last_key - first_key >= 0)
            row_sum = sums.row_sum + tl.where(lost, float("nan"), own_scale * 0.0)
            sums = Sums(sums.row_max, row_sum, sums.acc, sums.unit, sums.top, sums.n_skips)
        else:
            block_max = tl.max(x, 1).to(tl.float32) * own
            x = x.to(tl.float32)
        if not FAST:
            block_max += blocks.headroom
        dead = sums.row_max
        if FILTERS:
            alive = groups_alive(sums.row_max, block_max, queries.valid, blocks.pv_skip, HOW)
            dead = ((alive >> (tl.arange(0, HOW.BLOCK_M) // ROW_GROUP)) & 1) == 0
            n_skips = sums.n_skips + (queries.n_groups - count_bits(alive, HOW))
            sums = Sums(sums.row_max, sums.row_sum, sums.acc, sums.unit, sums.top, n_skips)
        if FAST:
            sums = add_fp8_tile(
                sums, x, own, block_max, v, v_log, blocks.headroom, dead,
                P_LOG=P_LOG, GUARD=GUARD, STICKY=STICKY, FILTERS=FILTERS,
            )  # fmt: skip
        else:
            sums = add_tile(
                sums, x, own, block_max, v, dead,
                EXACT=EXACT, GUARD=GUARD, STICKY=STICKY, FILTERS=FILTERS,
            )  # fmt: skip
    return sums


@triton.jit
def walk_pooled(
    sums, queries, pooled, k_scales, n_entries, Lk, headroom,
    TYPES: tl.constexpr, VALUES: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The `Sums` with pooled entries of skipped open blocks, ENTRIES at a time: scale and size of
    each need registers. A tile without any is not computed. pooled: entries of this head, and
    which of its key blocks are pooled."""
    GROUP: tl.constexpr = HOW.POOL_GROUP
    ENTRIES: tl.constexpr = HOW.ENTRIES
    BLOCK_D: tl.constexpr = TYPES.BLOCK_D
    BLOCK_DV: tl.constexpr = VALUES.BLOCK_DV
    EXACT: tl.constexpr = TYPES.EXACT
    PER_BLOCK: tl.constexpr = BLOCK_K // GROUP
    n, d, dv = tl.arange(0, ENTRIES), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    last = (Lk - 1) // GROUP  # the one entry that may stand for fewer keys
    last_log = tl.math.log2((Lk - last * GROUP).to(tl.float32))
    whole_log = tl.math.log2(GROUP * 1.0)
    for first in tl.range(0, n_entries, ENTRIES, num_stages=1):
        entry = first + n
        there = entry < n_entries
        block = entry
        if PER_BLOCK > 1:
            block = entry // PER_BLOCK
        is_pooled = tl.load(pooled.blocks + block, mask=there, other=0) != 0
        if tl.max(is_pooled.to(tl.int32), 0) != 0:
            # k [BLOCK_D, ENTRIES], x [BLOCK_M, ENTRIES], v [ENTRIES, BLOCK_DV]
            k_at = pooled.k + entry[None, :] * BLOCK_D + d[:, None]
            k = tl.load(k_at, mask=there[None, :], other=0)
            if pooled.scale is not None:
                own_scale = tl.load(pooled.scale + entry, mask=there, other=0.0)
            else:
                own_scale = tl.load(k_scales + block, mask=there, other=0.0)
            x = products(queries.x, k, TYPES).to(tl.float32) * queries.factor[:, None]
            x = x * own_scale[None, :] + tl.where(entry == last, last_log, whole_log)[None, :]
            x = tl.where(is_pooled[None, :], x, float("-inf"))
            v_at = pooled.v + entry[:, None] * BLOCK_DV + dv[None, :]
            v = tl.load(v_at, mask=there[:, None], other=0)
            ones = tl.full(queries.factor.shape, 1.0, tl.float32)
            sums = add_tile(
                sums, x, ones, tl.max(x, 1) + headroom, v, sums.row_max,
                EXACT=EXACT, GUARD=True, STICKY=False, FILTERS=False,
            )  # fmt: skip
    return sums
