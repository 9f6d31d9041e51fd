"""Argument checks of every public call, before any work is done.

Each message names the argument, says what came, what is needed and the way out. `check_call` is
the one place where a `Call` is made from tensors, and where `causal_align` becomes an offset.
"""

from __future__ import annotations

import math
import numbers
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.dense import sdpa_arguments
from ..routing import Choice, current_router
from ..support.autocast import forward_ad_level
from ..values.backend import AUTO, DENSE
from ..values.blockplan import BlockPlan
from ..values.call import (
    BLOCK_K,
    BLOCK_Q,
    CAUSAL_ALIGNS,
    MAX_HEAD_DIM,
    MAX_OFFSET,
    Call,
    Inputs,
    diagonal_offset,
    n_blocks,
)
from ..values.recipe import DEFAULT, EXACTLY, KeepError, Recipe
from ..values.tokenmask import broadcasts, check_mask

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_KNOWN_TYPES = {Tensor, torch.nn.Parameter, type(None)}
"""Of inputs whose facts say all there is to know of them."""


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    offset: int | None = None,
    recipe: Recipe | None = None,
    block_mask: Tensor | None = None,
    backend: str = AUTO,
    return_lse: bool = False,
    label: str = "",
    planning: bool = False,
) -> Call:
    """The metadata of a call, or an error. Planning has no value; Dv is then taken to be D.

    offset: of the diagonal, in place of `causal_align`, where it is known.
    """
    tensors = {"query": query, "key": key}
    if value is not None or not planning:
        tensors["value"] = value  # type: ignore[assignment]
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name, got {backend!r}; 'auto' or 'reference', say")
    _check_tensors(tensors, rank=4, layout="[B, H, L, D]")
    B, Hq, Lq, D = query.shape
    Hk, Lk = key.shape[1], key.shape[2]
    Dv = D if value is None else value.shape[3]
    _check_sizes(tensors)
    if key.shape[0] != B or (value is not None and value.shape[0] != B):
        raise ValueError(
            f"query, key and value must have the same batch size, got {_shapes(tensors)}; "
            "use .expand(B, -1, -1, -1), which copies nothing"
        )
    if value is not None and value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"key and value must have the same heads and length, got {_shapes(tensors)}"
        )
    if key.shape[3] != D:
        raise ValueError(f"query and key must have the same head dim, got {_shapes(tensors)}")
    _check_heads(Hq, Hk, enable_gqa)
    _check_head_dims(D, Dv)
    if causal_align not in CAUSAL_ALIGNS:
        raise ValueError(f"causal_align must be one of {CAUSAL_ALIGNS}, got {causal_align!r}")
    flags = {"is_causal": is_causal, "enable_gqa": enable_gqa, "return_lse": return_lse}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if not isinstance(label, str):
        raise TypeError(f"label must be a string, got {label!r}")
    if recipe is None and block_mask is not None:
        recipe = EXACTLY
    recipe = check_recipe(recipe, Hq)
    if isinstance(recipe.keep, KeepError) and value is None and block_mask is None:
        raise ValueError(
            "KeepError measures what skipping does to the output, so a plan by it needs the value; "
            "give make_plan(..., value=value), or use KeepMass"
        )
    if attn_mask is not None:
        dtypes = (torch.bool, torch.float32, query.dtype)
        check_mask(attn_mask, (B, Hq, Lq, Lk), device=query.device, dtypes=dtypes)
    if block_mask is not None:
        _check_block_mask(block_mask, query, B, Hq, Lq, Lk)
    return Call(
        B=B,
        Hq=Hq,
        Hk=Hk,
        Lq=Lq,
        Lk=Lk,
        D=D,
        Dv=Dv,
        dtype=query.dtype,
        device=query.device.type,
        index=query.device.index or 0,
        scale=check_scale(scale, D),
        recipe=recipe,
        is_causal=is_causal,
        offset=diagonal_offset(Lq, Lk, causal_align) if offset is None else _check_offset(offset),
        has_mask=attn_mask is not None,
        has_block_mask=block_mask is not None,
        return_lse=return_lse,
        label=label,
        needs_grad=_check_grad(tensors, attn_mask, recipe, backend),
    )


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    **plain: Any,
) -> Call:
    """The packed layout as one call; `check_boundaries` reads the boundaries' numbers."""
    call = check_packed(query, key, value, **plain)
    for name, cuts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cuts, Tensor) or cuts.dtype not in (torch.int32, torch.int64):
            came = cuts.dtype if isinstance(cuts, Tensor) else type(cuts).__name__
            raise TypeError(f"{name} must be an int32 or int64 tensor, got {came}")
        if cuts.device != query.device and cuts.device.type != "cpu":
            raise ValueError(
                f"{name} is on {cuts.device}, the query on {query.device}; put it there or on cpu"
            )
    return call


