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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import (
    BLOCK_K,
    BLOCK_Q,
    as_held,
    code_rows,
    pool_rows,
    self_similarity,
    sequence_of,
    wide,
)

CHUNKS = tl.constexpr(64)
"""Chunks of a head's keys, whatever its length: as many programs sum them."""


class PreparedRows(NamedTuple):
    """What is written of the queries; None where it is not asked for. codes `[B, Hq, Lq, BLOCK_D]`;
    scales, lse_shift, deviation `[B, Hq, Lq]`; pooled `[B, Hq, n_q, BLOCK_D]`; similarity, energy
    `[B, Hq, n_q]`."""

    codes: Any = None
    scales: Any = None
    pooled: Any = None
    similarity: Any = None
    lse_shift: Any = None
    deviation: Any = None
    energy: Any = None


class PreparedBlocks(NamedTuple):
    """What is written of keys and values; None where it is not asked for. codes
    `[B, Hk, n_k * 64, BLOCK_D]`; scales, similarity, v_scales, v_logs `[B, Hk, n_k]`; pooled
    `[B, Hk, n_k, BLOCK_D]`; of pooled entries entry_k `[B, Hk, entries, BLOCK_D]`, entry_v
    `[B, Hk, entries, BLOCK_DV]`, entry_scale `[B, Hk, entries]`; v_codes
    `[B, Hk, BLOCK_DV, n_k * 64]`."""

    codes: Any
    scales: Any
    pooled: Any = None
    similarity: Any = None
    entry_k: Any = None
    entry_v: Any = None
    entry_scale: Any = None
    v_codes: Any = None
    v_scales: Any = None
    v_logs: Any = None


@triton.jit
def shrink_for(length):
    """A power of two of at most 2 / length."""
    return tl.math.exp2(-tl.math.ceil(tl.math.log2(length.to(tl.float32))))


