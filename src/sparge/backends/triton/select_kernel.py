"""The kept blocks of a mass map, one program for each query block of a head.

    need      = τ · Σ mass, or a number of blocks
    threshold = the largest mass m such that the blocks of at least m reach the need: found by
                halving the range of fp32's bit patterns, which order as positive numbers do
    kept      = blocks above the threshold, then as many at the threshold, smallest index first, as
                the need takes; forced blocks; everything where the prediction is not known

No sort and no memory beyond the lists. Sums are fp64, so that equal masses tie exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import (
    BLOCK_K,
    BLOCK_Q,
    BOOL_MASK,
    EXCLUDED,
    OPEN,
    BatchSizes,
    Sizes,
    causal_stop,
    sequence_of,
    wide,
)

ALL, MASS, FRACTION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
AT_ONCE = tl.constexpr(256)


class Forced(NamedTuple):
    """Blocks that are kept whatever their mass. sink: first key blocks. reach: key blocks beside
    those of the diagonal. n_ranges: rows of `ranges [n_ranges, 4]`, each first and last + 1 of
    protected key blocks, then of query blocks."""

    sink: Any
    reach: Any
    n_ranges: Any


class SelectedLists(NamedTuple):
    """What is written: counts, allowed `[B, Hq, n_q]`; indices `[B, Hq, n_q, n_k]`, ascending, -1
    behind the last; pools of the same shape, 1 for blocks to pool, or None."""

    counts: Any
    indices: Any
    allowed: Any
    pools: Any


@triton.jit
def kinds_of_row(kinds, strides, h, b, i, n_k):
    """Kinds of the key blocks of query block i under the caller's mask; None without one."""
    kinds_row = kinds
    if kinds is not None:
        kinds_row = kinds + b * strides.b + wide(h) * strides.h + i * n_k
    return kinds_row


@triton.jit
def is_open(i, j, own, kinds_row, may, CAUSAL: tl.constexpr):
    """Whether every pair of the two blocks may attend, without a bias."""
    opens = may
    if kinds_row is not None:
        opens = opens & (tl.load(kinds_row + j, mask=may, other=0) == OPEN)
    elif CAUSAL:
        opens = opens & (tl.minimum((j + 1) * BLOCK_K, own.Lk) - 1 <= i * BLOCK_Q + own.offset)
    return opens


@triton.jit
def is_forced(i, j, own, ranges, force, CAUSAL: tl.constexpr, NEAR: tl.constexpr):
    """Sink blocks, the diagonal with its window, and protected ranges of query and key blocks."""
    i = i + j * 0
    forced = j < force.sink
    if CAUSAL or NEAR:
        first = i * BLOCK_Q + own.offset
        last = tl.minimum((i + 1) * BLOCK_Q, own.Lq) - 1 + own.offset
        exists = (last >= 0) & (first < own.Lk)
        low = tl.maximum(first, 0) // BLOCK_K - force.reach
        high = tl.minimum(last, own.Lk - 1) // BLOCK_K + force.reach
        forced = forced | (exists & (j >= low) & (j <= high))
    if ranges is not None:
        for at in tl.range(0, force.n_ranges):
            row = ranges + 4 * at
            forced = forced | ((j >= tl.load(row)) & (j < tl.load(row + 1)))
            forced = forced | ((i >= tl.load(row + 2)) & (i < tl.load(row + 3)))
    return forced


@triton.jit
def allowed_of(j, stop, kinds_row):
    """Blocks of a row that may attend anything: those before `stop`, less what a mask excludes."""
    may = j < stop
    if kinds_row is not None:
        may = may & (tl.load(kinds_row + j, mask=may, other=0) != EXCLUDED)
    return may