def check_packed(query: Tensor, key: Tensor, value: Tensor, **plain: Any) -> Call:
    """Packed sequences, whose boundaries are on the host and known to be right, as one call."""
    _check_tensors({"query": query, "key": key, "value": value}, rank=3, layout="[T, H, D]")
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return check_call(q, k, v, **plain)


def check_boundaries(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[list[int], list[int]]:
    """Where the packed sequences begin and end, as two lists."""
    q_cuts = _boundaries("cu_seqlens_q", cu_seqlens_q, query.shape[0], "query")
    k_cuts = _boundaries("cu_seqlens_k", cu_seqlens_k, key.shape[0], "key")
    if len(q_cuts) != len(k_cuts):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must bound the same number of sequences, got "
            f"{len(q_cuts) - 1} and {len(k_cuts) - 1}"
        )
    return q_cuts, k_cuts


def check_plan(
    plan: BlockPlan,
    call: Call,
    device: torch.device,
    *,
    is_causal: bool | None = None,
    causal_align: str | None = None,
) -> None:
    """A plan is used with the lengths, heads, device and diagonal it was made for."""
    if not isinstance(plan, BlockPlan):
        raise TypeError(
            f"plan must be a BlockPlan from sparge.make_plan, got {type(plan).__name__}; "
            "a bool block mask becomes one with BlockPlan.from_mask"
        )
    came = (*plan.counts.shape[:2], plan.Lq, plan.Lk)
    needed = (call.B, call.Hq, call.Lq, call.Lk)
    if tuple(came) != needed:
        raise ValueError(
            f"the plan was made for (B, Hq, Lq, Lk) = {tuple(came)}, the tensors have {needed}; "
            "make a plan for them"
        )
    if plan.counts.device != device:
        raise ValueError(
            f"the plan is on {plan.counts.device}, the tensors on {device}; make a plan for them"
        )
    if causal_align is not None and causal_align not in CAUSAL_ALIGNS:
        raise ValueError(f"causal_align must be one of {CAUSAL_ALIGNS}, got {causal_align!r}")
    if is_causal is not None and is_causal != plan.is_causal:
        raise ValueError(
            f"the plan was made with is_causal={plan.is_causal}, got is_causal={is_causal}; "
            "leave it out, the plan knows it"
        )
    if causal_align is not None and plan.is_causal:
        asked = diagonal_offset(plan.Lq, plan.Lk, causal_align)
        if asked != plan.offset:
            raise ValueError(
                f"the plan was made with an offset of {plan.offset}, got {causal_align!r}, which "
                f"is {asked}; leave causal_align out, the plan knows it"
            )
    measured = plan.measured
    if measured is not None and (
        tuple(measured.shape) != (3, call.B, call.Hq) or measured.dtype != torch.float64
    ):
        raise ValueError(
            f"the plan's measured must be float64 of shape {(3, call.B, call.Hq)}, as KeepError "
            f"makes it, got {measured.dtype} {tuple(measured.shape)}; leave it out"
        )
    if plan.has_mask and not call.has_mask:
        raise ValueError("the plan was made with an attn_mask; give the same attn_mask to attend")
    # Its numbers; a graph being traced has none, and on an accelerator they are not read back.
    on_host = type(plan.counts) is Tensor and plan.counts.device.type == "cpu"
    if on_host and not torch.compiler.is_compiling() and not plan.is_valid:
        plan.validate("the plan is damaged: ")


