"""Online softmax over the kept blocks, one query block of one head at a time, and its gradient.

    for each kept key block j, ascending:
        s        = scores of the block, base 2                          [rows, keys]
        skip     = all rows of a group of 16 stand pv_skip below their row_max
        p        = 2^(s - new row_max), 0 where skipped
        row_sum  = row_sum · 2^(old - new row_max) + Σ p
        acc      = acc     · 2^(old - new row_max) + p · V
    the same for the pooled entries of skipped open blocks, 64 entries at a time, without skip:
        s        = scores of the mean keys + log2(keys of each entry)
    out = acc / row_sum,  lse = ln2 · (row_max + log2 row_sum) + lse_shift

Rows with nothing to attend give zeros and -inf. A row that is not finite, or keeps a block that
is not, or pools one, gives NaN: never a plausible number in its place.

The gradient of the unquantized precisions; plan and skipped row groups are constants:
    p  = softmax(s) over the kept keys, less the skipped groups
    dv = pᵀ · do
    ds = p ∘ (do · vᵀ - delta),  delta = rowsum(do ∘ out) - dlse
    dq = scale · ds · k,  dk = scale · dsᵀ · q
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...support.ordered_sums import LN2, LOG2E, dot, exp2, fold_sum, shift_of
from ...values.blockplan import BlockPlan
from ...values.call import (
    BLOCK_K,
    BLOCK_Q,
    ROW_GROUP,
    Call,
    block_range,
    block_sizes,
    half_dtype,
    in_blocks,
    work_dtype,
)
from ...values.recipe import heads_of
from ...values.stages import (
    Attended,
    Gradients,
    Prepared,
    PreparedKeys,
    QTensor,
    Saved,
    finite_rows,
    working,
)
from ...values.tokenmask import OPEN, Index, TokenMask
from .scores import HeadScores


@dataclass(frozen=True)
class Tile:
    """One kept block of one query block, or 64 pooled entries, on the way of the online softmax."""

    cols: Index
    scores: Tensor
    old_max: Tensor
    row_max: Tensor
    skip: Tensor
    """Rows, in whole groups, that the second filter skips."""
    groups_skipped: int


def attend(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    queries, keys, recipe, dtype = prepared.queries, prepared.keys, call.recipe, call.dtype
    device = plan.counts.device
    out = torch.empty((call.B, call.Hq, call.Lq, call.Dv), dtype=dtype, device=device)
    lse = torch.empty((call.B, call.Hq, call.Lq), dtype=work_dtype(dtype), device=device)
    pv_skips = torch.zeros_like(plan.counts)
    pv_skip = heads_of(recipe.pv_skip, call.Hq, none=math.inf)
    finite_q, finite_k = finite_rows(queries.rows), _finite_blocks(keys)
    work = work_dtype(dtype) if recipe.precision == "exact" else torch.float32
    largest = _largest_values(keys.value)
    is_open = (tokens.block_kinds(device) == OPEN).expand(call.B, call.Hq, call.n_q, call.n_k)
    for b, h, i_q, kept in kept_blocks(plan):
        rows = block_range(i_q, BLOCK_Q, call.Lq)
        head = HeadScores(call, queries.rows, keys.key, tokens, b, h)
        bound = min(largest[b][head.h_k], torch.finfo(dtype).max)
        headroom = _headroom(bound, tokens.Lk, work)
        pools = is_open[b, h, i_q].nonzero().squeeze(1).tolist() if keys.entries is not None else []
        pools = sorted({*pools} - {*kept})
        row_max, row_sum, acc, skipped = _online_softmax(
            head, keys, rows, kept, pools, pv_skip[h], work, headroom
        )
        read = kept + pools
        nothing = row_max == -math.inf
        o = torch.where(nothing[:, None], 0.0, acc / row_sum[:, None] / headroom)
        if bound <= torch.finfo(work).max:
            # An average exceeds none of its values, however it was rounded on the way.
            o = o.clamp(-bound, bound)
        row_lse = torch.where(nothing, -math.inf, (row_max + torch.log2(row_sum)) * LN2)
        if queries.lse_shift is not None:
            row_lse = row_lse + queries.lse_shift[b, h, rows]
        broken = ~finite_q[b, h, rows] | ~finite_k[b, head.h_k, read].all()
        # A row whose every score overflowed has no maximum, yet it had something to attend.
        if nothing.any():
            broken |= nothing & _may_attend(tokens, b, h, rows, read, device)
        out[b, h, rows] = o.masked_fill(broken[:, None], math.nan).to(dtype)
        lse[b, h, rows] = row_lse.masked_fill(broken, math.nan).to(lse.dtype)
        pv_skips[b, h, i_q] = skipped
    return Attended(out, lse, pv_skips)


def backward(call: Call, saved: Saved, plan: BlockPlan, tokens: TokenMask) -> Gradients:
    """Derivatives of what the precision computes with: `"half"` rounds q, k and v, and the
    rounding itself is passed straight through."""
    work, precision = work_dtype(call.dtype), call.recipe.precision
    q, k, v = (working(x, precision).to(work) for x in (saved.query, saved.key, saved.value))
    do, o = saved.grad_out.to(work), saved.out.to(work)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (do * o).sum(-1) - saved.grad_lse.to(work)
    pv_skip = heads_of(call.recipe.pv_skip, call.Hq, none=math.inf)
    for b, h, i_q, kept in kept_blocks(plan):
        rows = block_range(i_q, BLOCK_Q, tokens.Lq)
        head = HeadScores(call, saved.query, saved.key, tokens, b, h)
        h_k = head.h_k
        for cols, p in _probabilities(list(walk(head, rows, kept, pv_skip[h])), work):
            dv[b, h_k, cols] += p.T @ do[b, h, rows]
            dp = do[b, h, rows] @ v[b, h_k, cols].T
            ds = p * (dp - delta[b, h, rows, None]) * call.scale
            dq[b, h, rows] += ds @ k[b, h_k, cols]
            dk[b, h_k, cols] += ds.T @ q[b, h, rows]
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


def kept_blocks(plan: BlockPlan) -> Iterator[tuple[int, int, int, list[int]]]:
    counts, indices = plan.counts.tolist(), plan.indices.tolist()
    for b, heads in enumerate(counts):
        for h, blocks in enumerate(heads):
            for i_q, count in enumerate(blocks):
                yield b, h, i_q, indices[b][h][i_q][:count]


def walk(head: HeadScores, rows: slice, kept: list[int], pv_skip: float) -> Iterator[Tile]:
    """The kept blocks in ascending order, each with the running maximum and the second filter."""
    row_max = None
    for i_k in kept:
        cols = block_range(i_k, BLOCK_K, head.tokens.Lk)
        scores = head.scores(rows, cols)
        block_max = scores.amax(1)
        old_max = torch.full_like(block_max, -math.inf) if row_max is None else row_max
        row_max = torch.maximum(old_max, block_max)
        # A block masked for a row lies infinitely low, but a filter that is off skips nothing.
        low = ((old_max - block_max) * LN2 >= pv_skip) & (pv_skip < math.inf)
        groups = in_blocks(low, -1, ROW_GROUP, fill=True)
        skipped = groups.all(1)
        skip = skipped.repeat_interleave(ROW_GROUP)[: low.shape[0]]
        yield Tile(cols, scores, old_max, row_max, skip, int(skipped.sum()))


def walk_pooled(
    head: HeadScores, rows: slice, blocks: list[int], group: int, row_max: Tensor
) -> Iterator[Tile]:
    """The pooled entries of some blocks, the keys of `head`, those of each 64 together: 8-bit V has
    a scale for 64 entries, and 8-bit P one for what is multiplied at once."""
    sizes, per_block = block_sizes(head.tokens.Lk, group).tolist(), BLOCK_K // group
    entries = [e for j in blocks for e in range(j * per_block, (j + 1) * per_block)]
    entries = [e for e in entries if e < len(sizes)]
    for _, tile in itertools.groupby(entries, key=lambda e: e // BLOCK_K):
        some = list(tile)
        cols = torch.tensor(some, device=row_max.device)
        scores = head.products(rows, cols) * (head.call.scale * LOG2E)
        log_sizes = torch.tensor([math.log2(sizes[e]) for e in some], dtype=torch.float64)
        scores = scores + log_sizes.to(scores)
        old_max, row_max = row_max, torch.maximum(row_max, scores.amax(1))
        none = torch.zeros(rows.stop - rows.start, dtype=torch.bool, device=scores.device)
        yield Tile(cols, scores, old_max, row_max, none, 0)


def _online_softmax(
    head: HeadScores,
    keys: PreparedKeys,
    rows: slice,
    kept: list[int],
    pools: list[int],
    pv_skip: float,
    work: torch.dtype,
    headroom: float,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`(row_max, row_sum, acc, row groups skipped)` of one query block over kept and pooled blocks;
    acc is of V · headroom."""
    n, value, entries = rows.stop - rows.start, keys.value, keys.entries
    row_max = torch.full((n,), -math.inf, dtype=work, device=value.device)
    row_sum = torch.zeros_like(row_max)
    acc = torch.zeros((n, value.shape[3]), dtype=work, device=value.device)
    skipped = 0

    def add(tile: Tile, v: Tensor | QTensor) -> None:
        nonlocal row_max, row_sum, acc, skipped
        row_max = tile.row_max
        shift = shift_of(row_max)
        p = exp2(tile.scores - shift[:, None]).masked_fill(tile.skip[:, None], 0.0)
        fade = exp2(tile.old_max - shift)
        row_sum = row_sum * fade + fold_sum(p, dim=1)
        acc = acc * fade[:, None] + _p_times_v(p, v, tile.cols, head, headroom)
        skipped += tile.groups_skipped

    for tile in walk(head, rows, kept, pv_skip):
        add(tile, value)
    if entries is not None:
        means = replace(head, key=entries.key)
        for tile in walk_pooled(means, rows, pools, entries.group, row_max):
            add(tile, entries.value)
    return row_max, row_sum, acc, skipped


