"""Online softmax over the kept blocks: one program for `BLOCK_M` rows of a query block of a head.

    out = acc / row_sum,  lse = ln2 · (row_max + log2 row_sum) + lse_shift

after a walk over full blocks, partial blocks and pooled entries (attend_tiles.py). Rows with
nothing to attend give zeros and -inf; a row that is not finite, or keeps a block that is not, NaN.
"""

# ruff: noqa: SIM102 - an if on a constant is resolved when the kernel is compiled
from __future__ import annotations

import triton
import triton.language as tl

from .attend_tiles import (
    BLOCK_K,
    BLOCK_Q,
    KEEP_ALL_GROUPS,
    ROW_GROUP,
    as_held,
    sequence_of,
    walk_blocks,
    walk_pooled,
    wide,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset"])
def attend_blocks(
    q, k, v, out, lse, q_scale, k_scale, v_scale, lse_shift, counts, block_lists, n_full, pv_skips,
    pv_skip, mask, pooled_k, pooled_v, pooled_scale, pools, raised, seqs, seq_of_block, stride_qb,
    stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_vd, stride_ob, stride_oh, stride_om, stride_mb, stride_mh, stride_mm, stride_mn, Hq,
    group, Lq, Lk, n_q, n_k, n_blocks_k, offset, scale_log2, headroom,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr, OUT_MOST: tl.constexpr,
    P_LOG: tl.constexpr, NEGATE: tl.constexpr, CODED: tl.constexpr, FAST: tl.constexpr,
    EXACT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SKIP: tl.constexpr,
    POOL_GROUP: tl.constexpr, ENTRIES: tl.constexpr, RAISED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The whole of one program. `block_lists [.., n_q, n_k]`: full blocks, then partial ones."""
    PARTS: tl.constexpr = BLOCK_Q // BLOCK_M
    # Late query blocks have the most keys under a diagonal: they go first.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    i, part = pid // PARTS, pid % PARTS
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if RAISED != 0:
        if (tl.load(raised + h // group) != 0) != (RAISED == 2):
            return
    seq = 0
    if PACKED:
        seq = tl.load(seq_of_block + i)
    q_row0, own_Lq, k_row0, own_Lk, q_block0, k_block0, own_offset = sequence_of(
        seqs, seq, Lq, Lk, offset, PACKED
    )
    i_q = i - q_block0
    first_row = i_q * BLOCK_Q + part * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    valid = m < own_Lq - first_row
    h_k = (h // group).to(tl.int64)
    Hk = Hq // group
    head, key_head = b * Hq + h, b * Hk + h_k
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)

    # Scalars carry what may pass 2^31; vectors, of which each costs registers, do not.
    token = wide(q_row0 + first_row)
    q_at = q + b * stride_qb + wide(h) * stride_qh + token * stride_qm
    q_at += m[:, None] * stride_qm + d[None, :]
    tokens = head * Lq + token
    factor = tl.full([BLOCK_M], scale_log2, tl.float32)
    if CODED:
        own_q = tl.load(q_at, mask=valid[:, None], other=0)
        factor *= tl.load(q_scale + tokens + m, mask=valid, other=0.0)
        if NEGATE:
            own_q = (0 - own_q.to(tl.int32)).to(tl.int8)
    else:
        own_q = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
        size = tl.max(tl.abs(own_q.to(tl.float32)), 1)
        # A sum tells NaN, which a maximum may not.
        odd = tl.sum(own_q.to(tl.float32) * 0.0, 1) + size * 0.0
        factor += odd
        own_q = as_held(own_q, HELD, MOST)
        if NEGATE:
            own_q = (0.0 - own_q.to(tl.float32)).to(HELD)

    row = head * n_q + i
    if SKIP == KEEP_ALL_GROUPS:  # not kept in registers until the end
        tl.store(pv_skips + row * PARTS + part, 0)
    block_list = block_lists + row * n_k
    count = tl.load(counts + row)
    limit = own_Lk
    if CAUSAL:
        limit = tl.minimum(own_Lk, i_q * BLOCK_Q + own_offset + 1)
    if MASK:
        full = tl.load(n_full + row)
    else:
        # Only the last three blocks of an ascending list may be cut: by the diagonal of 128 rows
        # or by the end of the keys. Scalar loads: a bound that comes from a reduction looks
        # divergent to Triton before 3.9, which then spills.
        full = count
        for back in tl.static_range(1, 4):
            listed = count - back >= 0
            block = tl.load(block_list + count - back, mask=listed, other=0)
            full -= (listed & ((block + 1) * BLOCK_K > limit)).to(tl.int32)

    k_base = k + b * stride_kb + h_k * stride_kh
    v_base = v + b * stride_vb + h_k * stride_vh
    if CODED:
        k_base += wide(k_block0 * BLOCK_K) * stride_kn if PACKED else 0
    else:
        k_base += wide(k_row0) * stride_kn if PACKED else 0
    if FAST:
        v_base += k_block0 * BLOCK_K if PACKED else 0
    else:
        v_base += wide(k_row0) * stride_vn if PACKED else 0
    scales = k_scale + key_head * n_blocks_k + k_block0
    v_scales = v_scale
    if FAST:
        v_scales = v_scale + key_head * n_blocks_k + k_block0
    mask_base = mask
    if MASK:
        mask_base = mask + b * stride_mb + wide(h) * stride_mh
    skip_from = 0.0
    if SKIP:
        skip_from = tl.load(pv_skip + h)

    if PACKED:
        headroom *= tl.load(seqs + seq * 8 + 7).to(tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # A query that is not finite makes its row NaN, whatever it attends.
    row_sum = factor * 0.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    unit, top = row_max, row_max
    rows = first_row + m
    n_groups = tl.cdiv(tl.minimum(tl.maximum(own_Lq - first_row, 0), BLOCK_M), ROW_GROUP)
    n_skips = 0
    row_max, row_sum, acc, unit, top, n_skips = walk_blocks(
        own_q, factor, row_max, row_sum, acc, unit, top, n_skips, k_base, v_base, scales, v_scales,
        mask_base, block_list, 0, full, rows, valid, n_groups, own_Lk, rows, headroom,
        skip_from,
        stride_kn, stride_vn, stride_vd, stride_mm, stride_mn,
        D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, HELD, MOST, P_LOG, CODED, FAST, EXACT, CAUSAL, MASK,
        SKIP, False,
    )  # fmt: skip
    # Made here, not to take registers before.
    last_key = rows * 0 + own_Lk - 1
    if CAUSAL:
        last_key = tl.minimum(rows + own_offset, last_key)
    row_max, row_sum, acc, unit, top, n_skips = walk_blocks(
        own_q, factor, row_max, row_sum, acc, unit, top, n_skips, k_base, v_base, scales, v_scales,
        mask_base, block_list, full, count, rows, valid, n_groups, own_Lk, last_key, headroom,
        skip_from,
        stride_kn, stride_vn, stride_vd, stride_mm, stride_mn,
        D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, HELD, MOST, P_LOG, CODED, FAST, EXACT, CAUSAL, MASK,
        SKIP, True,
    )  # fmt: skip
    if FAST:
        # From units of its own to that of row_sum.
        acc = acc * tl.math.exp2(tl.where(row_max == float("-inf"), 0.0, unit))[:, None]
        row_max += headroom
    if POOL_GROUP:
        first = key_head * (n_blocks_k * (BLOCK_K // POOL_GROUP))
        first += k_block0 * (BLOCK_K // POOL_GROUP)
        own_scales = pooled_scale
        if CODED:
            own_scales = pooled_scale + first
        row_max, row_sum, acc = walk_pooled(
            own_q, factor, row_max, row_sum, acc, pooled_k + first * BLOCK_D,
            pooled_v + first * BLOCK_DV, own_scales, scales, pools + row * n_k,
            tl.cdiv(tl.maximum(limit, 0), POOL_GROUP), own_Lk, headroom,
            POOL_GROUP, ENTRIES, BLOCK_D, BLOCK_DV, CODED, EXACT,
        )  # fmt: skip

    nothing = row_sum == 0.0
    # Values that are not finite leave sums that are not: the whole row is NaN.
    broken = tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, 1) != 0
    row_sum = tl.where(broken, float("nan"), row_sum)
    average = acc / tl.where(nothing, 1.0, row_sum)[:, None]
    average = tl.where(average > OUT_MOST, OUT_MOST, average)
    average = tl.where(average < -OUT_MOST, -OUT_MOST, average)
    out_at = out + b * stride_ob + wide(h) * stride_oh + token * stride_om
    tl.store(
        out_at + m[:, None] * stride_om + dv[None, :],
        average.to(out.dtype.element_ty),
        mask=valid[:, None] & (dv < DV)[None, :],
    )
    row_lse = (row_max + tl.math.log2(row_sum)) * LN2
    if CODED:
        row_lse += tl.load(lse_shift + tokens + m, mask=valid, other=0.0)
    row_lse = tl.where(nothing, float("-inf"), row_lse)
    tl.store(lse + tokens + m, row_lse, mask=valid)
    if SKIP != KEEP_ALL_GROUPS:
        tl.store(pv_skips + row * PARTS + part, n_skips)
