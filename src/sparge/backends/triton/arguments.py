"""Numbers of a call as the kernels take them: sizes, types, packs, masks, forced blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.device_constants import constant
from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import BLOCK_K, BLOCK_Q, Call, diagonal_offset, half_dtype, n_blocks
from ...values.recipe import PerHeadOrOff, heads_of
from ...values.tokenmask import OPEN, TokenMask
from . import select_kernel
from .architectures import Architecture, architecture_of
from .launch import launch
from .primitives import (
    BIAS,
    BOOL_MASK,
    NO_MASK,
    Kinds,
    KindStrides,
    Mask,
    MaskStrides,
    Pack,
    Sequence,
    Sizes,
    Types,
    ValueTypes,
)
from .select_kernel import SelectedLists

LOG2E = math.log2(math.e)
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


# --- sizes and types ----------------------------------------------------------------------------


def block_dim(D: int) -> int:
    """Channels of a tile of Q or K: a power of two, of at least what int8 units take at once."""
    return max(32, int(triton.next_power_of_2(D)))


def value_dim(Dv: int) -> int:
    """Channels of a tile of V."""
    return max(16, int(triton.next_power_of_2(Dv)))


def rotated(D: int) -> int:
    """Channels that one Hadamard transform takes."""
    return 1 << (D.bit_length() - 1)


def held_in(call: Call) -> torch.dtype:
    """The type that P and V, and in unquantized precisions Q and K, are multiplied in."""
    return torch.float32 if call.recipe.precision == "exact" else half_dtype(call.dtype)


def tl_type(dtype: torch.dtype) -> Any:
    return _TYPES[dtype]


def most_of(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def unit_rows(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def within(offset: int, Lq: int, Lk: int) -> int:
    """An offset of the same meaning that 32 bits can hold."""
    return max(-Lq, min(offset, Lk))


def per_head(
    numbers: PerHeadOrOff, Hq: int, none: float, factor: float, dtype: torch.dtype, device: Any
) -> Tensor:
    """One number for each query head, on the device."""
    return constant(tuple(x * factor for x in heads_of(numbers, Hq, none=none)), dtype, device)


def architecture(call: Call) -> Architecture:
    """Of the card that the call runs on."""
    found = architecture_of(*call.where)
    assert isinstance(found, Architecture)
    return found


def types_of(call: Call) -> Types:
    held = held_in(call)
    exact = architecture(call).fp32 if call.recipe.precision == "exact" else ""
    return Types(call.D, block_dim(call.D), tl_type(held), most_of(held), exact)


def value_types(call: Call, fp8: torch.dtype | None = None) -> ValueTypes:
    """fp8: the type of 8-bit values, None where they have more bits."""
    p_max = 1.0 if fp8 is None else most_of(fp8)
    return ValueTypes(call.Dv, value_dim(call.Dv), p_max, math.log2(p_max))


# --- packs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Sequences of different lengths, all in one launch. Query and key blocks of all sequences are
    numbered one after another; none holds rows of two sequences.

    sequences: how many, 0 for a plain batch. n_q, n_k: blocks of all of them; most_k: key blocks of
    the longest. table int32 `[sequences, 8]`: a `Sequence` for each. of_q, of_k: the sequence of
    each block."""

    sequences: int = 0
    n_q: int = 0
    n_k: int = 0
    most_k: int = 0
    table: Tensor | None = None
    of_q: Tensor | None = None
    of_k: Tensor | None = None
    cuts: tuple[tuple[int, ...], ...] = ()
    align: str = "top_left"

    def __bool__(self) -> bool:
        return self.sequences > 0

    def of_queries(self) -> Pack:
        """For kernels that have a program for each query block."""
        return Pack(self.table, self.of_q)

    def of_keys(self) -> Pack:
        """For kernels that have a program for each key block."""
        return Pack(self.table, self.of_k)

    def tiles(self, per_tile: int) -> Tensor | None:
        """Groups of query blocks that one program takes: `(sequence, first block of it)`."""
        if not self or self.table is None:
            return None
        return _tiles(self.cuts[0], per_tile, self.table.device)


NOT_PACKED = Packed()
PACKS = 16
"""Tables are kept for this many packs. A copy to the device waits for it; the layers of a model ask
for the same pack one after another, and a captured graph finds its tables where they were."""


def pack(cuts: tuple[list[int], list[int]], align: str, device: torch.device) -> Packed:
    """The tables of sequences cut at these rows; every sequence has queries and keys."""
    return _pack((tuple(cuts[0]), tuple(cuts[1])), align, device)


@lru_cache(maxsize=PACKS)
def _pack(
    cuts: tuple[tuple[int, ...], tuple[int, ...]], align: str, device: torch.device
) -> Packed:
    rows: list[Sequence] = []
    of_q: list[int] = []
    of_k: list[int] = []
    q_block = k_block = most_k = 0
    for seq, ((q0, q1), (k0, k1)) in enumerate(zip(*map(pairwise, cuts), strict=True)):
        Lq, Lk = q1 - q0, k1 - k0
        offset = within(diagonal_offset(Lq, Lk, align), Lq, Lk)
        rows.append(
            Sequence(
                q_row0=q0,
                Lq=Lq,
                k_row0=k0,
                Lk=Lk,
                q_block0=q_block,
                k_block0=k_block,
                offset=offset,
                octaves=(Lk - 1).bit_length(),
            )
        )
        n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
        of_q += [seq] * n_q
        of_k += [seq] * n_k
        q_block, k_block, most_k = q_block + n_q, k_block + n_k, max(most_k, n_k)
    table, of_q_block, of_k_block = (_copied(x, device) for x in (rows, of_q, of_k))
    return Packed(len(rows), q_block, k_block, most_k, table, of_q_block, of_k_block, cuts, align)


