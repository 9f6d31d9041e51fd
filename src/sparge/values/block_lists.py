"""Blocks in the forms that other libraries take: masks, index lists, CSR and FlexAttention.

Everything here converts between such a form and a bool map of blocks `[B, Hq, n_q, n_k]`. What
comes from outside is checked first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .geometry import BLOCK_K, BLOCK_Q, MAX_OFFSET, n_blocks
from .tokenmask import MIXED, OPEN, TokenMask, as_4d, check_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Shape = tuple[int, int, int, int]
"""B, Hq, n_q, n_k."""
_MASK_DTYPES = (torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16)


class BlockCSR(NamedTuple):
    """Block rows of all heads below each other, int32: `BlockPlan.to_csr`.

    indptr `[B · Hq · n_q + 1]`: row `(b · Hq + h) · n_q + i_q` has `indices[indptr[row] :
    indptr[row + 1]]`. indices `[kept blocks]`: key blocks, ascending in each row, below `n_k`.

    These are `indptr` and `indices` of scipy's `bsr_matrix`, `crow_indices` and `col_indices` of
    `torch.sparse_bsr_tensor`, and what flashinfer's `BlockSparseAttentionWrapper.plan` takes with
    `R=128, C=64`. That wrapper runs one pattern for all of its heads, hence `to_csr(b, h)`; keys
    must be a multiple of 64 there, and blocks that the diagonal or a mask cuts need its `mask`.
    (Its `VariableBlockSparseAttentionWrapper` takes a bool map of every head: `to_mask()[b]`.)

    The bool map of the blocks is

        mask = torch.zeros(B * Hq * n_q, n_k, dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(indptr.tolist())):
            mask[row, indices[start:end].long()] = True
        mask = mask.view(B, Hq, n_q, n_k)
    """

    indptr: Tensor
    indices: Tensor


class BlockLists(NamedTuple):
    """Partial and full blocks of each row, int32: `BlockPlan.to_block_lists`.

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


# --- from a map -------------------------------------------------------------------------------


def lists_of(kept: Tensor, *, fill: int = -1) -> tuple[Tensor, Tensor]:
    """Counts and ascending index lists, `fill` behind them."""
    counts = kept.sum(-1, dtype=torch.int32)
    order = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    used = torch.arange(kept.shape[-1], device=kept.device) < counts[..., None]
    return counts, torch.where(used, order, fill).to(torch.int32)


def mask_of(counts: Tensor, indices: Tensor, n_k: int) -> Tensor:
    """The bool map of lists; entries behind the count are not looked at."""
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Unused entries land in an extra column that is cut off again.
    where = torch.where(used, indices, n_k).long()
    mask = torch.zeros((*indices.shape[:-1], n_k + 1), dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, where, True)[..., :n_k]


def csr_of(counts: Tensor, indices: Tensor, b: int | None, h: int | None) -> BlockCSR:
    """CSR of a plan's counts and lists; the host reads the number of kept blocks."""
    counts, indices = _pick_heads(counts, b, h), _pick_heads(indices, b, h)
    columns = indices[indices >= 0]
    if len(columns) > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"int32 positions reach 2147483647 blocks, the plan keeps {len(columns)}; export one "
            "head at a time: to_csr(b, h)"
        )
    indptr = F.pad(counts.flatten().cumsum(0), (1, 0)).to(torch.int32)
    return BlockCSR(indptr, columns)


def split_lists(kept: Tensor, tokens: TokenMask, *, fill: int = 0) -> BlockLists:
    """Partial and full lists of a bool map; blocks that nothing may attend are left out."""
    kinds = tokens.block_kinds(kept.device)
    partial, full = kept & (kinds == MIXED), kept & (kinds == OPEN)
    return BlockLists(*lists_of(partial, fill=fill), *lists_of(full, fill=fill))


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


