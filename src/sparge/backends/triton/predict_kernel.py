"""The mass map: how much of its attention each query block gives each key block.

    predict_means   softmax over the pooled tokens, 16 query blocks x KEYS key blocks at a time
    predict_rows    a few rows of each query block, scored exactly in the precision of the call:
                    once for their maxima and sums, once for the mass of each block; `"blend"`
                    averages that with the softmax over the pooled tokens in the same walk

Scoring twice costs less than keeping the mass of every row and block until its sum is known.
Blocks that nothing may attend get 0; NaN marks what is not known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_tiles import BIAS, BLOCK_K, BLOCK_Q, BOOL_MASK, LOWEST, as_held, sequence_of, wide

EXCLUDED = tl.constexpr(0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_block_of(tiles, pid, PER_TILE: tl.constexpr, PACKED: tl.constexpr):
    """`(sequence, first query block of the sequence)` of a program; tiles never span sequences."""
    if PACKED:
        return tl.load(tiles + 2 * pid), tl.load(tiles + 2 * pid + 1)
    return 0, pid * PER_TILE


@triton.jit
def may_attend(i, j, Lq, Lk, offset, kinds_row, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Whether any pair of query block i and key block j may attend."""
    i = i + j * 0  # the interpreter mixes up flags of different shapes
    may = (j * BLOCK_K < Lk) & (i * BLOCK_Q < Lq)
    if CAUSAL:
        may = may & (j * BLOCK_K <= tl.minimum((i + 1) * BLOCK_Q, Lq) - 1 + offset)
    if MASK:
        may = may & (tl.load(kinds_row + j, mask=may, other=0) != EXCLUDED)
    return may


@triton.jit
def held_share(j, Lk):
    """log2(n / BLOCK_K) of the n valid keys of a block."""
    size = tl.maximum(tl.minimum(Lk - j * BLOCK_K, BLOCK_K), 1)
    return tl.math.log2(size.to(tl.float32) * (1.0 / BLOCK_K))


