"""Codes, scales and block statistics: q is read once, k twice (its mean comes first), v if needed.

    sum_keys         sums of chunks of the keys of a head                [B, Hk, 64, D]
    mean_keys        the mean key of a head                              [B, Hk, D]
    narrow_rows      fp32 rows in the 16-bit type that they are multiplied in
    prepare_queries  a query block: codes, a scale for each row, pooled token, self-similarity,
                     lse_shift, distances from the pooled token
    prepare_keys     a key block of K and V: codes with one scale, pooled token, self-similarity,
                     pooled entries, V in fp8 and transposed

Rows of q and k are rotated before they are coded: signs and a Hadamard transform. A scale of NaN
marks what is not finite; the scale of a key block also tells of its values, where they are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_tiles import BLOCK_K, BLOCK_Q, as_held, sequence_of, wide

CHUNKS = tl.constexpr(64)
"""Chunks of a head's keys, whatever its length: as many programs sum them."""


@triton.jit
def round_even(x):
    """The nearest whole number, ties to even, of |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Signs and the orthonormal transform of the rows of `x [ROWS, WIDTH]`, WIDTH a power of two:
    sums and differences of numbers 1, 2, 4, … apart, as the reference adds them."""
    d = tl.arange(0, WIDTH)
    pairs = d & (d >> 1)
    pairs = pairs ^ (pairs >> 4)
    pairs = pairs ^ (pairs >> 2)
    pairs = pairs ^ (pairs >> 1)
    x = x * tl.where((pairs & 1) != 0, -(WIDTH**-0.5), WIDTH**-0.5)[None, :]
    for log in tl.static_range(8):
        if (1 << log) < WIDTH:
            y = tl.reshape(x, [ROWS, WIDTH // (2 << log), 2, 1 << log])
            a, b = tl.split(tl.permute(y, [0, 1, 3, 2]))
            y = tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2])
            x = tl.reshape(y, [ROWS, WIDTH])
    return x


