"""The walk of one program over its blocks: what attend_kernel.py is made of.

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

import triton
import triton.language as tl

BLOCK_Q, BLOCK_K, ROW_GROUP = tl.constexpr(128), tl.constexpr(64), tl.constexpr(16)
NO_MASK, BOOL_MASK, BIAS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KEEP_ALL_GROUPS, ZERO_GROUPS, BRANCH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def wide(x):
    """A whole number as int64: products of positions and strides pass 2^31 on long sequences."""
    return x * tl.full([], 1, tl.int64)


@triton.jit
def sequence_of(seqs, seq, Lq, Lk, offset, PACKED: tl.constexpr):
    """`(first query row, Lq, first key row, Lk, first query block, first key block, offset)`."""
    if PACKED:
        own = seqs + seq * 8
        return (
            tl.load(own),
            tl.load(own + 1),
            tl.load(own + 2),
            tl.load(own + 3),
            tl.load(own + 4),
            tl.load(own + 5),
            tl.load(own + 6),
        )
    return 0, Lq, 0, Lk, 0, 0, offset


@triton.jit
def as_held(x, HELD: tl.constexpr, MOST: tl.constexpr):
    """Numbers in the type that they are multiplied in; beyond its range, its largest."""
    if x.dtype == HELD:
        return x
    if tl.float32 == HELD:
        return x.to(tl.float32)
    x = x.to(tl.float32)
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, tl.minimum(tl.maximum(x, -MOST), MOST), x).to(HELD)


@triton.jit
def masked_scores(x, factor, given, keep, MASK: tl.constexpr):
    """`(x, factor, keep)`, -inf where a pair may not attend; with a bias, x holds whole scores."""
    if MASK == BOOL_MASK:
        keep = keep & (given != 0)
    if MASK == BIAS:
        bias = given.to(tl.float32)
        keep = keep & (bias != float("-inf"))
        x = x * factor[:, None] + bias * LOG2E
        # A bias as low as the dtype goes is a number, not a mask, and must stay one.
        x = tl.where(x < LOWEST, LOWEST, x)
        factor = tl.full(factor.shape, 1.0, tl.float32)
    else:
        factor = tl.where(factor == 0.0, 1e-37, factor)  # zero would turn -inf into NaN
    return tl.where(keep, x, float("-inf")), factor, keep


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def groups_alive(row_max, block_max, valid, pv_skip, BLOCK_M: tl.constexpr):
    """Row groups that the second filter does not skip, a bit for each; rows past the end agree to
    anything."""
    least = tl.zeros([BLOCK_M], tl.float32) + pv_skip
    low = (row_max - block_max >= least) & (least < float("inf"))
    needs = (low == 0) & valid
    own_bit = 1 << (tl.arange(0, BLOCK_M) // ROW_GROUP)
    return tl.reduce(tl.where(needs, own_bit, 0), 0, either)


@triton.jit
def count_bits(bits, BLOCK_M: tl.constexpr):
    return tl.sum((bits >> tl.arange(0, BLOCK_M // ROW_GROUP)) & 1, 0)


@triton.jit
def larger(row_max, block_max, STICKY: tl.constexpr):
    """The new maximum. STICKY: once NaN, by a bias, it stays NaN, and the row skips no more."""
    if STICKY:
        new = tl.maximum(row_max, block_max, propagate_nan=tl.PropagateNan.ALL)
    else:
        new = tl.maximum(row_max, block_max)
    return new


@triton.jit
def add_tile(
    x, factor, block_max, v, row_max, row_sum, acc, dead, alive,
    GUARD: tl.constexpr, STICKY: tl.constexpr, SKIP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile into `(row_max, row_sum, acc)`. GUARD: a row may have no key yet. SKIP: rows in
    `dead` add nothing, and with BRANCH a tile without a group `alive` is not multiplied with V."""
    new_max = larger(row_max, block_max, STICKY)
    shift = new_max
    if GUARD:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    fade = tl.math.exp2(row_max - shift)
    p = tl.math.exp2(x * factor[:, None] - shift[:, None])
    if SKIP != KEEP_ALL_GROUPS:
        p = tl.where(dead[:, None], 0.0, p)
    row_sum = row_sum * fade + tl.sum(p, 1)
    if SKIP == BRANCH:
        if alive != 0:
            acc = add_products(p, v, acc * fade[:, None], EXACT)
    else:
        acc = add_products(p, v, acc * fade[:, None], EXACT)
    return new_max, row_sum, acc


@triton.jit
def add_products(p, v, acc, EXACT: tl.constexpr):
    if EXACT != "":
        acc = tl.dot(p, v, acc, input_precision=EXACT)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc


