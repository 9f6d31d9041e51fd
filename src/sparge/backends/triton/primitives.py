"""What several kernels are made of: positions, types, rotation, 8-bit codes, online softmax.

Arguments that belong together are named tuples. Triton 3.6 to 3.9 take them as arguments of
kernels, one machine argument for each field that is not a constant, and kernels may make and return
them. What to know of them:

- `do_not_specialize` does not reach into tuples, so lengths are arguments of their own.
- The order of a kernel's machine arguments is part of its machine code: registers are allocated by
  it. Pointers come first, then strides, then numbers.
- No field is called `values` or `type`: Triton's tuples have attributes of these names.
- A parameter in capitals is a `tl.constexpr`; if it is a tuple, its fields are plain numbers to
  Triton before 3.8: an operator or a builtin takes them, a function written in Triton (`tl.zeros`)
  does not, so functions get the whole tuple.
- What follows a `return` under an `if` on a constant is compiled, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK_Q, BLOCK_K, ROW_GROUP = tl.constexpr(128), tl.constexpr(64), tl.constexpr(16)
NO_MASK, BOOL_MASK, BIAS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EXCLUDED, OPEN = tl.constexpr(0), tl.constexpr(2)
"""Kinds of blocks under a mask; what is neither is mixed."""
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)


# --- positions ----------------------------------------------------------------------------------


class Sequence(NamedTuple):
    """Where one sequence of a pack lies: a row of the int32 table `[sequences, 8]`, in the order of
    its columns. octaves: ceil(log2(Lk))."""

    q_row0: Any
    Lq: Any
    k_row0: Any
    Lk: Any
    q_block0: Any
    k_block0: Any
    offset: Any
    octaves: Any


N_COLUMNS = tl.constexpr(len(Sequence._fields))


class Pack(NamedTuple):
    """table: int32 `[sequences, 8]`, a `Sequence` for each; None for a plain batch.
    seq_of_block: the sequence of each query block, or key block, that there is a program for."""

    table: Any = None
    seq_of_block: Any = None


class Sizes(NamedTuple):
    """Lengths at run time, of which no kernel is compiled anew. n_q: query blocks of all sequences.
    n_k: key blocks of the longest one, the width of maps and lists. n_blocks_k: key blocks of all
    sequences. offset: key `i + offset` is on the diagonal of query i."""

    Lq: int
    Lk: int
    n_q: int
    n_k: int
    n_blocks_k: int
    offset: int


@triton.jit
def wide(x):
    """A whole number as int64: products of positions and strides pass 2^31 on long sequences."""
    return x * tl.full([], 1, tl.int64)


@triton.jit
def sequence_of(pack, seq, Lq, Lk, offset):
    """The `Sequence` of a program: a row of the pack's table, or of a plain batch the call's own
    lengths; 0 where a kernel does not look."""
    if pack.table is not None:
        row = pack.table + seq * N_COLUMNS
        own = Sequence(
            q_row0=tl.load(row),
            Lq=tl.load(row + 1),
            k_row0=tl.load(row + 2),
            Lk=tl.load(row + 3),
            q_block0=tl.load(row + 4),
            k_block0=tl.load(row + 5),
            offset=tl.load(row + 6),
            octaves=tl.load(row + 7),
        )
    else:
        own = Sequence(0, Lq, 0, Lk, 0, 0, offset, 0)
    return own


@triton.jit
def causal_stop(last_row, offset, n_k):
    """Key blocks of `n_k` that rows up to `last_row` see under the diagonal."""
    return tl.minimum(n_k, tl.maximum(last_row + offset + BLOCK_K, 0) // BLOCK_K)


# --- tensors ------------------------------------------------------------------------------------


class Strides(NamedTuple):
    """Of rows `[B, H, n, d]`."""

    b: Any
    h: Any
    n: Any
    d: Any = 1


class MaskStrides(NamedTuple):
    """0 along dimensions that a mask is broadcast over."""

    b: Any = 0
    h: Any = 0
    m: Any = 0
    n: Any = 0


class KindStrides(NamedTuple):
    b: Any = 0
    h: Any = 0


class Rows(NamedTuple):
    """Queries, keys or values `[B, H, L, D]`: the caller's, or 8-bit codes if there is a scale. fp8
    values have log2 of their scales in attend_blocks."""

    data: Any
    scale: Any
    strides: Any


class View(NamedTuple):
    """The caller's mask `[B, Hq, Lq, Lk]`, or the kinds of the blocks under it, int8
    `[B, Hq, n_q, n_k]`; None without a mask."""

    data: Any
    strides: Any


class PooledEntries(NamedTuple):
    """Means of groups of keys and values: k `[B, Hk, entries, BLOCK_D]`, v
    `[B, Hk, entries, BLOCK_DV]`, scale of codes. blocks: which blocks are pooled,
    `[B, Hq, n_q, n_k]`."""

    k: Any = None
    v: Any = None
    scale: Any = None
    blocks: Any = None


# --- types --------------------------------------------------------------------------------------


class Types(NamedTuple):
    """D: channels of q and k, BLOCK_D: of their tiles. HELD: the type that tiles are multiplied in,
    MOST: its largest number. EXACT: how fp32 is multiplied, "" where tiles are not fp32."""

    D: int
    BLOCK_D: int
    HELD: Any
    MOST: float
    EXACT: str


class ValueTypes(NamedTuple):
    """DV: channels of v, BLOCK_DV: of its tiles. P_MAX: the largest 8-bit weight, 1 if weights have
    more bits; P_LOG: log2 of it."""

    DV: int
    BLOCK_DV: int
    P_MAX: float
    P_LOG: float


@triton.jit
def as_held(x, TYPES: tl.constexpr):
    """Numbers in the type that they are multiplied in; beyond its range, its largest."""
    if x.dtype == TYPES.HELD:
        return x
    if tl.float32 == TYPES.HELD:
        return x.to(tl.float32)
    x = x.to(tl.float32)
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, tl.minimum(tl.maximum(x, -TYPES.MOST), TYPES.MOST), x).to(TYPES.HELD)


@triton.jit
def round_even(x):
    """The nearest whole number, ties to even, of |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