@triton.jit
def rotate_first(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """The first WIDTH of BLOCK_D channels rotated; both are powers of two."""
    if WIDTH == BLOCK_D:
        return hadamard(x, ROWS, WIDTH)
    # Every group of WIDTH channels is transformed, and the first one is taken.
    y = hadamard(
        tl.reshape(x, [ROWS * (BLOCK_D // WIDTH), WIDTH]), ROWS * (BLOCK_D // WIDTH), WIDTH
    )
    y = tl.reshape(y, [ROWS, BLOCK_D])
    return tl.where((tl.arange(0, BLOCK_D) < WIDTH)[None, :], y, x)


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of `x [ROWS, BLOCK_D]` rotated: the first WIDTH channels, the largest power of two, and
    if there are more, the last WIDTH of the D."""
    x = rotate_first(x, ROWS, BLOCK_D, WIDTH)
    if WIDTH != D:
        d = tl.arange(0, BLOCK_D)
        there = tl.broadcast_to(((d + (D - WIDTH)) % BLOCK_D)[None, :], [ROWS, BLOCK_D])
        back = tl.broadcast_to(((d + (BLOCK_D - D + WIDTH)) % BLOCK_D)[None, :], [ROWS, BLOCK_D])
        y = rotate_first(tl.gather(x, there, 1), ROWS, BLOCK_D, WIDTH)
        y = tl.gather(y, back, 1)
        x = tl.where((d >= D - WIDTH)[None, :] & (d < D)[None, :], y, x)
    return x


@triton.jit
def code_rows(x, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
              TOGETHER: tl.constexpr):  # fmt: skip
    """`(codes, scale of each row)` of rotated rows; one scale for all of them if TOGETHER."""
    odd = tl.sum(x * 0.0, 1)  # NaN where a row is not finite
    largest = tl.max(tl.abs(x), 1)
    if TOGETHER:
        odd, largest = odd * 0.0 + tl.sum(odd, 0), largest * 0.0 + tl.max(largest, 0)
    # Rotation can make a number 16 times as large: rows near the end of fp32 are lowered for it.
    lowered = tl.where(largest > 1.2676506002282294e30, 0.00390625, 1.0)
    x = tl.where((odd == 0.0)[:, None], x, 0.0)
    x = rotate_rows(x * lowered[:, None], ROWS, D, BLOCK_D, WIDTH)
    largest = tl.max(tl.abs(x), 1)
    if TOGETHER:
        largest = largest * 0.0 + tl.max(largest, 0)
    scale = tl.math.div_rn(largest, tl.full([ROWS], 127.0, tl.float32))
    known = scale > 0.0
    divisor = tl.broadcast_to(tl.where(known, scale, 1.0)[:, None], [ROWS, BLOCK_D])
    codes = round_even(tl.math.div_rn(x, divisor))
    codes = tl.where(known[:, None], tl.minimum(tl.maximum(codes, -127.0), 127.0), 0.0)
    return codes.to(tl.int8), tl.math.div_rn(scale, lowered) + odd


@triton.jit
def pool_rows(x, n_valid, SIZE: tl.constexpr):
    """The mean of the first n_valid of SIZE rows, the others being zero; finite if they are."""
    return tl.sum(x * (1.0 / SIZE), 0) * tl.math.div_rn(SIZE * 1.0, n_valid.to(tl.float32))


@triton.jit
def self_similarity(x, n_valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """`|| mean of the rows' unit vectors ||²`; NaN if a row is not finite."""
    largest = tl.max(tl.abs(x), 1)
    odd = tl.sum(x * 0.0, 1)
    safe = tl.broadcast_to(tl.where(largest > 0.0, largest, 1.0)[:, None], [SIZE, BLOCK_D])
    unit = tl.math.div_rn(x, safe)
    norm = tl.sqrt_rn(tl.sum(unit * unit, 1))
    norm = tl.broadcast_to(tl.where(norm > 0.0, norm, 1.0)[:, None], [SIZE, BLOCK_D])
    mean = tl.sum(tl.math.div_rn(unit, norm) + odd[:, None], 0) / n_valid.to(tl.float32)
    return tl.sum(mean * mean, 0)


@triton.jit(do_not_specialize=["Lk"])
def sum_keys(
    k, sums, seqs, stride_kb, stride_kh, stride_kn, Hk, Lk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One chunk: `sums[b, h, chunk] = Σ k · 2^-e`, with 2^e >= Lk so that no sum overflows."""
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, _, k_row0, own_Lk, _, _, _ = sequence_of(seqs, b, 0, Lk, 0, PACKED)
    per_chunk = tl.cdiv(tl.cdiv(own_Lk, BLOCK_K), CHUNKS) * BLOCK_K
    start = chunk * per_chunk
    stop = tl.minimum(start + per_chunk, own_Lk)
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    batch = b
    if PACKED:
        batch = b * 0
    base = k + batch * stride_kb + h.to(tl.int64) * stride_kh
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(start, stop, BLOCK_K):
        rows = wide(k_row0 + first) + n
        there = (first + n < stop)[:, None] & (d < D)[None, :]
        x = tl.load(base + rows[:, None] * stride_kn + d[None, :], mask=there, other=0.0)
        total += tl.sum(x.to(tl.float32) * shrink_for(own_Lk), 0)
    tl.store(sums + ((b * Hk + h) * CHUNKS + chunk) * BLOCK_D + d, total)


@triton.jit
def shrink_for(length):
    """A power of two of at most 2 / length."""
    return tl.math.exp2(-tl.math.ceil(tl.math.log2(length.to(tl.float32))))


@triton.jit(do_not_specialize=["Lk", "n_chunks"])
def mean_keys(sums, means, seqs, Lk, n_chunks, Hk, BLOCK_D: tl.constexpr, PACKED: tl.constexpr):
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, _, own_Lk, _, _, _ = sequence_of(seqs, b, 0, Lk, 0, PACKED)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for chunk in tl.range(0, tl.minimum(n_chunks, tl.cdiv(own_Lk, BLOCK_K))):
        total += tl.load(sums + ((b * Hk + h) * CHUNKS + chunk) * BLOCK_D + d)
    whole = tl.math.div_rn(1.0 / shrink_for(own_Lk), own_Lk.to(tl.float32))
    tl.store(means + (b * Hk + h) * BLOCK_D + d, total * whole)


@triton.jit(do_not_specialize=["L"])
def narrow_rows(
    x, out, stride_xb, stride_xh, stride_xn, H, L, D: tl.constexpr, BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """64 rows of one head; numbers beyond the range become its largest, as `as_held` has it."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, d = i * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    there = (rows < L)[:, None] & (d < D)[None, :]
    token = rows.to(tl.int64)[:, None]
    at = x + b * stride_xb + h.to(tl.int64) * stride_xh + token * stride_xn + d[None, :]
    held = as_held(tl.load(at, mask=there, other=0.0), out.dtype.element_ty, MOST)
    tl.store(out + ((b * H + h) * L + token) * D + d[None, :], held, mask=there)


@triton.jit(do_not_specialize=["Lq", "n_q"])
def prepare_queries(
    q, means, codes, scales, pooled, similarity, lse_shift, deviation, energy, seqs, seq_of_block,
    stride_qb, stride_qh, stride_qm, Hq, group, Lq, n_q, softmax_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr,
    SHIFT: tl.constexpr, POOLED: tl.constexpr, SIMILARITY: tl.constexpr, DEVIATION: tl.constexpr,
    CODE_ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One query block of one head. Rows are those of the tokens; blocks are numbered as listed.
    CODE_ROWS: rows that are rotated at a time, by way of shared memory."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = b
    if PACKED:
        seq = tl.load(seq_of_block + i).to(tl.int64)
    q_row0, own_Lq, _, _, q_block0, _, _ = sequence_of(seqs, seq, Lq, 0, 0, PACKED)
    m, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    rows = (i - q_block0) * BLOCK_Q + m
    valid = rows < own_Lq
    n_valid = tl.minimum(own_Lq - (i - q_block0) * BLOCK_Q, BLOCK_Q)
    token = (q_row0 + rows).to(tl.int64)
    head = b * Hq + h
    at = q + b * stride_qb + h.to(tl.int64) * stride_qh + token[:, None] * stride_qm + d[None, :]
    x = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    block = head * n_q + i
    if POOLED or DEVIATION:
        mean = pool_rows(x, n_valid, BLOCK_Q)
        if POOLED:
            tl.store(pooled + block * BLOCK_D + d, mean)
        if DEVIATION:
            off = tl.where(valid[:, None], x - mean[None, :], 0.0)
            tl.store(deviation + head * Lq + token, tl.sum(off * off, 1), mask=valid)
            tl.store(energy + block, tl.sum(tl.sum(x * x, 1), 0))
    if SIMILARITY:
        tl.store(similarity + block, self_similarity(x, n_valid, BLOCK_Q, BLOCK_D))
    if SHIFT:
        mean = tl.load(means + (seq * (Hq // group) + h // group) * BLOCK_D + d)
        shift = tl.sum(x * mean[None, :], 1) * softmax_scale
        tl.store(lse_shift + head * Lq + token, shift, mask=valid)
    if CODES and CODE_ROWS == BLOCK_Q:
        coded, scale = code_rows(x, BLOCK_Q, D, BLOCK_D, WIDTH, False)
        tl.store(codes + (head * Lq + token[:, None]) * BLOCK_D + d[None, :], coded,
                 mask=valid[:, None])  # fmt: skip
        tl.store(scales + head * Lq + token, scale, mask=valid)
    elif CODES:
        base = q + b * stride_qb + h.to(tl.int64) * stride_qh
        for first in tl.range(0, BLOCK_Q, CODE_ROWS, num_stages=1):
            own = (i - q_block0) * BLOCK_Q + first + tl.arange(0, CODE_ROWS)
            some = own < own_Lq
            at_own = (q_row0 + own).to(tl.int64)
            y = tl.load(base + at_own[:, None] * stride_qm + d[None, :],
                        mask=some[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
            coded, scale = code_rows(y.to(tl.float32), CODE_ROWS, D, BLOCK_D, WIDTH, False)
            tl.store(codes + (head * Lq + at_own[:, None]) * BLOCK_D + d[None, :], coded,
                     mask=some[:, None])  # fmt: skip
            tl.store(scales + head * Lq + at_own, scale, mask=some)


@triton.jit(do_not_specialize=["Lk", "n_blocks_k"])
def prepare_keys(
    k, v, means, codes, scales, pooled, similarity, pooled_k, pooled_v, pooled_scale, v_codes,
    v_scales, v_logs, seqs, seq_of_block, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, Hk, Lk, n_blocks_k,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, CODES: tl.constexpr, SMOOTH: tl.constexpr, POOLED: tl.constexpr,
    SIMILARITY: tl.constexpr, VALUES: tl.constexpr, POOL_GROUP: tl.constexpr, FAST: tl.constexpr,
    P_MAX: tl.constexpr, HELD: tl.constexpr, MOST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One key block of one head, and its values."""
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = b
    if PACKED:
        seq = tl.load(seq_of_block + j).to(tl.int64)
    _, _, k_row0, own_Lk, _, k_block0, _ = sequence_of(seqs, seq, 0, Lk, 0, PACKED)
    n, d, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = (j - k_block0) * BLOCK_K + n
    valid = rows < own_Lk
    n_valid = tl.minimum(own_Lk - (j - k_block0) * BLOCK_K, BLOCK_K)
    token = (k_row0 + rows).to(tl.int64)
    block = (b * Hk + h) * n_blocks_k + j
    there = valid[:, None] & (d < D)[None, :]
    at = k + b * stride_kb + h.to(tl.int64) * stride_kh + token[:, None] * stride_kn + d[None, :]
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    odd = tl.sum(tl.sum(x * 0.0, 1), 0)
    if VALUES:
        v_at = v + b * stride_vb + h.to(tl.int64) * stride_vh
        v_at += token[:, None] * stride_vn + dv[None, :]
        y = tl.load(v_at, mask=valid[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32)
        odd += tl.sum(tl.sum(y * 0.0, 1), 0)
    plain = x
    if SMOOTH:
        mean = tl.load(means + (seq * Hk + h) * BLOCK_D + d)
        x = tl.where(there, x - mean[None, :], 0.0)
        odd += tl.sum(mean * 0.0, 0)
    if POOLED:
        tl.store(pooled + block * BLOCK_D + d, pool_rows(x, n_valid, BLOCK_K))
    if SIMILARITY:
        tl.store(similarity + block, self_similarity(x, n_valid, BLOCK_K, BLOCK_D))
    scale = 1.0 + odd
    if CODES:
        coded, each = code_rows(x, BLOCK_K, D, BLOCK_D, WIDTH, True)
        tl.store(codes + (block * BLOCK_K + n)[:, None] * BLOCK_D + d[None, :], coded)
        scale = tl.max(each, 0) + odd
    tl.store(scales + block, scale)
    if POOL_GROUP:
        ENTRIES: tl.constexpr = BLOCK_K // POOL_GROUP
        e = tl.arange(0, ENTRIES)
        left = n_valid - e * POOL_GROUP
        sizes = tl.minimum(tl.maximum(left, 1), POOL_GROUP).to(tl.float32)
        share = tl.math.div_rn(tl.full([ENTRIES], POOL_GROUP * 1.0, tl.float32), sizes)[:, None]
        source = x if CODES else plain
        k_mean = (
            tl.sum(tl.reshape(source * (1.0 / POOL_GROUP), [ENTRIES, POOL_GROUP, BLOCK_D]), 1)
            * share
        )
        v_mean = (
            tl.sum(tl.reshape(y * (1.0 / POOL_GROUP), [ENTRIES, POOL_GROUP, BLOCK_DV]), 1) * share
        )
        finite = odd == 0.0
        k_mean, v_mean = tl.where(finite, k_mean, 0.0), tl.where(finite, v_mean, 0.0)
        entry = block * ENTRIES + e
        own = tl.full([ENTRIES], 1.0, tl.float32)
        if CODES:
            coded_mean, own = code_rows(k_mean, ENTRIES, D, BLOCK_D, WIDTH, False)
            tl.store(pooled_k + entry[:, None] * BLOCK_D + d[None, :], coded_mean)
        else:
            held = as_held(k_mean, HELD, MOST)
            tl.store(pooled_k + entry[:, None] * BLOCK_D + d[None, :], held)
        tl.store(pooled_scale + entry, own + odd)
        held_v = as_held(v_mean, HELD, MOST)
        tl.store(pooled_v + entry[:, None] * BLOCK_DV + dv[None, :], held_v)
    if FAST:
        v_scale = tl.math.div_rn(tl.max(tl.max(tl.abs(y), 1), 0), P_MAX * 1.0)
        safe = tl.where(v_scale > 0.0, v_scale, 1.0)
        v_code = tl.math.div_rn(y, tl.broadcast_to(safe, [BLOCK_K, BLOCK_DV]))
        v_code = tl.where(odd == 0.0, v_code, 0.0)
        v_code = tl.minimum(tl.maximum(v_code, -P_MAX * 1.0), P_MAX * 1.0)
        column = (b * Hk + h) * BLOCK_DV * n_blocks_k * BLOCK_K + j * BLOCK_K
        at = v_codes + column + dv[:, None] * wide(n_blocks_k * BLOCK_K) + n[None, :]
        tl.store(at, tl.trans(v_code).to(v_codes.dtype.element_ty))
        v_scale = tl.where(odd == 0.0, v_scale, 0.0)
        tl.store(v_scales + block, v_scale)
        # An all-zero block has the smallest unit there is, and lowers no other.
        tl.store(v_logs + block, tl.math.log2(tl.maximum(v_scale, 1e-37)))