@triton.jit
def add_scores(s, best, total):
    """Running maximum and sum of exponentials, base 2, of more scores `[rows, n]`."""
    new = tl.maximum(best, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.math.exp2(best - shift) + tl.sum(tl.math.exp2(s - shift[:, None]), 1)
    return new, total


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset"])
def predict_means(
    q_pooled, k_pooled, k_similarity, least, kinds, mass, seqs, tiles,
    stride_nb, stride_nh, Hq, group, Lq, Lk, n_q, n_k, n_blocks_k, offset, scale_log2,
    BLOCK_D: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    JUDGE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Predictor `"mean"`: 16 query blocks of one head, KEYS key blocks at a time."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq, first = first_block_of(tiles, tl.program_id(0), 16, PACKED)
    _, own_Lq, _, own_Lk, q_block0, k_block0, own_offset = sequence_of(
        seqs, seq, Lq, Lk, offset, PACKED
    )
    i = first + tl.arange(0, 16)
    here = i * BLOCK_Q < own_Lq
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, KEYS)
    head, key_head = b * Hq + h, b * (Hq // group) + h // group
    row = head * n_q + q_block0 + i
    q = tl.load(q_pooled + row[:, None] * BLOCK_D + d[None, :], mask=here[:, None], other=0.0)
    best = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    own_n_k = tl.cdiv(own_Lk, BLOCK_K)
    for step in tl.range(0, 2):
        for start in tl.range(0, own_n_k, KEYS):
            j = start + n
            at = (key_head * n_blocks_k + k_block0 + j)[None, :] * BLOCK_D + d[:, None]
            k = tl.load(k_pooled + at, mask=(j < own_n_k)[None, :], other=0.0)
            s = tl.dot(q, k, input_precision="ieee") * scale_log2 + held_share(j, own_Lk)[None, :]
            kinds_row = kinds
            if MASK:
                kinds_row = kinds + b * stride_nb + h.to(tl.int64) * stride_nh + i[:, None] * n_k
            may = may_attend(i[:, None], j[None, :], own_Lq, own_Lk, own_offset, kinds_row,
                             CAUSAL, MASK)  # fmt: skip
            if JUDGE:
                alike = tl.load(k_similarity + key_head * n_blocks_k + k_block0 + j,
                                mask=j < own_n_k, other=0.0)  # fmt: skip
                may = may & (alike >= tl.load(least + h))[None, :]
            s = tl.where(may, s, float("-inf"))
            if step == 0:
                best, total = add_scores(s, best, total)
            else:
                shift = tl.where(best == float("-inf"), 0.0, best)
                share = (
                    tl.math.exp2(s - shift[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
                )
                tl.store(mass + row[:, None] * n_k + j[None, :], share,
                         mask=here[:, None] & (j < own_n_k)[None, :])  # fmt: skip


@triton.jit
def score_rows(
    q, factor, k_base, scales, mask_base, j, rows, used, Lk, last_key, stride_kn, stride_mm,
    stride_mn, D: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr,
    CODED: tl.constexpr, EXACT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Scores of some rows over key block j, base 2, `[rows, 64]`; -inf where masked."""
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    first = wide(j) * BLOCK_K
    left = Lk - j * BLOCK_K
    k_at = k_base + first * stride_kn + n[None, :] * stride_kn + d[:, None]
    if CODED:
        k = tl.load(k_at)
        x = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32)
    else:
        k = tl.load(k_at, mask=(n < left)[None, :] & (d < D)[:, None], other=0.0)
        if EXACT != "":
            x = tl.dot(q, k.to(tl.float32), input_precision=EXACT)
        else:
            x = tl.dot(q, as_held(k, HELD, MOST))
    s = x * (factor * tl.load(scales + j))[:, None]
    keep = (n < left)[None, :] & used[:, None]
    if CAUSAL:
        keep = keep & (j * BLOCK_K + n[None, :] <= last_key[:, None])
    if MASK:
        at = mask_base + rows[:, None].to(tl.int64) * stride_mm + (first + n[None, :]) * stride_mn
        given = tl.load(at, mask=(n < left)[None, :] & used[:, None], other=0)
        if MASK == BOOL_MASK:
            keep = keep & (given != 0)
        if MASK == BIAS:
            bias = given.to(tl.float32)
            keep = keep & (bias != float("-inf"))
            s = s + bias * LOG2E
            s = tl.where(s < LOWEST, LOWEST, s)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def load_rows(
    q, q_scale, at_head, row0, rows, used, scale_log2, stride_qm,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """`(rows of q, factor of their scores)`; a factor of NaN for a row that is not finite."""
    d = tl.arange(0, BLOCK_D)
    token = (row0 + rows).to(tl.int64)
    at = q + token[:, None] * stride_qm + d[None, :]
    factor = tl.where(used, scale_log2, 0.0)
    if CODED:
        own = tl.load(at, mask=used[:, None], other=0)
        factor *= tl.load(q_scale + at_head + token, mask=used, other=0.0)
    else:
        own = tl.load(at, mask=used[:, None] & (d < D)[None, :], other=0.0)
        factor += tl.sum(own.to(tl.float32) * 0.0, 1)
        own = as_held(own, HELD, MOST)
    return own, factor


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset"])
def predict_rows(
    q, k, q_scale, k_scale, q_pooled, k_pooled, mask, kinds, mass, seqs, tiles,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_nb, stride_nh,
    Hq, group, Lq, Lk, n_q, n_k, n_blocks_k, offset, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SAMPLED: tl.constexpr, PER_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr, CODED: tl.constexpr,
    EXACT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, BLEND: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Predictors `"rows"` and `"blend"`: BLOCKS query blocks, PER_BLOCK places in each of which
    SAMPLED are rows."""
    ROWS: tl.constexpr = BLOCKS * PER_BLOCK
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq, first = first_block_of(tiles, tl.program_id(0), BLOCKS, PACKED)
    q_row0, own_Lq, k_row0, own_Lk, q_block0, k_block0, own_offset = sequence_of(
        seqs, seq, Lq, Lk, offset, PACKED
    )
    h_k = (h // group).to(tl.int64)
    head, key_head = b * Hq + h, b * (Hq // group) + h_k
    place = tl.arange(0, ROWS)
    i = first + place // PER_BLOCK
    n_valid = tl.minimum(own_Lq - i * BLOCK_Q, BLOCK_Q)
    n_rows = tl.maximum(tl.minimum(SAMPLED, n_valid), 1)
    used = (n_valid > 0) & (place % PER_BLOCK < n_rows)
    rows = i * BLOCK_Q + (place % PER_BLOCK + 1) * n_valid // n_rows - 1
    own_q, factor = load_rows(
        q + b * stride_qb + h.to(tl.int64) * stride_qh, q_scale, head * Lq, q_row0, rows, used,
        scale_log2, stride_qm, D, BLOCK_D, HELD, MOST, CODED,
    )  # fmt: skip
    k_base = k + b * stride_kb + h_k * stride_kh
    if PACKED:
        if CODED:
            k_base += (k_block0 * BLOCK_K).to(tl.int64) * stride_kn
        else:
            k_base += k_row0.to(tl.int64) * stride_kn
    scales = k_scale + key_head * n_blocks_k + k_block0
    mask_base = mask
    if MASK:
        mask_base = mask + b * stride_mb + h.to(tl.int64) * stride_mh
    last_key = rows + own_offset

    blocks = first + tl.arange(0, BLOCKS)
    here = blocks * BLOCK_Q < own_Lq
    map_row = head * n_q + q_block0 + blocks
    d = tl.arange(0, BLOCK_D)
    kinds_row = kinds
    if MASK:
        kinds_row = kinds + b * stride_nb + h.to(tl.int64) * stride_nh + blocks * n_k
    if BLEND:
        q_mean = tl.load(q_pooled + map_row[:, None] * BLOCK_D + d[None, :], mask=here[:, None],
                         other=0.0)  # fmt: skip
    mean_best = tl.full([BLOCKS], float("-inf"), tl.float32)
    mean_total = tl.zeros([BLOCKS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    own_n_k = tl.cdiv(own_Lk, BLOCK_K)
    stop = own_n_k
    if CAUSAL:
        last_row = tl.minimum((first + BLOCKS) * BLOCK_Q, own_Lq) - 1 + own_offset
        stop = tl.minimum(stop, tl.maximum(last_row + BLOCK_K, 0) // BLOCK_K)
    for j in tl.range(0, stop):
        s = score_rows(
            own_q, factor, k_base, scales, mask_base, j, rows, used, own_Lk, last_key,
            stride_kn, stride_mm, stride_mn, D, BLOCK_D, HELD, MOST, CODED, EXACT, CAUSAL, MASK,
        )  # fmt: skip
        best, total = add_scores(s, best, total)
        if BLEND:
            k_mean = tl.load(k_pooled + (key_head * n_blocks_k + k_block0 + j) * BLOCK_D + d)
            s_mean = tl.sum(q_mean * k_mean[None, :], 1) * scale_log2 + held_share(j, own_Lk)
            may = may_attend(blocks, j, own_Lq, own_Lk, own_offset, kinds_row, CAUSAL, MASK)
            s_mean = tl.where(may, s_mean, float("-inf"))
            mean_best, mean_total = add_scores(s_mean[:, None], mean_best, mean_total)

    shift = tl.where(best == float("-inf"), 0.0, best)
    attends = (total != 0.0).to(tl.float32)  # a NaN row counts, and makes the prediction NaN
    n_attending = tl.sum(tl.reshape(attends, [BLOCKS, PER_BLOCK]), 1)
    share = attends / tl.where(total == 0.0, 1.0, total)
    mean_shift = tl.where(mean_best == float("-inf"), 0.0, mean_best)
    mean_share = 1.0 / tl.where(mean_total == 0.0, 1.0, mean_total)
    for j in tl.range(0, stop):
        s = score_rows(
            own_q, factor, k_base, scales, mask_base, j, rows, used, own_Lk, last_key,
            stride_kn, stride_mm, stride_mn, D, BLOCK_D, HELD, MOST, CODED, EXACT, CAUSAL, MASK,
        )  # fmt: skip
        mine = tl.sum(tl.math.exp2(s - shift[:, None]), 1) * share
        found = tl.sum(tl.reshape(mine, [BLOCKS, PER_BLOCK]), 1) / tl.maximum(n_attending, 1.0)
        if BLEND:
            k_mean = tl.load(k_pooled + (key_head * n_blocks_k + k_block0 + j) * BLOCK_D + d)
            s_mean = tl.sum(q_mean * k_mean[None, :], 1) * scale_log2 + held_share(j, own_Lk)
            may = may_attend(blocks, j, own_Lq, own_Lk, own_offset, kinds_row, CAUSAL, MASK)
            s_mean = tl.where(may, s_mean, float("-inf"))
            found = (found + tl.math.exp2(s_mean - mean_shift) * mean_share) * 0.5
        tl.store(mass + map_row * n_k + j, found, mask=here)
    n = tl.arange(0, BLOCK_K)
    for start in tl.range(stop, own_n_k, BLOCK_K):
        at = mass + map_row[:, None] * n_k + (start + n)[None, :]
        nothing = tl.zeros([BLOCKS, BLOCK_K], tl.float32)
        tl.store(at, nothing, mask=here[:, None] & (start + n < own_n_k)[None, :])