@triton.jit
def load_mass(mass_row, j, may):
    """`(mass, its bit pattern)`, 0 where nothing may attend; bit patterns order as the masses."""
    m = tl.load(mass_row + j, mask=may, other=0.0)
    return m, m.to(tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "Lq",
        "Lk",
        "n_q",
        "n_k",
        "n_blocks_k",
        "offset",
        "sink",
        "reach",
        "n_ranges",
    ]
)
def select_blocks(
    mass, amounts, q_similarity, k_similarity, least, ranges, kinds, made, pack, kind_strides, Hq,
    group, Lq, Lk, n_q, n_k, n_blocks_k, offset, sink, reach, n_ranges,
    RULE: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One query block of one head, into `made`, the `SelectedLists`. least: of each head, the
    self-similarity below which a block is kept; None judges none."""
    sizes = Sizes(Lq, Lk, n_q, n_k, n_blocks_k, offset)
    force = Forced(sink, reach, n_ranges)
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = 0
    if pack.table is not None:
        seq = tl.load(pack.seq_of_block + i)
    own = sequence_of(pack, seq, sizes)
    n_k = sizes.n_k
    row = (b * Hq + h) * sizes.n_q + i
    i_q = i - own.q_block0
    own_n_k = tl.cdiv(own.Lk, BLOCK_K)
    mass_row = mass
    if RULE != ALL:
        mass_row = mass + row * n_k
    kinds_row = kinds_of_row(kinds, kind_strides, h, b, i_q, n_k)
    n = tl.arange(0, AT_ONCE)
    stop = own_n_k
    if CAUSAL:
        last_row = tl.minimum((i_q + 1) * BLOCK_Q, own.Lq) - 1
        stop = causal_stop(last_row, own.offset, own_n_k)

    unknown = i < 0
    if RULE == ALL:
        unknown = i >= 0
    threshold, n_ties = 0, 0
    if RULE != ALL:
        amount = tl.load(amounts + h)
        whole = tl.zeros([], tl.float64)
        n_may, n_odd, most = 0, 0, 0
        for start in tl.range(0, stop, AT_ONCE):
            j = start + n
            may = allowed_of(j, stop, kinds_row)
            m, bits = load_mass(mass_row, j, may)
            whole += tl.sum(m.to(tl.float64), 0)
            n_may += tl.sum(may.to(tl.int32), 0)
            n_odd += tl.sum(((m >= 0.0) & (m < float("inf"))).to(tl.int32) ^ 1, 0)
            most = tl.maximum(most, tl.max(bits, 0))
        unknown = (n_odd > 0) | (whole <= 0.0)
        if RULE == MASS:
            need = amount * whole
            # A mass of 1 takes every block, however small the mass of the last ones.
            unknown = unknown | (amount >= 1.0)
        else:
            # 0.7 · 10 is a little over 7 in binary; 7 is meant.
            need = tl.maximum(tl.math.ceil(amount * n_may.to(tl.float64) - 1e-9), 1.0)
        low, high = 0, most + 1
        for _ in tl.range(0, 31):
            middle = low + (high - low) // 2
            reached = tl.zeros([], tl.float64)
            for start in tl.range(0, stop, AT_ONCE):
                j = start + n
                may = allowed_of(j, stop, kinds_row)
                m, bits = load_mass(mass_row, j, may)
                w = m.to(tl.float64)
                if RULE == FRACTION:
                    w = w * 0.0 + 1.0
                reached += tl.sum(tl.where(may & (bits >= middle), w, 0.0), 0)
            enough = reached >= need
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        threshold = low
        above = tl.zeros([], tl.float64)
        for start in tl.range(0, stop, AT_ONCE):
            j = start + n
            may = allowed_of(j, stop, kinds_row)
            m, bits = load_mass(mass_row, j, may)
            w = m.to(tl.float64)
            if RULE == FRACTION:
                w = w * 0.0 + 1.0
            above += tl.sum(tl.where(may & (bits > threshold), w, 0.0), 0)
        tie = threshold.to(tl.float32, bitcast=True).to(tl.float64)
        if RULE == FRACTION:
            tie = tie * 0.0 + 1.0
        # The fewest ties that reach the need, by the additions that a count of them stands for.
        n_ties = tl.math.ceil((need - above) / tl.where(tie > 0.0, tie, 1.0))
        n_ties = tl.maximum(n_ties, 1.0).to(tl.int32)
        n_ties = tl.where(above + (n_ties - 1).to(tl.float64) * tie >= need, n_ties - 1, n_ties)
        n_ties = tl.where(above + n_ties.to(tl.float64) * tie < need, n_ties + 1, n_ties)
    if least is not None:
        alike = tl.load(least + h)
        unknown = unknown | ((tl.load(q_similarity + row) >= alike) == 0)

    n_kept, n_allowed, ties_before = 0, 0, 0
    for start in tl.range(0, own_n_k, AT_ONCE):
        j = start + n
        may = allowed_of(j, stop, kinds_row)
        kept = may & (j * 0 + unknown.to(tl.int32) != 0)
        if RULE != ALL:
            m, bits = load_mass(mass_row, j, may)
            ties = (may & (bits == threshold)).to(tl.int32)
            rank = ties_before + tl.cumsum(ties, 0) - ties
            ties_before += tl.sum(ties, 0)
            kept = kept | (may & ((bits > threshold) | ((ties != 0) & (rank < n_ties))))
            kept = kept | (may & is_forced(i_q, j, own, ranges, force, CAUSAL, NEAR))
            if least is not None:
                at = k_similarity + (b * (Hq // group) + h // group) * sizes.n_blocks_k
                at = at + own.k_block0 + j
                kept = kept | (may & ((tl.load(at, mask=may, other=1.0) >= alike) == 0))
        flags = kept.to(tl.int32)
        slot = n_kept + tl.cumsum(flags, 0) - flags
        tl.store(made.indices + row * n_k + slot, j, mask=kept)
        n_kept += tl.sum(flags, 0)
        n_allowed += tl.sum(may.to(tl.int32), 0)
        if made.pools is not None:
            opens = is_open(i_q, j, own, kinds_row, may, CAUSAL)
            at = made.pools + row * n_k + j
            tl.store(at, (opens & (kept == 0)).to(tl.uint8), mask=j < own_n_k)
    for start in tl.range(n_kept, n_k, AT_ONCE):
        j = start + n
        tl.store(made.indices + row * n_k + j, tl.full([AT_ONCE], -1, tl.int32), mask=j < n_k)
    tl.store(made.counts + row, n_kept)
    tl.store(made.allowed + row, n_allowed)


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset"])
def classify_blocks(
    mask, kinds, strides, Lq, Lk, n_q, n_k, offset, heads,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Excluded, mixed or open, of every block under the caller's mask and the diagonal."""
    sizes = BatchSizes(Lq, Lk, n_q, n_k, offset)
    j, i = tl.program_id(0), tl.program_id(1)
    b, h = tl.program_id(2) // heads, tl.program_id(2) % heads
    base = mask + b.to(tl.int64) * strides.b + h.to(tl.int64) * strides.h
    rows, cols = i * BLOCK_Q + tl.arange(0, BLOCK_Q), j * BLOCK_K + tl.arange(0, BLOCK_K)
    there = (rows < sizes.Lq)[:, None] & (cols < sizes.Lk)[None, :]  # [128, 64]
    at = base + rows[:, None].to(tl.int64) * strides.m
    at = at + cols[None, :].to(tl.int64) * strides.n
    given = tl.load(at, mask=there, other=0)
    if MASK == BOOL_MASK:
        may = there & (given != 0)
        plain = may
    else:
        may = there & (given != float("-inf"))
        plain = there & (given == 0.0)
    if CAUSAL:
        seen = cols[None, :] <= rows[:, None] + sizes.offset
        may, plain = may & seen, plain & seen
    some = tl.max(tl.max(may.to(tl.int32), 1), 0)
    every = tl.min(tl.min((plain | (there == 0)).to(tl.int32), 1), 0)
    row = tl.program_id(2).to(tl.int64) * sizes.n_q + i
    tl.store(kinds + row * sizes.n_k + j, (some + every).to(tl.int8))


@triton.jit(do_not_specialize=["Lk", "n_q", "n_k"])
def split_lists(counts, indices, kinds, lists, n_full, strides, Hq, Lk, n_q, n_k):
    """Blocks that need no mask first, then the others; both ascending."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (b * Hq + h) * n_q + i
    kinds_row = kinds_of_row(kinds, strides, h, b, i, n_k)
    n = tl.arange(0, AT_ONCE)
    count = tl.load(counts + row)
    done = 0
    for want in tl.range(0, 2):
        for start in tl.range(0, count, AT_ONCE):
            listed = start + n < count
            j = tl.load(indices + row * n_k + start + n, mask=listed, other=0)
            kind = tl.load(kinds_row + j, mask=listed, other=0)
            full = (kind == OPEN) & ((j + 1) * BLOCK_K <= Lk)
            mine = (listed & (full == (want == 0))).to(tl.int32)
            slot = done + tl.cumsum(mine, 0) - mine
            tl.store(lists + row * n_k + slot, j, mask=mine != 0)
            done += tl.sum(mine, 0)
        if want == 0:
            tl.store(n_full + row, done)