def _p_times_v(
    p: Tensor, value: Tensor | QTensor, cols: Index, head: HeadScores, headroom: float
) -> Tensor:
    """`p · V` of one block in the precision of the run, V scaled by the headroom."""
    if isinstance(value, QTensor):
        codes = value.codes[head.b, head.h_k, cols].float()
        first = cols.start if isinstance(cols, slice) else int(cols[0])
        scale = value.scale[head.b, head.h_k, first // BLOCK_K] * headroom
        # One scale per row and block: under a row's one far maximum, whole blocks would code as 0.
        p_scale = p.amax(1, keepdim=True) / 255
        p_codes = torch.where(p_scale > 0, p / p_scale, p).round()
        # At most 255 · 127 · 64 < 2²⁴: exact in any order.
        return (p_codes @ codes) * p_scale * scale
    v = value[head.b, head.h_k, cols]
    if head.call.recipe.precision == "exact":
        return dot(p, working(v, "exact").T * headroom)
    return dot(p.to(half_dtype(head.call.dtype)).float(), working(v, "half").T * headroom)


def _headroom(largest: float, Lk: int, work: torch.dtype) -> float:
    """A power of two for V: 1, or small enough that a sum of Lk of its largest stays finite."""
    shrink = 2.0 ** -(Lk - 1).bit_length()
    return 1.0 if largest < torch.finfo(work).max * shrink else shrink


def _largest_values(value: Tensor | QTensor) -> list[list[float]]:
    """The largest finite `|v|` of each key head; for codes, a little more for their rounding."""
    if isinstance(value, QTensor):
        return (_finite(value.scale).amax((-1, -2)).double() * 127.0001).tolist()
    return _finite(value).abs().amax((-1, -2)).double().tolist()


def _finite(x: Tensor) -> Tensor:
    """Rows that are not finite become NaN elsewhere, and bound nothing."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def _finite_blocks(keys: PreparedKeys) -> Tensor:
    """Key blocks whose keys and values are all finite, bool `[B, Hk, n_k]`."""
    finite = finite_rows(keys.key) & finite_rows(keys.value)
    return in_blocks(finite, -1, BLOCK_K, fill=True).all(-1)


def _may_attend(
    tokens: TokenMask, b: int, h: int, rows: slice, kept: list[int], device: torch.device
) -> Tensor:
    """Rows that have any pair to attend among the kept blocks."""
    may = torch.zeros(rows.stop - rows.start, dtype=torch.bool, device=device)
    for i_k in kept:
        cols = block_range(i_k, BLOCK_K, tokens.Lk)
        allowed, _ = tokens.region(b, h, rows, cols, device)
        may |= torch.ones_like(may) if allowed is None else allowed.any(1)
    return may


def _probabilities(tiles: list[Tile], work: torch.dtype) -> Iterator[tuple[Index, Tensor]]:
    """What the forward gave each block. Made anew from the scores: an LSE under a bias as low as
    finfo.min has lost the digits that tell a row's keys apart."""
    if not tiles:
        return
    shift = shift_of(tiles[-1].row_max)[:, None]
    weights = [
        exp2(tile.scores - shift).masked_fill(tile.skip[:, None], 0.0).to(work) for tile in tiles
    ]
    row_sum = torch.stack([w.sum(1) for w in weights]).sum(0)[:, None]
    for tile, weight in zip(tiles, weights, strict=True):
        yield tile.cols, torch.where(row_sum == 0, 0.0, weight / row_sum)