@triton.jit
def add_fp8_tile(
    x, factor, block_max, v, v_log, row_max, row_sum, acc, unit, top, headroom, dead,
    GUARD: tl.constexpr, STICKY: tl.constexpr, SKIP: tl.constexpr, P_LOG: tl.constexpr,
):  # fmt: skip
    """The same with 8-bit P and V; `acc` is in units of 2^unit of those of row_sum, for each row.

    P has a scale of its own in each row and block, so that blocks far below the row's maximum keep
    their digits. The unit follows that scale and the scale of V, 2^v_log, so that one fused
    multiply-add a number joins a block to the sum; in fp32, because matrix units add 8-bit products
    in fewer digits. Blocks 2^60 below the largest unit seen, `top`, do not lower it further.
    """
    new_max = larger(row_max, block_max, STICKY)
    shift = new_max
    if GUARD:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    low = shift + headroom
    drop = row_max + headroom - low
    unit, top = unit + drop, top + drop
    # Codes up to the largest; where scores are so large that this is lost in rounding, up to 1.
    own = block_max - P_LOG
    room = block_max - own
    own = tl.where((room >= 0.0) & (room <= P_LOG + 0.01), own, block_max)
    own = tl.maximum(own, low + (top - 60.0 - v_log))
    if GUARD:
        kept = tl.where(unit == float("-inf"), 0.0, unit - v_log)
        kept = tl.minimum(tl.maximum(kept, -100.0), 100.0)
        own = tl.where(block_max == float("-inf"), low + kept, own)
    p = tl.math.exp2(x * factor[:, None] - own[:, None])
    if SKIP != KEEP_ALL_GROUPS:
        p = tl.where(dead[:, None], 0.0, p)
    above = own - low
    row_sum = row_sum * tl.math.exp2(drop) + tl.sum(p, 1) * tl.math.exp2(above)
    new_unit = above + v_log
    join = unit - new_unit
    if GUARD:
        join = tl.minimum(join, 100.0)  # nothing was summed yet where it is larger
    join = tl.math.exp2(join)
    acc = acc * join[:, None] + tl.dot(p.to(v.dtype), v, max_num_imprecise_acc=BLOCK_K)
    return new_max, row_sum, acc, new_unit, tl.maximum(top, new_unit)