def _check_offset(offset: int) -> int:
    # Not isinstance alone: in a compiled graph it is a symbol, which is no int.
    if isinstance(offset, bool | float | str) or not -MAX_OFFSET <= offset <= MAX_OFFSET:
        raise ValueError(f"offset must be a whole number within ±{MAX_OFFSET}, got {offset!r}")
    return offset


def check_recipe(recipe: Recipe | None, Hq: int) -> Recipe:
    if recipe is None:
        return DEFAULT
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe must be a sparge.Recipe, got {type(recipe).__name__}; "
            "write Recipe(keep=KeepMass(0.95)), for example"
        )
    each_head = [("keep", amount) for amount in vars(recipe.keep).values()]
    each_head += [("min_similarity", recipe.min_similarity), ("pv_skip", recipe.pv_skip)]
    for name, each in each_head:
        if isinstance(each, tuple) and len(each) != Hq:
            raise ValueError(
                f"the recipe's {name} has {len(each)} numbers for {Hq} query heads; "
                "give one per query head, or one for all"
            )
    return recipe


def _is_number(x: Any) -> bool:
    """A float, an int, or a scalar of numpy's."""
    plain = isinstance(x, int | float)  # asked first: a compiled graph knows these
    return not isinstance(x, bool) and (plain or isinstance(x, numbers.Real))


def check_scale(scale: float | None, D: int) -> float:
    if scale is None:
        return float(D) ** -0.5
    if not _is_number(scale):
        raise TypeError(f"scale must be a number or None for 1/sqrt(head_dim), got {scale!r}")
    try:
        scale = float(scale)
    except OverflowError:
        scale = math.inf
    # Not math.isfinite: in a compiled graph a scale that varies is a symbol.
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def _check_tensors(tensors: dict[str, Tensor], *, rank: int, layout: str) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    for name, x in tensors.items():
        if x.dim() != rank:
            hint = "; packed [T, H, D] goes to attention_varlen" if rank == 4 else ""
            raise ValueError(f"{name} must be {layout}, got shape {list(x.shape)}{hint}")
    query = tensors["query"]
    for name, x in tensors.items():
        if x.layout != torch.strided:
            raise TypeError(f"{name} must be a plain strided tensor, got layout {x.layout}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
        if x.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have one dtype, got {query.dtype} and {name} "
                f"{x.dtype}; cast with .to(query.dtype)"
            )
        if x.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, got {query.device} and {name} on "
                f"{x.device}; move with .to(query.device)"
            )


def _check_sizes(tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        if 0 in x.shape:
            raise ValueError(
                f"{name} is empty, shape {list(x.shape)}: no dimension may be 0, and every "
                "sequence needs at least one token; leave empty ones out of the call"
            )


def _check_heads(Hq: int, Hk: int, enable_gqa: bool) -> None:
    if Hq % Hk:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {Hq} and {Hk}: each key head "
            "serves a group of query heads"
        )
    if Hq != Hk and not enable_gqa:
        raise ValueError(
            f"query has {Hq} heads and key {Hk}; pass enable_gqa=True to share each key head "
            f"among {Hq // Hk} query heads"
        )


def _check_head_dims(D: int, Dv: int) -> None:
    for name, dim in (("head_dim", D), ("the head_dim of value", Dv)):
        if dim > MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must be at most {MAX_HEAD_DIM}, got {dim}; call "
                "torch.nn.functional.scaled_dot_product_attention for this layer"
            )