@lru_cache(maxsize=2 * PACKS)
def _tiles(cuts: tuple[int, ...], per_tile: int, device: torch.device) -> Tensor:
    made = [
        [seq, first]
        for seq, (start, stop) in enumerate(pairwise(cuts))
        for first in range(0, n_blocks(stop - start, BLOCK_Q), per_tile)
    ]
    return _copied(made, device)


def _copied(numbers: list[Any], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32).to(device)


def sizes_of(call: Call, packed: Packed, offset: int = 0) -> Sizes:
    """offset: of the diagonal, where a kernel looks at it."""
    n_k, n_blocks_k = packed.most_k or call.n_k, packed.n_k or call.n_k
    offset = within(offset, call.Lq, call.Lk)
    return Sizes(call.Lq, call.Lk, packed.n_q or call.n_q, n_k, n_blocks_k, offset)


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


def mask_of(tokens: TokenMask) -> Mask:
    mask = tokens.attn_mask
    if mask is None:
        return Mask(None, MaskStrides())
    strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
    data = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return Mask(data, MaskStrides(*strides))


def kinds_under(tokens: TokenMask) -> Kinds:
    """Kinds of blocks under the caller's mask."""
    if tokens.attn_mask is None:
        return Kinds(None, KindStrides())
    kinds = classify_blocks(tokens) if tokens.kinds is None else tokens.kinds
    strides = [0 if n == 1 else s for n, s in zip(kinds.shape[:2], kinds.stride(), strict=False)]
    return Kinds(kinds, KindStrides(*strides))


def classify_blocks(tokens: TokenMask) -> Tensor:
    """`TokenMask.block_kinds` under a caller's mask, by one kernel."""
    mask = tokens.attn_mask
    assert mask is not None
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    given = mask_of(tokens)
    kinds = mask.new_empty((*mask.shape[:2], n_q, n_k), dtype=torch.int8)
    launch(
        select_kernel.classify_blocks,
        (n_k, n_q, mask.shape[0] * mask.shape[1]),
        {"num_warps": 4},
        mask=given.data,
        kinds=kinds,
        strides=given.strides,
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
    first; None without a mask of the caller's, where the kernel finds out."""

    counts: Tensor
    blocks: Tensor
    n_full: Tensor | None = None


def lists_of(plan: BlockPlan, tokens: TokenMask, *, ascending: bool) -> Lists:
    """The lists of a plan, full blocks first. Without a mask they are ascending as they are."""
    kinds, counts, indices = kinds_under(tokens), plan.counts.contiguous(), plan.indices
    if kinds.data is None:
        return Lists(counts, indices.contiguous())
    n_full = torch.zeros_like(plan.counts)
    if ascending:  # every block is masked, in the order that the second filter asks for
        return Lists(counts, indices.contiguous(), n_full)
    lists = torch.empty_like(indices)
    B, Hq, n_q = counts.shape
    launch(
        select_kernel.split_lists,
        (n_q, Hq, B),
        {"num_warps": 2},
        counts=counts,
        indices=indices.contiguous(),
        kinds=kinds.data,
        lists=lists,
        n_full=n_full,
        strides=kinds.strides,
        Hq=Hq,
        Lk=tokens.Lk,
        n_q=n_q,
        n_k=indices.shape[3],
    )
    return Lists(counts, lists, n_full)


def pools_of(plan: BlockPlan, tokens: TokenMask) -> Tensor:
    """Blocks that are skipped and open, of a plan that was not made by this backend's select."""
    kinds = kinds_under(tokens).data
    if kinds is None:
        kinds = tokens.block_kinds(plan.indices.device)
    return ((kinds == OPEN) & ~plan.to_mask()).to(torch.uint8)


@lru_cache(maxsize=256)
def protected_blocks(
    protect: tuple[tuple[int, int | None], ...], Lq: int, Lk: int, offset: int, device: torch.device
) -> Tensor | None:
    """Protected ranges as `[ranges, 4]`: first and last + 1 of the key blocks, the query blocks."""
    rows = []
    for start, stop in protect:
        first, last, _ = slice(start, stop).indices(Lk)
        rows.append([*_blocks(first, last, BLOCK_K)])
        rows[-1] += _blocks(max(first - offset, 0), min(last - offset, Lq), BLOCK_Q)
    return torch.tensor(rows, dtype=torch.int32).to(device) if rows else None


def _blocks(start: int, stop: int, block: int) -> list[int]:
    return [start // block, n_blocks(stop, block)] if start < stop else [0, 0]


def forced_blocks(call: Call, tokens: TokenMask, device: torch.device) -> dict[str, Any]:
    recipe = call.recipe
    far = n_blocks(call.Lq, BLOCK_Q) * BLOCK_Q + call.n_k
    window = recipe.window(tokens.is_causal)
    return {
        "ranges": protected_blocks(recipe.protect, call.Lq, call.Lk, tokens.offset, device),
        "sink": min(recipe.sink_blocks, call.n_k),
        "reach": min(window, far),
        "n_ranges": len(recipe.protect),
        "NEAR": tokens.is_causal or window > 0,
    }