def flex_mask(kept: Tensor, tokens: TokenMask) -> BlockMask:
    """A `BlockMask` of a bool map and a diagonal.

    Eager FlexAttention looks at the mask function alone, so that one knows the blocks too.
    """
    from torch.nn.attention.flex_attention import BlockMask

    offset, is_causal = tokens.offset, tokens.is_causal

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = kept[b, h, q // BLOCK_Q, k // BLOCK_K]
        return block & (k <= q + offset) if is_causal else block

    return BlockMask.from_kv_blocks(
        *split_lists(kept, tokens),
        BLOCK_SIZE=(BLOCK_Q, BLOCK_K),
        mask_mod=mask_mod,
        seq_lengths=(tokens.Lq, tokens.Lk),
    )


# --- from outside -----------------------------------------------------------------------------


def check_facts(
    Lq: int,
    Lk: int,
    is_causal: bool,
    has_mask: bool = False,
    offset: int = 0,
    where: str = "",
) -> None:
    """Raise unless these can be the lengths and the diagonal of a plan."""
    for name, number in (("Lq", Lq), ("Lk", Lk), ("offset", offset)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{where}{name} must be a whole number, got {number!r}")
    for name, length in (("Lq", Lq), ("Lk", Lk)):
        if length < 1:
            raise ValueError(f"{where}{name} must be at least 1, got {length}")
    if abs(offset) > MAX_OFFSET:
        raise ValueError(f"{where}offset must be within ±{MAX_OFFSET}, got {offset}")
    for name, flag in (("is_causal", is_causal), ("has_mask", has_mask)):
        if not isinstance(flag, bool):
            raise TypeError(f"{where}{name} must be True or False, got {flag!r}")


def check_plan_tensors(tensors: dict[str, Tensor], Lq: int, Lk: int, where: str) -> int:
    """`n_k`, or raise unless counts, allowed and indices are those of a plan for these lengths."""
    n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{where}{name} must be a tensor, got {x!r}")
    counts = tensors["counts"]
    if counts.dim() != 3 or 0 in counts.shape:
        raise ValueError(
            f"{where}counts must be [B, Hq, n_q], none of them 0, got {tuple(counts.shape)}"
        )
    shape = (*counts.shape[:2], n_q)
    for name, needed in (("counts", shape), ("allowed", shape), ("indices", (*shape, n_k))):
        x = tensors[name]
        if tuple(x.shape) != needed or x.dtype != torch.int32:
            raise ValueError(
                f"{where}{name} must be int32 of shape {needed} for lengths {Lq} and {Lk}, got "
                f"{x.dtype} {tuple(x.shape)}"
            )
    return n_k


def checked_tokens(given: TokenMask, heads: tuple[int, int], device: torch.device) -> TokenMask:
    """`given` with its mask checked for `heads` = `(B, Hq)` and viewed as 4-D."""
    if given.attn_mask is None:
        return given
    weights = (*heads, given.Lq, given.Lk)
    check_mask(given.attn_mask, weights, device=device, dtypes=_MASK_DTYPES)
    return replace(given, attn_mask=as_4d(given.attn_mask))


def read_mask(mask: Tensor, given: TokenMask) -> tuple[Tensor, TokenMask]:
    """A bool map and what masks its tokens, checked."""
    check_facts(given.Lq, given.Lk, given.is_causal, offset=given.offset)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"a block mask must be bool, got {came}; write mask.bool()")
    needed = _blocks(given)
    if mask.dim() != 4 or tuple(mask.shape[2:]) != needed:
        raise ValueError(
            f"a block mask for lengths {given.Lq} and {given.Lk} must have shape [B, Hq, "
            f"{needed[0]}, {needed[1]}] (query blocks of {BLOCK_Q}, key blocks of {BLOCK_K} rows), "
            f"got {tuple(mask.shape)}"
        )
    return mask, checked_tokens(given, (mask.shape[0], mask.shape[1]), mask.device)


def read_csr(
    indptr: Tensor, indices: Tensor, heads: tuple[int, int], given: TokenMask
) -> tuple[Tensor, TokenMask]:
    """The bool map of a CSR pair and what masks its tokens, checked."""
    check_facts(given.Lq, given.Lk, given.is_causal, offset=given.offset)
    shape = (*heads, *_blocks(given))
    _check_csr(indptr, indices, shape)
    tokens = checked_tokens(given, heads, indptr.device)
    return _mask_of_csr(indptr, indices, shape), tokens


def read_lists(tensors: tuple[Tensor | None, ...], given: TokenMask) -> tuple[Tensor, TokenMask]:
    """The bool map of the four tensors of `BlockLists` and what masks its tokens, checked."""
    check_facts(given.Lq, given.Lk, given.is_causal, offset=given.offset)
    n_q, n_k = _blocks(given)
    pairs = _check_lists(dict(zip(BlockLists._fields, tensors, strict=True)), n_q, n_k)
    counts, _ = pairs["mask"]
    tokens = checked_tokens(given, (counts.shape[0], counts.shape[1]), counts.device)
    return _mask_of_lists(pairs, tokens, n_k), tokens


def _blocks(tokens: TokenMask) -> tuple[int, int]:
    return n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)


def _check_csr(indptr: Tensor, indices: Tensor, shape: Shape) -> None:
    """Raise unless dtypes, device and length fit; reads no values."""
    _check_int32({"indptr": indptr, "indices": indices})
    B, Hq, n_q, _ = shape
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


def _mask_of_csr(indptr: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    n_k, length = shape[-1], len(indices)
    counts = indptr.long().diff()
    if int(indptr[0]) != 0 or int(indptr[-1]) != length or bool((counts < 0).any()):
        raise ValueError(
            f"indptr must rise from 0 to the {length} entries of indices and never fall, got "
            f"{int(indptr[0])} … {int(indptr[-1])}, least step {int(counts.min())}"
        )
    rows = torch.arange(len(counts), device=indptr.device)
    rows = rows.repeat_interleave(counts, output_size=length)
    places = rows * n_k + indices
    _check_columns("indices", indices, n_k, rising=(places.diff() > 0))
    mask = torch.zeros(len(counts) * n_k, dtype=torch.bool, device=indptr.device)
    mask[places] = True
    return mask.view(shape)


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
        rising = (indices[..., 1:] > indices[..., :-1]) | ~used[..., 1:]
        _check_columns(f"{kind}_block_idx", indices[used], n_k, rising=rising)
        masks.append(mask_of(counts, indices, n_k))
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


def _check_columns(name: str, columns: Tensor, n_k: int, *, rising: Tensor) -> None:
    if bool(((columns < 0) | (columns >= n_k)).any()):
        raise ValueError(
            f"{name} must be key blocks 0 … {n_k - 1} (of {BLOCK_K} rows), got "
            f"{int(columns.min())} … {int(columns.max())}"
        )
    if not bool(rising.all()):
        raise ValueError(
            f"{name} must be ascending in each row, no block twice, got rows that are not; sort "
            "each row"
        )
