"""Plans in the forms that other libraries take, and back.

    sparge.interop.to_flex(plan)         # FlexAttention's BlockMask
    sparge.interop.to_csr(plan)          # scipy, torch.sparse_bsr_tensor, flashinfer
    sparge.interop.to_block_lists(plan)  # flash-attention's block sparsity

`from_csr` and `from_block_lists` check what comes from outside; neither way loses anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .values.blockplan import (
    BlockPlan,
    block_counts,
    check_facts,
    checked_tokens,
    lists_from_mask,
    plan_from_mask,
)
from .values.call import BLOCK_K, BLOCK_Q
from .values.tokenmask import MIXED, OPEN, TokenMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class BlockCSR(NamedTuple):
    """Block rows of all heads below each other, int32: what `to_csr` returns.

    indptr `[B · Hq · n_q + 1]`: row `(b · Hq + h) · n_q + i_q` has `indices[indptr[row] :
    indptr[row + 1]]`. indices `[kept blocks]`: key blocks, ascending in each row, below `n_k`.

    These are `indptr` and `indices` of scipy's `bsr_matrix`, `crow_indices` and `col_indices` of
    `torch.sparse_bsr_tensor`, and what flashinfer's `BlockSparseAttentionWrapper.plan` takes with
    `R=128, C=64`. That wrapper runs one pattern for all of its heads, hence `to_csr(plan, b, h)`;
    keys must be a multiple of 64 there, and blocks that the diagonal or a mask cuts need its
    `mask`. (Its `VariableBlockSparseAttentionWrapper` takes a bool map of every head:
    `plan.to_mask()[b]`.)

    The bool map of the blocks is

        mask = torch.zeros(B * Hq * n_q, n_k, dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(indptr.tolist())):
            mask[row, indices[start:end].long()] = True
        mask = mask.view(B, Hq, n_q, n_k)
    """

    indptr: Tensor
    indices: Tensor


class BlockLists(NamedTuple):
    """Partial and full blocks of each row, int32: what `to_block_lists` returns.

    counts `[B, Hq, n_q]`; indices `[B, Hq, n_q, n_k]`: ascending, then 0. A full block needs no
    mask: every pair of it may attend, with no bias. All other kept blocks are partial: those that
    the causal diagonal cuts, or where `attn_mask` hides a pair or adds a bias.

    Names, order, shapes and dtype are those of flash-attention's `BlockSparseTensorsTorch`
    (`flash_attn.cute`), to be made with `BlockSparseTensorsTorch(*lists, block_size=(128, 64))`;
    its `mask_mod` runs on partial blocks only. A last block that the end of the sequence cuts
    needs no `mask_mod`: only pairs inside the sequence decide whether it is full. The kernels hide
    what lies behind the end in the last entry of either list, so the lists must be ascending.
    Its tiles must have 64 keys and divide 128 queries, as `tile_mn=(128, 64)`. On data-center
    Blackwell (SM100) two tiles share a list, so it asks for 256 queries where Lq > 128.

    The bool map of the blocks is

        mask = torch.zeros(B, Hq, n_q, n_k, dtype=torch.bool)
        for b, h, i_q in itertools.product(range(B), range(Hq), range(n_q)):
            mask[b, h, i_q, mask_block_idx[b, h, i_q, : mask_block_cnt[b, h, i_q]].long()] = True
            mask[b, h, i_q, full_block_idx[b, h, i_q, : full_block_cnt[b, h, i_q]].long()] = True
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor


