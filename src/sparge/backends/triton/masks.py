"""The caller's mask and the forced blocks, as the kernels read them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...values.recipe import Recipe
from ...values.tokenmask import OPEN, TokenMask
from . import select_kernel
from .launch import launch
from .shapes import within

NO_MASK, BOOL_MASK, BIAS = 0, 1, 2


def mask_kind(tokens: TokenMask) -> int:
    if tokens.attn_mask is None:
        return NO_MASK
    return BOOL_MASK if tokens.attn_mask.dtype == torch.bool else BIAS


def is_causal(tokens: TokenMask) -> bool:
    """Whether the diagonal hides anything."""
    return tokens.is_causal and tokens.offset < tokens.Lk - 1


def mask_arguments(tokens: TokenMask) -> dict[str, Any]:
    """The mask and its strides, 0 along dimensions that it is broadcast over."""
    mask = tokens.attn_mask
    names = ("stride_mb", "stride_mh", "stride_mm", "stride_mn")
    if mask is None:
        return {"mask": None, **dict.fromkeys(names, 0), "MASK": NO_MASK}
    strides = [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)]
    given = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return {"mask": given, **dict(zip(names, strides, strict=True)), "MASK": mask_kind(tokens)}


def kind_arguments(tokens: TokenMask) -> dict[str, Any]:
    """Kinds of blocks under the caller's mask, computed once for all stages of a call."""
    kinds = kinds_of(tokens)
    if kinds is None:
        return {"kinds": None, "stride_nb": 0, "stride_nh": 0}
    strides = [0 if n == 1 else s for n, s in zip(kinds.shape[:2], kinds.stride(), strict=False)]
    return {"kinds": kinds, "stride_nb": strides[0], "stride_nh": strides[1]}


def kinds_of(tokens: TokenMask) -> Tensor | None:
    mask = tokens.attn_mask
    if mask is None:
        return None
    known: Tensor | None = tokens.__dict__.get("_kinds")
    if known is None:
        n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
        known = mask.new_empty((*mask.shape[:2], n_q, n_k), dtype=torch.int8)
        launch(
            select_kernel.classify_blocks,
            (n_k, n_q, mask.shape[0] * mask.shape[1]),
            {"num_warps": 4},
            kinds=known,
            Lq=tokens.Lq,
            Lk=tokens.Lk,
            n_q=n_q,
            n_k=n_k,
            offset=within(tokens.offset, tokens.Lq, tokens.Lk),
            heads=mask.shape[1],
            CAUSAL=is_causal(tokens),
            **mask_arguments(tokens),
        )
        object.__setattr__(tokens, "_kinds", known)
    return known


def lists_of(plan: BlockPlan, tokens: TokenMask, *, ascending: bool) -> dict[str, Any]:
    """The lists of a plan, full blocks first. Without a mask they are ascending as they are."""
    kinds = kinds_of(tokens)
    if kinds is None:
        return {"block_lists": plan.indices.contiguous(), "n_full": None}
    n_full = torch.zeros_like(plan.counts)
    if ascending:  # every block is masked, in the order that the second filter asks for
        return {"block_lists": plan.indices.contiguous(), "n_full": n_full}
    lists = torch.empty_like(plan.indices)
    B, Hq, n_q = plan.counts.shape
    launch(
        select_kernel.split_lists,
        (n_q, Hq, B),
        {"num_warps": 2},
        counts=plan.counts.contiguous(),
        indices=plan.indices.contiguous(),
        lists=lists,
        n_full=n_full,
        Hq=Hq,
        Lk=tokens.Lk,
        n_q=n_q,
        n_k=plan.indices.shape[3],
        **kind_arguments(tokens),
    )
    return {"block_lists": lists, "n_full": n_full}


def pools_of(plan: BlockPlan, tokens: TokenMask) -> Tensor:
    """Blocks that are skipped and open, of a plan that was not made by this backend's select."""
    kinds = kinds_of(tokens)
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


def forced_arguments(call: Call, tokens: TokenMask, device: torch.device) -> dict[str, Any]:
    recipe: Recipe = call.recipe
    window = recipe.window(tokens.is_causal)
    far = n_blocks(call.Lq, BLOCK_Q) * BLOCK_Q + call.n_k
    ranges = protected_blocks(recipe.protect, call.Lq, call.Lk, tokens.offset, device)
    return {
        "sink": min(recipe.sink_blocks, call.n_k),
        "reach": min(window, far),
        "ranges": ranges,
        "n_ranges": len(recipe.protect),
        "NEAR": tokens.is_causal or window > 0,
        "RANGES": bool(recipe.protect),
    }