@triton.jit
def load_values(
    v_base, v_scale, i_k, left, stride_vn, stride_vd,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr,
    FAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`(values of a key block [64, BLOCK_DV], log2 of their scale)`; fp8 is held transposed and
    padded."""
    n, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_DV)
    if FAST:
        v = tl.load(v_base + i_k * BLOCK_K + dv[:, None] * stride_vd + n[None, :]).T
        scale = tl.load(v_scale + i_k)
    else:
        at = v_base + wide(i_k) * wide(BLOCK_K * stride_vn)
        at += n[:, None] * stride_vn + dv[None, :]
        if MASKED:
            v = tl.load(at, mask=(n < left)[:, None] & (dv < DV)[None, :], other=0.0)
        elif DV != BLOCK_DV:
            v = tl.load(at, mask=(dv < DV)[None, :], other=0.0)
        else:
            v = tl.load(at)
        v = as_held(v, HELD, MOST)
        scale = 0.0
    return v, scale


@triton.jit
def load_keys(
    k_base, i_k, left, stride_kn, D: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
    MOST: tl.constexpr, CODED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys of a block, transposed `[BLOCK_D, 64]`; codes are padded to whole blocks."""
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    if CODED:
        k = tl.load(k_base + i_k * (BLOCK_K * BLOCK_D) + n[None, :] * BLOCK_D + d[:, None])
    else:
        at = k_base + wide(i_k) * wide(BLOCK_K * stride_kn) + n[None, :] * stride_kn + d[:, None]
        if MASKED:
            k = tl.load(at, mask=(n < left)[None, :] & (d < D)[:, None], other=0.0)
        elif D != BLOCK_D:
            k = tl.load(at, mask=(d < D)[:, None], other=0.0)
        else:
            k = tl.load(at)
        k = as_held(k, HELD, MOST)
    return k


@triton.jit
def products(q, k, CODED: tl.constexpr, EXACT: tl.constexpr):
    if CODED:
        x = tl.dot(q, k, out_dtype=tl.int32)
    elif EXACT != "":
        x = tl.dot(q, k, input_precision=EXACT)
    else:
        x = tl.dot(q, k)
    return x


@triton.jit
def walk_blocks(
    q, factor, row_max, row_sum, acc, unit, top, n_skips, k_base, v_base, k_scale, v_scale,
    mask_base, block_list, start, stop, rows, valid, n_groups, Lk, last_key, headroom, pv_skip,
    stride_kn, stride_vn, stride_vd, stride_mm, stride_mn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr, P_LOG: tl.constexpr,
    CODED: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, SKIP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Listed blocks `start … stop - 1`. MASKED: pairs are hidden, by the end of the keys, the
    diagonal (`last_key` of each row) or the caller's mask. The index of the next block is loaded
    one iteration ahead and V outside of every branch: both keep the loads of K and V pipelined.
    Masked blocks are not: at most three are cut without a mask of the caller's, and the tiles of
    a mask would take more shared memory than cards have."""
    n = tl.arange(0, BLOCK_K)
    GUARD: tl.constexpr = MASKED and (CAUSAL or MASK != NO_MASK)
    i_k = tl.load(block_list + start, mask=start < stop, other=0)
    for at in tl.range(start, stop, num_stages=1 if MASKED else None):
        first_key = i_k * BLOCK_K
        left = Lk - first_key
        k = load_keys(k_base, i_k, left, stride_kn, D, BLOCK_D, HELD, MOST, CODED, MASKED)
        own_scale = tl.load(k_scale + i_k)
        v, v_log = load_values(
            v_base, v_scale, i_k, left, stride_vn, stride_vd,
            DV, BLOCK_DV, HELD, MOST, FAST, MASKED,
        )  # fmt: skip
        given = 0
        if MASKED and MASK != NO_MASK:
            m_at = mask_base + rows[:, None].to(tl.int64) * stride_mm
            m_at += (first_key + n[None, :]).to(tl.int64) * stride_mn
            given = tl.load(m_at, mask=(n < left)[None, :] & valid[:, None], other=0)
        i_k = tl.load(block_list + at + 1, mask=at + 1 < stop, other=0)
        x = products(q, k, CODED, EXACT)
        own = factor * own_scale
        if MASKED:
            # One comparison for each pair: `last_key` is the diagonal's or the last one.
            keep = (first_key + n)[None, :] <= last_key[:, None]
            x, own, keep = masked_scores(x.to(tl.float32), own, given, keep, MASK)
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
            row_sum += tl.where(lost, float("nan"), own_scale * 0.0)
        else:
            block_max = tl.max(x, 1).to(tl.float32) * own
            x = x.to(tl.float32)
        if not FAST:
            block_max += headroom
        dead, alive = row_max, 1
        if SKIP != KEEP_ALL_GROUPS:
            alive = groups_alive(row_max, block_max, valid, pv_skip, BLOCK_M)
            dead = ((alive >> (tl.arange(0, BLOCK_M) // ROW_GROUP)) & 1) == 0
            n_skips += n_groups - count_bits(alive, BLOCK_M)
        if FAST:
            row_max, row_sum, acc, unit, top = add_fp8_tile(
                x, own, block_max, v, v_log, row_max, row_sum, acc, unit, top, headroom, dead,
                GUARD, MASK == BIAS, SKIP, P_LOG,
            )  # fmt: skip
        else:
            row_max, row_sum, acc = add_tile(
                x, own, block_max, v, row_max, row_sum, acc, dead, alive,
                GUARD, MASK == BIAS, SKIP, EXACT,
            )  # fmt: skip
    return row_max, row_sum, acc, unit, top, n_skips


@triton.jit
def walk_pooled(
    q, factor, row_max, row_sum, acc, k_base, v_base, pooled_scale, k_scale, pools, n_entries, Lk,
    headroom, GROUP: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CODED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Pooled entries of skipped open blocks, ENTRIES at a time: scale and size of each need
    registers. A tile without any is not computed."""
    n, d, dv = tl.arange(0, ENTRIES), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    PER_BLOCK: tl.constexpr = BLOCK_K // GROUP
    last = (Lk - 1) // GROUP  # the one entry that may stand for fewer keys
    last_log = tl.math.log2((Lk - last * GROUP).to(tl.float32))
    whole_log = tl.math.log2(GROUP * 1.0)
    for first in tl.range(0, n_entries, ENTRIES, num_stages=1):
        entry = first + n
        there = entry < n_entries
        block = entry
        if PER_BLOCK > 1:
            block = entry // PER_BLOCK
        pooled = tl.load(pools + block, mask=there, other=0) != 0
        if tl.max(pooled.to(tl.int32), 0) != 0:
            k = tl.load(
                k_base + entry[None, :] * BLOCK_D + d[:, None], mask=there[None, :], other=0
            )
            if CODED:
                own_scale = tl.load(pooled_scale + entry, mask=there, other=0.0)
            else:
                own_scale = tl.load(k_scale + block, mask=there, other=0.0)
            x = products(q, k, CODED, EXACT).to(tl.float32) * factor[:, None]
            x = x * own_scale[None, :] + tl.where(entry == last, last_log, whole_log)[None, :]
            x = tl.where(pooled[None, :], x, float("-inf"))
            v = tl.load(
                v_base + entry[:, None] * BLOCK_DV + dv[None, :], mask=there[:, None], other=0
            )
            row_max, row_sum, acc = add_tile(
                x, tl.full(factor.shape, 1.0, tl.float32), tl.max(x, 1) + headroom, v, row_max,
                row_sum, acc, row_max, 1, True, False, KEEP_ALL_GROUPS, EXACT,
            )  # fmt: skip
    return row_max, row_sum, acc