def to_flex(plan: BlockPlan) -> BlockMask:
    """A FlexAttention `BlockMask` that computes the same pairs, compiled or eager."""
    if plan.has_mask:
        raise ValueError(
            "a plan made with attn_mask has no BlockMask equivalent here; make the plan "
            "without it and put the mask into your own mask_mod"
        )
    from torch.nn.attention.flex_attention import BlockMask

    kept, offset, is_causal = plan.to_mask(), plan.offset, plan.is_causal

    # Eager FlexAttention looks at the mask function alone, so that one knows the blocks too.
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = kept[b, h, q // BLOCK_Q, k // BLOCK_K]
        return block & (k <= q + offset) if is_causal else block

    return BlockMask.from_kv_blocks(
        *_split_lists(kept, plan.diagonal),
        BLOCK_SIZE=(BLOCK_Q, BLOCK_K),
        mask_mod=mask_mod,
        seq_lengths=(plan.Lq, plan.Lk),
    )


def to_csr(plan: BlockPlan, b: int | None = None, h: int | None = None) -> BlockCSR:
    """`(indptr, indices)` of the rows of all heads, or of batch entry `b` or head `h` alone.

    Stays on the plan's device; the host reads one number, how many blocks there are.
    """
    counts, indices = _pick_heads(plan.counts, b, h), _pick_heads(plan.indices, b, h)
    columns = indices[indices >= 0]
    if len(columns) > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"int32 positions reach 2147483647 blocks, the plan keeps {len(columns)}; export one "
            "head at a time: to_csr(plan, b, h)"
        )
    indptr = F.pad(counts.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return BlockCSR(indptr, columns)


def from_csr(
    indptr: Tensor,
    indices: Tensor,
    *,
    B: int = 1,
    Hq: int = 1,
    Lq: int,
    Lk: int,
    is_causal: bool = False,
    offset: int = 0,
    attn_mask: Tensor | None = None,
) -> BlockPlan:
    """The plan of a `BlockCSR` with `B · Hq` heads, less the blocks nothing may attend.

    Lengths, diagonal and mask are not part of it and are given again, as the plan has them:
    `offset` is 0 for `causal_align="top_left"` and `Lk - Lq` for `"bottom_right"`.
    """
    given = TokenMask(Lq, Lk, is_causal, offset, attn_mask)
    check_facts(Lq, Lk, is_causal, offset=offset)
    shape = (B, Hq, *block_counts(given))
    mask = _mask_of_csr(indptr, indices, shape)
    return plan_from_mask(mask, checked_tokens(given, (B, Hq), indptr.device))


def to_block_lists(plan: BlockPlan, attn_mask: Tensor | None = None) -> BlockLists:
    """Partial and full blocks, as flash-attention's block sparsity takes them.

    A plan made with `attn_mask` needs it again: it decides which blocks are full. Stays on the
    plan's device; the host reads nothing.
    """
    if plan.has_mask and attn_mask is None:
        raise ValueError(
            "attn_mask must be given for a plan made with one, got None: the mask decides "
            "which blocks are full; pass the same mask"
        )
    B, Hq, _ = plan.counts.shape
    given = replace(plan.diagonal, attn_mask=attn_mask)
    return _split_lists(plan.to_mask(), checked_tokens(given, (B, Hq), plan.counts.device))


def from_block_lists(
    mask_block_cnt: Tensor,
    mask_block_idx: Tensor,
    full_block_cnt: Tensor | None = None,
    full_block_idx: Tensor | None = None,
    *,
    Lq: int,
    Lk: int,
    is_causal: bool = False,
    offset: int = 0,
    attn_mask: Tensor | None = None,
) -> BlockPlan:
    """The plan of `BlockLists`, less the blocks nothing may attend.

    Entries behind a count are not read, so lists may be narrower than `n_k`. Full blocks that
    the diagonal or the mask cuts are refused. Lengths, diagonal and mask are as in `from_csr`.
    """
    given = TokenMask(Lq, Lk, is_causal, offset, attn_mask)
    check_facts(Lq, Lk, is_causal, offset=offset)
    n_q, n_k = block_counts(given)
    tensors = (mask_block_cnt, mask_block_idx, full_block_cnt, full_block_idx)
    pairs = _check_lists(dict(zip(BlockLists._fields, tensors, strict=True)), n_q, n_k)
    counts, _ = pairs["mask"]
    tokens = checked_tokens(given, (counts.shape[0], counts.shape[1]), counts.device)
    return plan_from_mask(_mask_of_lists(pairs, tokens, n_k), tokens)


def _split_lists(kept: Tensor, tokens: TokenMask) -> BlockLists:
    """Partial and full lists of a bool map; blocks that nothing may attend are left out."""
    kinds = tokens.block_kinds(kept.device)
    partial, full = kept & (kinds == MIXED), kept & (kinds == OPEN)
    return BlockLists(*lists_from_mask(partial, fill=0), *lists_from_mask(full, fill=0))


def _pick_heads(x: Tensor, b: int | None, h: int | None) -> Tensor:
    """`x` `[B, Hq, …]` of one batch entry and one head; None keeps all."""
    for dim, (name, index) in enumerate((("b", b), ("h", h))):
        if index is None:
            continue
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name} must be a whole number or None for all, got {index!r}")
        if not 0 <= index < x.shape[dim]:
            raise IndexError(f"{name} must be within 0 … {x.shape[dim] - 1}, got {index}")
        x = x.narrow(dim, index, 1)
    return x


