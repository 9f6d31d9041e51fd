"""Which blocks: their kinds under a mask, those that are forced, and the lists of those kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import Call, n_blocks
from ...values.tokenmask import TokenMask
from .arguments import Packed, within
from .launch import launch
from .primitives import (
    BIAS,
    BLOCK_K,
    BLOCK_Q,
    BOOL_MASK,
    EXCLUDED,
    NO_MASK,
    OPEN,
    KindStrides,
    MaskStrides,
    View,
    wide,
)

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
def kinds_of_row(kinds, h, b, i, n_k):
    """Kinds of the key blocks of query block i under the caller's mask; None without one."""
    kinds_row = kinds.data
    if kinds.data is not None:
        kinds_row = kinds.data + b * kinds.strides.b + wide(h) * kinds.strides.h + i * n_k
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
def append_kept(made, row, j, kept, opens, n_kept, n_k, stop):
    """How many blocks of a row are kept after those among key blocks `j`, which are listed in the
    `SelectedLists`. Open ones that are not kept are pooled."""
    flags = kept.to(tl.int32)
    slot = n_kept + tl.cumsum(flags, 0) - flags
    tl.store(made.indices + row * n_k + slot, j, mask=kept)
    if made.pools is not None:
        at = made.pools + row * n_k + j
        tl.store(at, (opens & (kept == 0)).to(tl.uint8), mask=j < stop)
    return n_kept + tl.sum(flags, 0)


@triton.jit
def end_list(made, row, n_kept, n_k):
    """-1 behind the list of a row, and its count."""
    for start in tl.range(n_kept, n_k, AT_ONCE):
        j = start + tl.arange(0, AT_ONCE)
        tl.store(made.indices + row * n_k + j, tl.full([AT_ONCE], -1, tl.int32), mask=j < n_k)
    tl.store(made.counts + row, n_kept)


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset"])
def classify_blocks(
    mask, kinds, Lq, Lk, n_q, n_k, offset, heads,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Excluded, mixed or open, of every block under the caller's mask and the diagonal."""
    j, i = tl.program_id(0), tl.program_id(1)
    b, h = tl.program_id(2) // heads, tl.program_id(2) % heads
    strides = mask.strides
    base = mask.data + b.to(tl.int64) * strides.b + h.to(tl.int64) * strides.h
    rows, cols = i * BLOCK_Q + tl.arange(0, BLOCK_Q), j * BLOCK_K + tl.arange(0, BLOCK_K)
    there = (rows < Lq)[:, None] & (cols < Lk)[None, :]  # [128, 64]
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
        seen = cols[None, :] <= rows[:, None] + offset
        may, plain = may & seen, plain & seen
    some = tl.max(tl.max(may.to(tl.int32), 1), 0)
    every = tl.min(tl.min((plain | (there == 0)).to(tl.int32), 1), 0)
    row = tl.program_id(2).to(tl.int64) * n_q + i
    tl.store(kinds + row * n_k + j, (some + every).to(tl.int8))


@triton.jit(do_not_specialize=["Lk", "n_q", "n_k"])
def split_lists(counts, indices, lists, n_full, kinds, Hq, Lk, n_q, n_k):
    """Blocks that need no mask first, then the others; both ascending."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (b * Hq + h) * n_q + i
    kinds_row = kinds_of_row(kinds, h, b, i, n_k)
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


# --- masks and forced blocks --------------------------------------------------------------------


def mask_kind(tokens: TokenMask) -> int:
    mask = tokens.attn_mask
    kind = NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else BIAS
    return int(kind.value)


def is_causal(tokens: TokenMask) -> bool:
    """Whether the diagonal hides anything."""
    return tokens.is_causal and tokens.offset < tokens.Lk - 1


def hides(tokens: TokenMask, packed: Packed) -> bool:
    """The same of the sequences of a pack, whose own diagonals the kernels look up."""
    return tokens.is_causal if packed else is_causal(tokens)


def mask_of(tokens: TokenMask) -> View:
    mask = tokens.attn_mask
    if mask is None:
        return View(None, MaskStrides())
    strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
    data = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return View(data, MaskStrides(*strides))


def kinds_under(tokens: TokenMask) -> View:
    """Kinds of blocks under the caller's mask."""
    if tokens.attn_mask is None:
        return View(None, KindStrides())
    kinds = block_kinds(tokens) if tokens.kinds is None else tokens.kinds
    strides = [0 if n == 1 else s for n, s in zip(kinds.shape[:2], kinds.stride(), strict=False)]
    return View(kinds, KindStrides(*strides))


def block_kinds(tokens: TokenMask) -> Tensor:
    """`TokenMask.block_kinds` under a caller's mask, by one kernel."""
    mask = tokens.attn_mask
    assert mask is not None
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q.value), n_blocks(tokens.Lk, BLOCK_K.value)
    kinds = mask.new_empty((*mask.shape[:2], n_q, n_k), dtype=torch.int8)
    launch(
        classify_blocks,
        (n_k, n_q, mask.shape[0] * mask.shape[1]),
        {"num_warps": 4},
        mask=mask_of(tokens),
        kinds=kinds,
        Lq=tokens.Lq,
        Lk=tokens.Lk,
        n_q=n_q,
        n_k=n_k,
        offset=within(tokens.offset, tokens.Lq, tokens.Lk),
        heads=mask.shape[1],
        CAUSAL=is_causal(tokens),
        MASK=mask_kind(tokens),
    )
    return kinds


