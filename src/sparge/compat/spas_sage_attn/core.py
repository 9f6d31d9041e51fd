"""The five attention functions of the original, computed by `sparge.attention`.

docs/compat.md has what differs from the original; the meaning is that of docs/meaning.md. `auto`
chooses as in `sparge.attention`: dense attention runs, with sparsity 0, where it is faster. A block
mask runs exactly its blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention
from ...engine.recording import record
from ...values.call import BLOCK_K, BLOCK_Q, n_blocks
from ...values.recipe import Recipe
from ._recipes import Threshold, check_flag, precision_of, pv_recipe, recipe_of, refuse

Result = Tensor | tuple[Tensor, float]


def spas_sage2_attn_meansim_topk_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: Threshold = -0.1,
    cdfthreshd: Threshold | None = None,
    topk: Threshold | None = 0.5,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = torch.float16,
    return_sparsity: bool = False,
) -> Result:
    """Attention over the fraction `topk` of the key blocks; `out`, or `(out, sparsity)`.

    q, k, v: `[B, H, L, D]` for "HND", `[B, L, H, D]` for "NHD"; so is `out`.
    attn_mask, dropout_p: refused, where the original ignored them.
    smooth_k: False attends to the keys as they are, and so without int8.
    simthreshd1, cdfthreshd, topk, pvthreshd: one number, or a 1-D tensor of one per head.
    output_dtype: None and float16, the default that the original ignored, give the input's dtype;
    any other is honoured.
    """
    _refuse_ignored(attn_mask, dropout_p)
    query, key, value = heads_first(q, k, v, tensor_layout)
    recipe = recipe_of(
        query.shape[1],
        simthreshd1=simthreshd1,
        cdfthreshd=cdfthreshd,
        topk=topk,
        pvthreshd=pvthreshd,
        attention_sink=attention_sink,
        precision=precision_of(query.dtype, smooth_k),
    )
    return run(
        (query, key, value),
        recipe,
        is_causal=is_causal,
        scale=scale,
        tensor_layout=tensor_layout,
        output_dtype=output_dtype,
        return_sparsity=return_sparsity,
    )


def spas_sage2_attn_meansim_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: Threshold = 0.6,
    cdfthreshd: Threshold = 0.98,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = torch.float16,
    return_sparsity: bool = False,
) -> Result:
    """Attention over the fewest key blocks whose predicted mass reaches `cdfthreshd`.

    Arguments as in `spas_sage2_attn_meansim_topk_cuda`.
    """
    return spas_sage2_attn_meansim_topk_cuda(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        smooth_k,
        simthreshd1=simthreshd1,
        cdfthreshd=cdfthreshd,
        topk=None,
        pvthreshd=pvthreshd,
        attention_sink=attention_sink,
        tensor_layout=tensor_layout,
        output_dtype=output_dtype,
        return_sparsity=return_sparsity,
    )


# The original's two generations differ in their engine alone, and there is one engine here.
spas_sage_attn_meansim_topk_cuda = spas_sage2_attn_meansim_topk_cuda
spas_sage_attn_meansim_cuda = spas_sage2_attn_meansim_cuda


def block_sparse_sage2_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_id: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = torch.float16,
    return_sparsity: bool = False,
) -> Result:
    """Attention over exactly the blocks that are not 0 in `mask_id`, never causal.

    mask_id: `[B, H, ceil(Lq/128), ceil(Lk/64)]` on every chip, any dtype; a row without a block
    gives zeros. attention_sink: adds the first key block to every row (the original ignored it).
    """
    _refuse_ignored(None, dropout_p)
    query, key, value = heads_first(q, k, v, tensor_layout)
    blocks = _block_mask(mask_id, query, key)
    if check_flag("attention_sink", attention_sink):
        first = torch.arange(blocks.shape[-1], device=blocks.device) == 0
        blocks = blocks | first
    return run(
        (query, key, value),
        pv_recipe(query.shape[1], pvthreshd, precision_of(query.dtype, smooth_k)),
        scale=scale,
        block_mask=blocks,
        tensor_layout=tensor_layout,
        output_dtype=output_dtype,
        return_sparsity=return_sparsity,
    )


def get_cuda_arch_versions() -> list[str]:
    """`["sm90"]` and such, one for each GPU; no block size here depends on it."""
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return [f"sm{major}{minor}" for major, minor in capabilities]


def heads_first(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Views `[B, H, L, D]` of tensors in either layout."""
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(
            f"tensor_layout must be 'HND' [B, H, L, D] or 'NHD' [B, L, H, D], got {tensor_layout!r}"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, got shape {list(x.shape)}; unsqueeze(0) adds a "
                "batch of one, and sparge.attention_varlen takes packed sequences"
            )
    if tensor_layout == "HND":
        return q, k, v
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def run(
    tensors: tuple[Tensor, Tensor, Tensor],
    recipe: Recipe,
    *,
    scale: float | None,
    tensor_layout: str,
    is_causal: bool = False,
    block_mask: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    backend: str = "auto",
) -> Result:
    """`sparge.attention` of tensors `[B, H, L, D]`, returned as the original returns it."""
    dtype = _output_dtype(output_dtype, tensors[0].dtype)
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": True,
        "recipe": recipe,
        "block_mask": block_mask,
        "backend": backend,
    }
    counted = check_flag("return_sparsity", return_sparsity)
    out, sparsity = _counted(tensors, options) if counted else (attention(*tensors, **options), 0.0)
    out = out.to(dtype)
    out = out.transpose(1, 2) if tensor_layout == "NHD" else out
    return (out, sparsity) if counted else out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _counted(
    tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> tuple[Tensor, float]:
    """A number for Python cannot come out of a graph, here as in the original."""
    with record() as runs:
        out = attention(*tensors, **options)
    return out, runs[-1].sparsity


def _refuse_ignored(attn_mask: Any, dropout_p: Any) -> None:
    if attn_mask is not None:
        raise refuse(
            "attn_mask must be None here, as the original ignores it; got "
            f"{type(attn_mask).__name__}",
            "sparge.attention(q, k, v, attn_mask=...) honours masks exactly",
        )
    if isinstance(dropout_p, bool) or dropout_p != 0:
        raise refuse(
            f"dropout_p must be 0.0, as the original ignores it; got {dropout_p!r}",
            "torch's scaled_dot_product_attention has dropout; nothing sparse here does",
        )


def _output_dtype(asked: Any, own: torch.dtype) -> torch.dtype:
    if asked is None or asked == torch.float16:
        return own
    if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
        raise TypeError(
            f"output_dtype must be a floating torch.dtype or None, got {asked!r}; None is the "
            "input's dtype"
        )
    return asked


def _block_mask(mask_id: Any, query: Tensor, key: Tensor) -> Tensor:
    B, Hq, Lq = query.shape[:3]
    Lk = key.shape[2]
    needed = [B, Hq, n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)]
    what = f"{needed} for {Lq} queries in blocks of {BLOCK_Q} and {Lk} keys in blocks of {BLOCK_K}"
    if not isinstance(mask_id, Tensor):
        came = "None" if mask_id is None else type(mask_id).__name__
        raise TypeError(
            f"mask_id must be a tensor of shape {what}, got {came}; "
            "spas_sage2_attn_meansim_topk_cuda chooses the blocks itself"
        )
    if list(mask_id.shape) != needed:
        other = [B, Hq, n_blocks(Lq, BLOCK_K), n_blocks(Lk, BLOCK_Q)]
        hint = "; use .expand where one map serves several heads"
        if list(mask_id.shape) == other:
            hint = (
                "; it looks made for blocks of 64 x 128, the original's on sm90; here they are "
                "128 x 64 on every chip"
            )
        raise ValueError(f"mask_id must have shape {what}, got {list(mask_id.shape)}{hint}")
    if mask_id.device != query.device:
        raise ValueError(
            f"mask_id is on {mask_id.device} and q on {query.device}; use mask_id.to(q.device)"
        )
    return mask_id if mask_id.dtype == torch.bool else mask_id != 0
