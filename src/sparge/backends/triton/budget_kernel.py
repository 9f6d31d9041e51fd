"""What `KeepError` measures (rules/error_budget.py), on the device.

    first_steps    the first step that keeps each block: how many steps are reached by the mass of
                   the blocks ahead of it, larger ones and equal ones of smaller index
    survey_rows    the mass that each step drops from surveyed rows
    measure_rows   outputs of measured rows over the blocks of each measured step, and over all
    take_steps     the lists of the step that each head takes

A row is measured by a program of its own: with one product per key block and an addition to the
steps that keep it, the products with V are made once for all steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .predict_kernel import RowTile, Scored, load_rows, score_rows
from .primitives import (
    BIAS,
    BLOCK_K,
    BLOCK_Q,
    BOOL_MASK,
    LOG2E,
    LOWEST,
    BatchSizes,
    Rows,
    add_scores,
    as_held,
    causal_stop,
    wide,
)
from .select_kernel import AT_ONCE, Forced, allowed_of, is_forced, is_open, kinds_of_row

ROWS = tl.constexpr(16)
N = tl.constexpr(64)


@triton.jit
def scored_head(k, k_scale, k_strides, mask, m_strides, h, b, h_k, key_head, sizes):
    """The `Scored` of one head: its keys, their scales and its mask."""
    k_base = k + b * k_strides.b + h_k * k_strides.h
    scales = k_scale + key_head * sizes.n_k
    mask_base = mask
    if mask is not None:
        mask_base = mask + b * m_strides.b + wide(h) * m_strides.h
    return Scored(
        k_base, k_strides.n, scales, mask_base, m_strides.m, m_strides.n, sizes.Lk
    )  # fmt: skip


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset", "sink", "reach", "n_ranges"])
def first_steps(
    mass, masses, ranges, kinds, first, allowed, kind_strides,
    Hq, Lq, Lk, n_q, n_k, offset, sink, reach, n_ranges,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One query block: 0 for forced blocks and where nothing is known, -1 for excluded blocks."""
    sizes = BatchSizes(Lq, Lk, n_q, n_k, offset)
    force = Forced(sink, reach, n_ranges)
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_k = sizes.n_k
    row = (b * Hq + h) * sizes.n_q + i
    mass_row = mass + row * n_k
    kinds_row = kinds_of_row(kinds, kind_strides, h, b, i, n_k)
    stop = n_k
    if CAUSAL:
        stop = causal_stop(tl.minimum((i + 1) * BLOCK_Q, sizes.Lq) - 1, sizes.offset, n_k)
    n = tl.arange(0, N)
    whole = tl.zeros([], tl.float64)
    n_odd, n_may = 0, 0
    for start in tl.range(0, stop, N):
        may = allowed_of(start + n, stop, kinds_row)
        m = tl.load(mass_row + start + n, mask=may, other=0.0)
        whole += tl.sum(m.to(tl.float64), 0)
        n_odd += tl.sum(((m >= 0.0) & (m < float("inf"))).to(tl.int32) ^ 1, 0)
        n_may += tl.sum(may.to(tl.int32), 0)
    known = ((n_odd == 0) & (whole > 0.0)).to(tl.int32)
    step = tl.arange(0, N)
    reach_of = tl.load(masses + step, mask=step < STEPS, other=2.0) * whole
    for start in tl.range(0, n_k, N):
        j = start + n
        may = allowed_of(j, stop, kinds_row)
        m = tl.load(mass_row + j, mask=may, other=0.0)
        ahead = tl.zeros([N], tl.float64)
        for other in tl.range(0, stop, N):
            k = other + n
            theirs = tl.load(mass_row + k, mask=allowed_of(k, stop, kinds_row), other=0.0)
            larger = theirs[None, :] > m[:, None]
            tied = (theirs[None, :] == m[:, None]) & (k[None, :] < j[:, None])
            ahead += tl.sum(tl.where(larger | tied, theirs[None, :].to(tl.float64), 0.0), 1)
        found = tl.sum((ahead[:, None] >= reach_of[None, :]).to(tl.int32), 1)
        forced = is_forced(i, j, sizes, ranges, force, CAUSAL, NEAR)
        found = tl.where(forced, 0, found) * known
        found = tl.where(may, found, -1)
        tl.store(first + row * n_k + j, found, mask=j < n_k)
    tl.store(allowed + row, n_may)


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset", "n_rows"])
def survey_rows(
    q, k, q_scale, k_scale, mask, first, rows, dropped, q_strides, k_strides, mask_strides,
    Hq, group, Lq, Lk, n_q, n_k, offset, n_rows, scale_log2,
    TYPES: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """16 rows of one head: the share of their mass that each step drops; 0 for rows of -1."""
    sizes = BatchSizes(Lq, Lk, n_q, n_k, offset)
    CODED: tl.constexpr = q_scale is not None
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    h_k = wide(h // group)
    head, key_head = b * Hq + h, b * (Hq // group) + h_k
    n_k = sizes.n_k
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(rows + head * n_rows + place, mask=place < n_rows, other=-1).to(tl.int32)
    used = own >= 0
    own = tl.maximum(own, 0)
    queries = Rows(q, q_scale, q_strides)
    own_q, factor = load_rows(queries, head * sizes.Lq, h, b, 0, own, used, scale_log2, TYPES)
    last_key = own + sizes.offset
    tile = RowTile(own_q, factor, own, used, last_key)
    scored = scored_head(
        k, k_scale, k_strides, mask, mask_strides, h, b, h_k, key_head, sizes
    )  # fmt: skip
    stop = n_k
    if CAUSAL:
        stop = causal_stop(tl.max(last_key, 0), 0, n_k)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j in tl.range(0, stop):
        s = score_rows(tile, scored, j, TYPES, CAUSAL, MASK, CODED)
        best, total = add_scores(s, best, total)
    shift = tl.where(best == float("-inf"), 0.0, best)
    step = tl.arange(0, N)
    missing = tl.zeros([ROWS, N], tl.float32)
    first_row = first + (head * sizes.n_q + own // BLOCK_Q) * n_k
    for j in tl.range(0, stop):
        s = score_rows(tile, scored, j, TYPES, CAUSAL, MASK, CODED)
        mine = tl.sum(tl.math.exp2(s - shift[:, None]), 1)
        kept_from = tl.load(first_row + j, mask=used, other=-1)
        missing += tl.where(kept_from[:, None] > step[None, :], mine[:, None], 0.0)
    missing = missing / tl.where(total == 0.0, 1.0, total)[:, None]
    at = dropped + (head * n_rows + place)[:, None] * STEPS + step[None, :]
    tl.store(at, missing, mask=(place < n_rows)[:, None] & (step < STEPS)[None, :])


@triton.jit
def score_row(
    q, factor, row, last_key, scored, j,
    TYPES: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Scores of one row `q [BLOCK_D]` over key block j of a `Scored`, base 2, `[64]`; -inf where
    masked."""
    n, d = tl.arange(0, BLOCK_K), tl.arange(0, TYPES.BLOCK_D)
    left = scored.Lk - j * BLOCK_K
    at = scored.keys + wide(j) * wide(BLOCK_K * scored.stride_n)
    at = at + n[:, None] * scored.stride_n + d[None, :]  # [64, BLOCK_D]
    if CODED:
        x = tl.sum(tl.load(at).to(tl.int32) * q[None, :], 1).to(tl.float32)
    else:
        k = tl.load(at, mask=(n < left)[:, None] & (d < TYPES.D)[None, :], other=0.0)
        x = tl.sum(as_held(k, TYPES).to(tl.float32) * q[None, :], 1)
    s = x * (factor * tl.load(scored.scales + j))
    keep = n < left
    if CAUSAL:
        keep = keep & (j * BLOCK_K + n <= last_key)
    if MASK:
        m_at = scored.mask + wide(row) * scored.stride_mm
        m_at = m_at + (wide(j) * BLOCK_K + n) * scored.stride_mn
        given = tl.load(m_at, mask=n < left, other=0)
        if MASK == BOOL_MASK:
            keep = keep & (given != 0)
        if MASK == BIAS:
            bias = given.to(tl.float32)
            keep = keep & (bias != float("-inf"))
            s = s + bias * LOG2E
            s = tl.where(s < LOWEST, LOWEST, s)
    return tl.where(keep, s, float("-inf"))


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset", "n_rows"])
def measure_rows(
    q, k, v, q_scale, k_scale, v_scale, mask, kinds, first, steps, rows, outs, pooled,
    q_strides, k_strides, v_strides, mask_strides, kind_strides,
    Hq, group, Lq, Lk, n_q, n_k, offset, n_rows, scale_log2,
    TYPES: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, POOL_GROUP: tl.constexpr,
):  # fmt: skip
    """One row: outputs over the blocks of each of STEPS steps, then over all, `[STEPS + 1, DV]`, P
    and V rounded as `attend` rounds them."""
    sizes = BatchSizes(Lq, Lk, n_q, n_k, offset)
    CODED: tl.constexpr = q_scale is not None
    BLOCK_D: tl.constexpr = TYPES.BLOCK_D
    DV: tl.constexpr = VALUES.DV
    BLOCK_DV: tl.constexpr = VALUES.BLOCK_DV
    at_row, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h_k = wide(h // group)
    head, key_head = b * Hq + h, b * (Hq // group) + h_k
    Lk, n_k = sizes.Lk, sizes.n_k
    row = tl.maximum(tl.load(rows + head * n_rows + at_row).to(tl.int32), 0)
    n, d, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_at = q + b * q_strides.b + wide(h) * q_strides.h + wide(row) * q_strides.n + d
    if CODED:
        own_q = tl.load(q_at).to(tl.int32)  # [BLOCK_D]
        factor = scale_log2 * tl.load(q_scale + head * sizes.Lq + row)
    else:
        own_q = as_held(tl.load(q_at, mask=d < TYPES.D, other=0.0), TYPES).to(tl.float32)
        factor = scale_log2 + tl.sum(own_q * 0.0, 0)
    scored = scored_head(
        k, k_scale, k_strides, mask, mask_strides, h, b, h_k, key_head, sizes
    )  # fmt: skip
    v_base = v + b * v_strides.b + h_k * v_strides.h
    i = row // BLOCK_Q
    kinds_row = kinds_of_row(kinds, kind_strides, h, b, i, n_k)
    last_key = row + sizes.offset
    stop = n_k
    if CAUSAL:
        stop = causal_stop(last_key, 0, n_k)
    best = tl.full([], float("-inf"), tl.float32)
    for j in tl.range(0, stop):
        s = score_row(own_q, factor, row, last_key, scored, j, TYPES, CAUSAL, MASK, CODED)
        best = tl.maximum(best, tl.max(s, 0))
    shift = tl.where(best == float("-inf"), 0.0, best)
    slot = tl.arange(0, BLOCK_S)
    # A step behind the last keeps everything that may be attended.
    step = tl.load(steps + slot, mask=slot < STEPS, other=1 << 20)
    acc = tl.zeros([BLOCK_S, BLOCK_DV], tl.float32)
    sums = tl.zeros([BLOCK_S], tl.float32)
    first_row = first
    if STEPS > 0:
        first_row = first + (head * sizes.n_q + i) * n_k
    for j in tl.range(0, stop):
        s = score_row(own_q, factor, row, last_key, scored, j, TYPES, CAUSAL, MASK, CODED)
        left = Lk - j * BLOCK_K
        p = tl.math.exp2(s - shift)
        mine = tl.sum(p, 0)
        # own_v, values [64, BLOCK_DV]
        there = (n < left)[:, None] & (dv < DV)[None, :]
        if v_scale is not None:
            at = v_base + j * BLOCK_K + n[:, None] + dv[None, :] * v_strides.d
            own_v = tl.load(at)
            top = tl.max(p, 0)
            unit = tl.where(top > 0.0, top, 1.0) * (1.0 / VALUES.P_MAX)
            p = (p / unit).to(own_v.dtype).to(tl.float32) * unit
            values = own_v.to(tl.float32) * tl.load(v_scale + key_head * n_k + j)
        else:
            at = v_base + wide(j) * wide(BLOCK_K * v_strides.n)
            at = at + n[:, None] * v_strides.n + dv[None, :]
            values = as_held(tl.load(at, mask=there, other=0.0), TYPES).to(tl.float32)
            if TYPES.EXACT == "":
                p = p.to(TYPES.HELD).to(tl.float32)
        part = tl.sum(p[:, None] * values, 0)
        takes = step >= 0
        if STEPS > 0:
            kept_from = tl.load(first_row + j)
            takes = (step >= kept_from) & (kept_from >= 0) | (step == 1 << 20)
        if POOL_GROUP:
            ENTRIES: tl.constexpr = BLOCK_K // POOL_GROUP
            entry = j * ENTRIES + tl.arange(0, ENTRIES)
            valid = entry * POOL_GROUP < Lk
            at_entry = key_head * (n_k * ENTRIES) + entry
            mean = tl.load(pooled.k + at_entry[:, None] * BLOCK_D + d[None, :])
            if CODED:
                x = tl.sum(mean.to(tl.int32) * own_q[None, :], 1).to(tl.float32)
                x = x * factor * tl.load(pooled.scale + at_entry)
            else:
                x = (
                    tl.sum(mean.to(tl.float32) * own_q[None, :], 1)
                    * factor
                    * tl.load(scored.scales + j)
                )
            size = tl.where(valid, tl.minimum(POOL_GROUP, Lk - entry * POOL_GROUP), 1)
            x = x + tl.math.log2(size.to(tl.float32)) - shift
            opens = is_open(i, j + entry * 0, sizes, kinds_row, valid, CAUSAL)
            share = tl.where(opens, tl.math.exp2(x), 0.0)
            means = tl.load(pooled.v + at_entry[:, None] * BLOCK_DV + dv[None, :]).to(tl.float32)
            pooled_part = tl.sum(share[:, None] * means, 0)
            acc += tl.where(takes[:, None], part[None, :], pooled_part[None, :])
            sums += tl.where(takes, mine, tl.sum(share, 0))
        else:
            acc += tl.where(takes[:, None], part[None, :], 0.0)
            sums += tl.where(takes, mine, 0.0)
    out = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
    at = outs + ((head * n_rows + at_row) * (STEPS + 1) + slot[:, None]) * DV + dv[None, :]
    tl.store(at, out, mask=(slot <= STEPS)[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset"])
def take_steps(
    first, step, kinds, counts, indices, pools, kind_strides,
    Hq, Lq, Lk, n_q, n_k, offset, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The lists of one query block, at the step that its head takes."""
    sizes = BatchSizes(Lq, Lk, n_q, n_k, offset)
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_k = sizes.n_k
    head = b * Hq + h
    row = head * sizes.n_q + i
    kinds_row = kinds_of_row(kinds, kind_strides, h, b, i, n_k)
    taken = tl.load(step + head).to(tl.int32)
    n = tl.arange(0, AT_ONCE)
    n_kept = 0
    for start in tl.range(0, n_k, AT_ONCE):
        j = start + n
        own = tl.load(first + row * n_k + j, mask=j < n_k, other=-1)
        may = own >= 0
        kept = may & (own <= taken)
        flags = kept.to(tl.int32)
        slot = n_kept + tl.cumsum(flags, 0) - flags
        tl.store(indices + row * n_k + slot, j, mask=kept)
        n_kept += tl.sum(flags, 0)
        if pools is not None:
            opens = is_open(i, j, sizes, kinds_row, may, CAUSAL)
            tl.store(pools + row * n_k + j, (opens & (kept == 0)).to(tl.uint8), mask=j < n_k)
    for start in tl.range(n_kept, n_k, AT_ONCE):
        j = start + n
        tl.store(indices + row * n_k + j, tl.full([AT_ONCE], -1, tl.int32), mask=j < n_k)
    tl.store(counts + row, n_kept)