def _check_block_mask(mask: Tensor, query: Tensor, B: int, Hq: int, Lq: int, Lk: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"block_mask must be a bool tensor, True to compute, got {came}")
    if mask.device != query.device:
        raise ValueError(f"block_mask is on {mask.device}, the query on {query.device}")
    blocks = (n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K))
    if not broadcasts(mask, (B, Hq, *blocks)):
        raise ValueError(
            f"block_mask must broadcast to [B, Hq, n_q, n_k] = {[B, Hq, *blocks]} (query blocks "
            f"of {BLOCK_Q} rows, key blocks of {BLOCK_K}), got {list(mask.shape)}"
        )


def _check_grad(
    tensors: dict[str, Tensor], attn_mask: Tensor | None, recipe: Recipe, backend: str
) -> bool:
    if not torch.compiler.is_compiling() and forward_ad_level() >= 0:
        given = [*tensors.values(), *([] if attn_mask is None else [attn_mask])]
        if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
            raise ValueError(
                "forward-mode derivatives (jvp) are not computed here; use reverse mode with "
                "precision 'half' or 'exact', or F.scaled_dot_product_attention"
            )
    if not torch.is_grad_enabled():
        return False
    if attn_mask is not None and attn_mask.requires_grad:
        raise ValueError(
            "attn_mask requires grad, and the gradient of a bias is not computed here; "
            "use attn_mask.detach(), or F.scaled_dot_product_attention for a learned bias"
        )
    needs_grad = any(x.requires_grad for x in tensors.values())
    if needs_grad and recipe.quantized and backend != DENSE:
        raise ValueError(
            f"precision {recipe.precision!r} has no gradient and an input requires grad; use "
            "Recipe(precision='half') or 'exact', or call under torch.no_grad()"
        )
    if needs_grad and recipe.pools and backend != DENSE:
        raise ValueError(
            "skipped 'pool' has no gradient and an input requires grad; use "
            "Recipe(skipped='drop'), or call under torch.no_grad()"
        )
    return needs_grad


def _boundaries(name: str, cu_seqlens: Tensor, total: int, of: str) -> list[int]:
    cuts: list[int] = cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != total:
        raise ValueError(
            f"{name} must be 1-D, begin with 0 and end with the {of}'s length {total}, got "
            f"{cu_seqlens.tolist()}"
        )
    for i, (start, stop) in enumerate(pairwise(cuts)):
        if stop <= start:
            raise ValueError(
                f"{name} must rise: sequence {i} runs from {start} to {stop}, and every sequence "
                "needs at least one token; leave empty ones out"
            )
    return cuts


def _shapes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())


class Checked(NamedTuple):
    """A call that was checked, and what it gets. sdpa: arguments with which torch's SDPA is the
    whole call; None if there is more to it."""

    call: Call
    choice: Choice
    sdpa: dict[str, Any] | None


def check_and_choose(inputs: Inputs, **options: Any) -> Checked:
    """`check_call`, then the router's choice; or what they said of the same call before."""
    router = current_router()

    def make() -> Checked:
        query, key, value, attn_mask, block_mask = inputs
        call = check_call(query, key, value, attn_mask=attn_mask, block_mask=block_mask, **options)
        choice = router.choose(call, options.get("backend", AUTO))
        is_settled = not (compiling or choice.provisional)
        is_dense = is_settled and choice.backend == DENSE
        return Checked(call, choice, sdpa_arguments(call) if is_dense else None)

    compiling = torch.compiler.is_compiling()
    if compiling or forward_ad_level() >= 0 or not {*map(type, inputs)} <= _KNOWN_TYPES:
        return make()
    tensors = [
        None if x is None else (x.shape, x.dtype, x.device, x.layout, x.requires_grad)
        for x in inputs
    ]
    # With their types: 1 and True are equal, yet one of them is refused.
    values = options.values()
    seen = (*tensors, torch.is_grad_enabled(), *options, *values, *map(type, values))
    return router.answer(seen, make)