def _mask_of_csr(indptr: Tensor, indices: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """shape: B, Hq, n_q, n_k."""
    _check_int32({"indptr": indptr, "indices": indices})
    B, Hq, n_q, n_k = shape
    for name, number in (("B", B), ("Hq", Hq)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be a whole number, got {number!r}")
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if indptr.dim() != 1 or indices.dim() != 1:
        raise ValueError(
            "indptr and indices must have one dimension, got shapes "
            f"{tuple(indptr.shape)} and {tuple(indices.shape)}; flatten the rows of all heads"
        )
    if len(indptr) != B * Hq * n_q + 1:
        raise ValueError(
            f"indptr must have B · Hq · n_q + 1 = {B} · {Hq} · {n_q} + 1 = {B * Hq * n_q + 1} "
            f"entries (query blocks of {BLOCK_Q} rows), got {len(indptr)}; B and Hq are arguments"
        )
    length, counts = len(indices), indptr.long().diff()
    if int(indptr[0]) != 0 or int(indptr[-1]) != length or bool((counts < 0).any()):
        raise ValueError(
            f"indptr must rise from 0 to the {length} entries of indices and never fall, got "
            f"{int(indptr[0])} … {int(indptr[-1])}, least step {int(counts.min())}"
        )
    return _mask_of_rows("indices", counts, indices, n_k).view(shape)


def _check_lists(
    lists: dict[str, Tensor | None], n_q: int, n_k: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Counts and indices by kind, or raise unless types and shapes fit; reads no values."""
    full = [lists["full_block_cnt"], lists["full_block_idx"]]
    if sum(x is None for x in full) == 1:
        raise ValueError(
            "full_block_cnt and full_block_idx belong together, got one of them; give both or none"
        )
    kinds = ("mask",) if full[0] is None else ("mask", "full")
    tensors = _check_int32({name: x for name, x in lists.items() if name.startswith(kinds)})
    shape = tuple(tensors["mask_block_cnt"].shape)
    if len(shape) != 3 or shape[2] != n_q or 0 in shape:
        raise ValueError(
            f"mask_block_cnt must be [B, Hq, {n_q}] (query blocks of {BLOCK_Q} rows), none of them "
            f"0, got {shape}"
        )
    for name, x in tensors.items():
        width, most = (f", up to {n_k}", 4) if name.endswith("idx") else ("", 3)
        if x.dim() != most or tuple(x.shape[:3]) != shape or max(x.shape[3:], default=0) > n_k:
            needed = ", ".join(map(str, shape)) + width
            raise ValueError(
                f"{name} must be [{needed}], after mask_block_cnt and {n_k} key blocks of "
                f"{BLOCK_K} rows, got {list(x.shape)}"
            )
    return {kind: (tensors[f"{kind}_block_cnt"], tensors[f"{kind}_block_idx"]) for kind in kinds}


def _mask_of_lists(pairs: dict[str, tuple[Tensor, Tensor]], tokens: TokenMask, n_k: int) -> Tensor:
    masks = []
    for kind, (counts, indices) in pairs.items():
        width = indices.shape[-1]
        if bool(((counts < 0) | (counts > width)).any()):
            raise ValueError(
                f"{kind}_block_cnt must be within 0 … {width}, the width of {kind}_block_idx, got "
                f"{int(counts.min())} … {int(counts.max())}"
            )
        used = torch.arange(width, device=indices.device) < counts[..., None]
        mask = _mask_of_rows(f"{kind}_block_idx", counts.flatten(), indices[used], n_k)
        masks.append(mask.view(*counts.shape, n_k))
    if len(masks) == 1:
        return masks[0]
    partial, full = masks
    if bool((partial & full).any()):
        raise ValueError(
            "mask_block_idx and full_block_idx must not share a block, which would be attended "
            "twice; name it in one of them"
        )
    if bool((full & (tokens.block_kinds(full.device) != OPEN)).any()):
        raise ValueError(
            "full_block_idx must name blocks whose every pair may attend, got some that the "
            f"diagonal (is_causal={tokens.is_causal}, offset {tokens.offset}) or attn_mask cuts; "
            "name those in mask_block_idx"
        )
    return partial | full


def _check_int32(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    checked: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be an int32 tensor, got {type(x).__name__}")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {x.dtype}; write {name}.int()")
        checked[name] = x
    devices = sorted({str(x.device) for x in checked.values()})
    if len(devices) > 1:
        raise ValueError(
            f"{', '.join(tensors)} must be on one device, got {' and '.join(devices)}; move them "
            "with .to(device)"
        )
    return checked


def _mask_of_rows(name: str, counts: Tensor, columns: Tensor, n_k: int) -> Tensor:
    """The bool map `[rows, n_k]` of rows that have `counts` of the columns, one row after another;
    raises unless each row's are ascending key blocks."""
    if bool(((columns < 0) | (columns >= n_k)).any()):
        raise ValueError(
            f"{name} must be key blocks 0 … {n_k - 1} (of {BLOCK_K} rows), got "
            f"{int(columns.min())} … {int(columns.max())}"
        )
    rows = torch.arange(len(counts), device=columns.device)
    places = rows.repeat_interleave(counts, output_size=len(columns)) * n_k + columns
    if not bool((places.diff() > 0).all()):
        raise ValueError(
            f"{name} must be ascending in each row, no block twice, got rows that are not; sort "
            "each row"
        )
    mask = torch.zeros(len(counts) * n_k, dtype=torch.bool, device=columns.device)
    mask[places] = True
    return mask.view(-1, n_k)