@triton.jit(do_not_specialize=["Lk"])
def sum_keys(k, sums, pack, strides, Hk, Lk, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One chunk: `sums[b, h, chunk] = Σ k · 2^-e`, with 2^e >= Lk so that no sum overflows."""
    chunk, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = sequence_of(pack, b, Lq=0, Lk=Lk, offset=0)
    per_chunk = tl.cdiv(tl.cdiv(own.Lk, BLOCK_K), CHUNKS) * BLOCK_K
    start = chunk * per_chunk
    stop = tl.minimum(start + per_chunk, own.Lk)
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    batch = b
    if pack.table is not None:
        batch = b * 0
    base = k + batch * strides.b + h.to(tl.int64) * strides.h
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(start, stop, BLOCK_K):
        rows = wide(own.k_row0 + first) + n
        there = (first + n < stop)[:, None] & (d < D)[None, :]  # [64, BLOCK_D]
        x = tl.load(base + rows[:, None] * strides.n + d[None, :], mask=there, other=0.0)
        total += tl.sum(x.to(tl.float32) * shrink_for(own.Lk), 0)
    tl.store(sums + ((b * Hk + h) * CHUNKS + chunk) * BLOCK_D + d, total)


@triton.jit(do_not_specialize=["Lk", "n_chunks"])
def mean_keys(sums, means, pack, Lk, n_chunks, Hk, BLOCK_D: tl.constexpr):
    """The mean key of one head, of the sums of its chunks."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = sequence_of(pack, b, Lq=0, Lk=Lk, offset=0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for chunk in tl.range(0, tl.minimum(n_chunks, tl.cdiv(own.Lk, BLOCK_K))):
        total += tl.load(sums + ((b * Hk + h) * CHUNKS + chunk) * BLOCK_D + d)
    whole = tl.math.div_rn(1.0 / shrink_for(own.Lk), own.Lk.to(tl.float32))
    tl.store(means + (b * Hk + h) * BLOCK_D + d, total * whole)


@triton.jit(do_not_specialize=["L"])
def narrow_rows(x, out, strides, H, L, TYPES: tl.constexpr):
    """64 rows of one head; numbers beyond the range become its largest, as `as_held` has it."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, d = i * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, TYPES.BLOCK_D)
    there = (rows < L)[:, None] & (d < TYPES.D)[None, :]  # [64, BLOCK_D]
    token = rows.to(tl.int64)[:, None]
    at = x + b * strides.b + h.to(tl.int64) * strides.h + token * strides.n + d[None, :]
    held = as_held(tl.load(at, mask=there, other=0.0), TYPES)
    tl.store(out + ((b * H + h) * L + token) * TYPES.D + d[None, :], held, mask=there)


@triton.jit(do_not_specialize=["Lq", "n_q"])
def prepare_queries(
    q, means, made, pack, strides, Hq, group, Lq, n_q, softmax_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, CODE_ROWS: tl.constexpr,
):  # fmt: skip
    """One query block of one head, into `made`, a `PreparedRows`. Rows are those of the tokens;
    blocks are numbered as listed. WIDTH: channels of one Hadamard transform. CODE_ROWS: rows that
    are rotated at a time, by way of shared memory."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = b
    if pack.table is not None:
        seq = tl.load(pack.seq_of_block + i).to(tl.int64)
    own = sequence_of(pack, seq, Lq=Lq, Lk=0, offset=0)
    m, d = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    rows = (i - own.q_block0) * BLOCK_Q + m
    valid = rows < own.Lq
    n_valid = tl.minimum(own.Lq - (i - own.q_block0) * BLOCK_Q, BLOCK_Q)
    token = (own.q_row0 + rows).to(tl.int64)
    head = b * Hq + h
    base = q + b * strides.b + h.to(tl.int64) * strides.h
    at = base + token[:, None] * strides.n + d[None, :]
    # x [128, BLOCK_D]
    x = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    block = head * n_q + i
    if made.pooled is not None or made.deviation is not None:
        mean = pool_rows(x, n_valid, BLOCK_Q)
        if made.pooled is not None:
            tl.store(made.pooled + block * BLOCK_D + d, mean)
        if made.deviation is not None:
            off = tl.where(valid[:, None], x - mean[None, :], 0.0)
            tl.store(made.deviation + head * Lq + token, tl.sum(off * off, 1), mask=valid)
            tl.store(made.energy + block, tl.sum(tl.sum(x * x, 1), 0))
    if made.similarity is not None:
        tl.store(made.similarity + block, self_similarity(x, n_valid, BLOCK_Q, BLOCK_D))
    if made.lse_shift is not None:
        mean = tl.load(means + (seq * (Hq // group) + h // group) * BLOCK_D + d)
        shift = tl.sum(x * mean[None, :], 1) * softmax_scale
        tl.store(made.lse_shift + head * Lq + token, shift, mask=valid)
    if made.codes is not None and CODE_ROWS == BLOCK_Q:
        coded, scale = code_rows(x, BLOCK_Q, D, BLOCK_D, WIDTH, TOGETHER=False)
        tl.store(made.codes + (head * Lq + token[:, None]) * BLOCK_D + d[None, :], coded,
                 mask=valid[:, None])  # fmt: skip
        tl.store(made.scales + head * Lq + token, scale, mask=valid)
    elif made.codes is not None:
        for first in tl.range(0, BLOCK_Q, CODE_ROWS, num_stages=1):
            some_rows = (i - own.q_block0) * BLOCK_Q + first + tl.arange(0, CODE_ROWS)
            some = some_rows < own.Lq
            at_own = (own.q_row0 + some_rows).to(tl.int64)
            # y [CODE_ROWS, BLOCK_D]
            y = tl.load(base + at_own[:, None] * strides.n + d[None, :],
                        mask=some[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
            coded, scale = code_rows(y.to(tl.float32), CODE_ROWS, D, BLOCK_D, WIDTH,
                                     TOGETHER=False)  # fmt: skip
            tl.store(made.codes + (head * Lq + at_own[:, None]) * BLOCK_D + d[None, :], coded,
                     mask=some[:, None])  # fmt: skip
            tl.store(made.scales + head * Lq + at_own, scale, mask=some)


@triton.jit(do_not_specialize=["Lk", "n_blocks_k"])
def prepare_keys(
    k, v, means, made, pack, k_strides, v_strides, Hk, Lk, n_blocks_k,
    TYPES: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, POOL_GROUP: tl.constexpr,
):  # fmt: skip
    """One key block of one head and its values, if there is a `v`, into `made`, a
    `PreparedBlocks`. WIDTH: channels of one Hadamard transform."""
    D: tl.constexpr = TYPES.D
    BLOCK_D: tl.constexpr = TYPES.BLOCK_D
    BLOCK_DV: tl.constexpr = VALUES.BLOCK_DV
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = b
    if pack.table is not None:
        seq = tl.load(pack.seq_of_block + j).to(tl.int64)
    own = sequence_of(pack, seq, Lq=0, Lk=Lk, offset=0)
    n, d, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = (j - own.k_block0) * BLOCK_K + n
    valid = rows < own.Lk
    n_valid = tl.minimum(own.Lk - (j - own.k_block0) * BLOCK_K, BLOCK_K)
    token = (own.k_row0 + rows).to(tl.int64)
    block = (b * Hk + h) * n_blocks_k + j
    there = valid[:, None] & (d < D)[None, :]
    k_base = k + b * k_strides.b + h.to(tl.int64) * k_strides.h
    at = k_base + token[:, None] * k_strides.n + d[None, :]
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)  # [64, BLOCK_D]
    odd = tl.sum(tl.sum(x * 0.0, 1), 0)
    if v is not None:
        v_at = v + b * v_strides.b + h.to(tl.int64) * v_strides.h
        v_at += token[:, None] * v_strides.n + dv[None, :]
        v_there = valid[:, None] & (dv < VALUES.DV)[None, :]
        y = tl.load(v_at, mask=v_there, other=0.0).to(tl.float32)  # [64, BLOCK_DV]
        odd += tl.sum(tl.sum(y * 0.0, 1), 0)
    plain = x
    if means is not None:
        mean = tl.load(means + (seq * Hk + h) * BLOCK_D + d)
        x = tl.where(there, x - mean[None, :], 0.0)
        odd += tl.sum(mean * 0.0, 0)
    if made.pooled is not None:
        tl.store(made.pooled + block * BLOCK_D + d, pool_rows(x, n_valid, BLOCK_K))
    if made.similarity is not None:
        tl.store(made.similarity + block, self_similarity(x, n_valid, BLOCK_K, BLOCK_D))
    scale = 1.0 + odd
    if made.codes is not None:
        coded, scales = code_rows(x, BLOCK_K, D, BLOCK_D, WIDTH, TOGETHER=True)
        tl.store(made.codes + (block * BLOCK_K + n)[:, None] * BLOCK_D + d[None, :], coded)
        scale = tl.max(scales, 0) + odd
    tl.store(made.scales + block, scale)
    if POOL_GROUP:
        ENTRIES: tl.constexpr = BLOCK_K // POOL_GROUP
        e = tl.arange(0, ENTRIES)
        left = n_valid - e * POOL_GROUP
        entry_sizes = tl.minimum(tl.maximum(left, 1), POOL_GROUP).to(tl.float32)
        most = tl.full([ENTRIES], POOL_GROUP * 1.0, tl.float32)
        share = tl.math.div_rn(most, entry_sizes)[:, None]
        source = plain if made.codes is None else x
        # k_mean [ENTRIES, BLOCK_D], v_mean [ENTRIES, BLOCK_DV]
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
        entry_scale = tl.full([ENTRIES], 1.0, tl.float32)
        entry_at = made.entry_k + entry[:, None] * BLOCK_D + d[None, :]
        if made.codes is not None:
            coded_mean, entry_scale = code_rows(k_mean, ENTRIES, D, BLOCK_D, WIDTH,
                                                TOGETHER=False)  # fmt: skip
            tl.store(entry_at, coded_mean)
        else:
            tl.store(entry_at, as_held(k_mean, TYPES))
        tl.store(made.entry_scale + entry, entry_scale + odd)
        held_v = as_held(v_mean, TYPES)
        tl.store(made.entry_v + entry[:, None] * BLOCK_DV + dv[None, :], held_v)
    if made.v_codes is not None:
        P_MAX: tl.constexpr = VALUES.P_MAX
        v_scale = tl.math.div_rn(tl.max(tl.max(tl.abs(y), 1), 0), P_MAX * 1.0)
        safe = tl.where(v_scale > 0.0, v_scale, 1.0)
        v_code = tl.math.div_rn(y, tl.broadcast_to(safe, [BLOCK_K, BLOCK_DV]))
        v_code = tl.where(odd == 0.0, v_code, 0.0)
        v_code = tl.minimum(tl.maximum(v_code, -P_MAX * 1.0), P_MAX * 1.0)
        column = (b * Hk + h) * BLOCK_DV * n_blocks_k * BLOCK_K + j * BLOCK_K
        at = made.v_codes + column + dv[:, None] * wide(n_blocks_k * BLOCK_K) + n[None, :]
        tl.store(at, tl.trans(v_code).to(made.v_codes.dtype.element_ty))  # [BLOCK_DV, 64]
        v_scale = tl.where(odd == 0.0, v_scale, 0.0)
        tl.store(made.v_scales + block, v_scale)
        # An all-zero block has the smallest unit there is, and lowers no other.
        tl.store(made.v_logs + block, tl.math.log2(tl.maximum(v_scale, 1e-37)))