# --- rotation and codes -------------------------------------------------------------------------


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
    """`(codes [ROWS, BLOCK_D], scale [ROWS])` of the rows of `x [ROWS, BLOCK_D]`, rotated; one
    scale for all of them if TOGETHER."""
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


# --- blocks -------------------------------------------------------------------------------------


@triton.jit
def pool_rows(x, n_valid, SIZE: tl.constexpr):
    """The mean `[D]` of the first n_valid rows of `x [SIZE, D]`, the others being zero; finite if
    they are."""
    return tl.sum(x * (1.0 / SIZE), 0) * tl.math.div_rn(SIZE * 1.0, n_valid.to(tl.float32))


@triton.jit
def self_similarity(x, n_valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """`|| mean of the rows' unit vectors ||²` of `x [SIZE, BLOCK_D]`; NaN if a row is not
    finite."""
    largest = tl.max(tl.abs(x), 1)  # [SIZE]
    odd = tl.sum(x * 0.0, 1)  # [SIZE]
    safe = tl.broadcast_to(tl.where(largest > 0.0, largest, 1.0)[:, None], [SIZE, BLOCK_D])
    unit = tl.math.div_rn(x, safe)
    norm = tl.sqrt_rn(tl.sum(unit * unit, 1))
    norm = tl.broadcast_to(tl.where(norm > 0.0, norm, 1.0)[:, None], [SIZE, BLOCK_D])
    mean = tl.sum(tl.math.div_rn(unit, norm) + odd[:, None], 0) / n_valid.to(tl.float32)
    return tl.sum(mean * mean, 0)


@triton.jit
def held_share(j, Lk):
    """log2(n / BLOCK_K) of the n valid keys of a block."""
    size = tl.maximum(tl.minimum(Lk - j * BLOCK_K, BLOCK_K), 1)
    return tl.math.log2(size.to(tl.float32) * (1.0 / BLOCK_K))


@triton.jit
def add_scores(s, best, total):
    """`best`, `total [rows]`: running maximum and sum of exponentials, base 2, with the scores
    `s [rows, n]` added."""
    new = tl.maximum(best, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.math.exp2(best - shift) + tl.sum(tl.math.exp2(s - shift[:, None]), 1)
    return new, total