@dataclass(frozen=True, eq=False)
class PooledPlan(BlockPlan):
    """A plan that `attend` of the same call reads. pools: of each block, whether it is skipped and
    open, so that its pooled entries are attended, uint8 `[B, Hq, n_q, n_k]`."""

    pools: Tensor | None = None


def plan_of(
    lists: SelectedLists, tokens: TokenMask, *, measured: Tensor | None = None
) -> BlockPlan:
    plan = plan_from_lists(lists.counts, lists.indices, lists.allowed, tokens, measured=measured)
    if lists.pools is None:
        return plan
    own = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
    return PooledPlan(**own, pools=lists.pools).trust()


@dataclass(frozen=True)
class Lists:
    """Kept blocks `[B, Hq, n_q, n_k]` and their counts. n_full: how many need no mask, which are
    first; None without a mask of the caller's, where the kernel finds out. pools: as of
    `SelectedLists`."""

    counts: Tensor
    blocks: Tensor
    n_full: Tensor | None = None
    pools: Tensor | None = None


def lists_of(plan: BlockPlan, tokens: TokenMask, *, ascending: bool, pooled: bool) -> Lists:
    """The lists of a plan, blocks that need no mask first unless they are to be ascending, as the
    second filter asks for."""
    kinds, counts, indices = (
        kinds_under(tokens),
        plan.counts.contiguous(),
        plan.indices.contiguous(),
    )
    pools = _pools(plan, tokens, kinds.data) if pooled else None
    if kinds.data is None:
        return Lists(counts, indices, pools=pools)
    n_full = torch.zeros_like(counts)
    if ascending:
        return Lists(counts, indices, n_full, pools)
    lists = torch.empty_like(indices)
    B, Hq, n_q = counts.shape
    launch(
        split_lists,
        (n_q, Hq, B),
        {"num_warps": 2},
        counts=counts,
        indices=indices,
        lists=lists,
        n_full=n_full,
        kinds=kinds,
        Hq=Hq,
        Lk=tokens.Lk,
        n_q=n_q,
        n_k=indices.shape[3],
    )
    return Lists(counts, lists, n_full, pools)


def _pools(plan: BlockPlan, tokens: TokenMask, kinds: Tensor | None) -> Tensor | None:
    """Blocks that are skipped and open: as `select` of this call found, or read off the plan."""
    if isinstance(plan, PooledPlan):
        return plan.pools
    if kinds is None:
        kinds = tokens.block_kinds(plan.indices.device)
    return ((kinds == OPEN.value) & ~plan.to_mask()).to(torch.uint8)


@lru_cache(maxsize=256)
def protected_blocks(
    protect: tuple[tuple[int, int | None], ...], Lq: int, Lk: int, offset: int, device: torch.device
) -> Tensor | None:
    """Protected ranges as `[ranges, 4]`: first and last + 1 of the key blocks, the query blocks."""
    rows = []
    for start, stop in protect:
        first, last, _ = slice(start, stop).indices(Lk)
        rows.append([*_blocks(first, last, BLOCK_K.value)])
        rows[-1] += _blocks(max(first - offset, 0), min(last - offset, Lq), BLOCK_Q.value)
    return torch.tensor(rows, dtype=torch.int32).to(device) if rows else None


def _blocks(start: int, stop: int, block: int) -> list[int]:
    return [start // block, n_blocks(stop, block)] if start < stop else [0, 0]


def forced_blocks(call: Call, tokens: TokenMask, device: torch.device) -> dict[str, Any]:
    recipe = call.recipe
    far = call.n_q * BLOCK_Q.value + call.n_k
    window = recipe.window(tokens.is_causal)
    return {
        "ranges": protected_blocks(recipe.protect, call.Lq, call.Lk, tokens.offset, device),
        "sink": min(recipe.sink_blocks, call.n_k),
        "reach": min(window, far),
        "n_ranges": len(recipe.protect),
        "NEAR": tokens.is_causal or window > 0,
    }
