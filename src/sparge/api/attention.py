"""The public calls: check → choose → prepare → predict → select → attend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.dense import attend_dense
from ..engine.check import check_and_choose, check_call, check_plan
from ..engine.execute import run_attend, run_attention, run_plan, tokens_of
from ..engine.ops import facts_of, plan_of_tensors
from ..engine.recording import note, recording
from ..routing import Choice
from ..support.autocast import as_autocast
from ..values.backend import AUTO, DENSE
from ..values.blockplan import BlockPlan
from ..values.call import Inputs
from ..values.recipe import EXACTLY, Recipe, recipe_with_protected
from ..values.run import Run
from ..values.tokenmask import as_4d

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11


class PackedOptions(TypedDict, total=False):
    """What `attention` and `attention_varlen` take by name, besides `return_lse`."""

    is_causal: bool
    scale: float | None
    enable_gqa: bool
    causal_align: str
    recipe: Recipe | None
    backend: str


class Options(PackedOptions, total=False):
    """What `attention` takes by name, besides `return_lse`."""

    attn_mask: Tensor | None
    block_mask: Tensor | None
    label: str


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **rest: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **rest: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **rest: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    recipe: Recipe | None = None,
    block_mask: Tensor | None = None,
    backend: str = AUTO,
    return_lse: bool = False,
    label: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse attention in place of `F.scaled_dot_product_attention`.

    query `[B, Hq, Lq, D]`, key `[B, Hk, Lk, D]`, value `[B, Hk, Lk, Dv]`; names and meaning are
    SDPA's. `attn_mask` and `is_causal` may be given together; both then apply.
    causal_align: where the diagonal lies when Lq != Lk: `"top_left"` (SDPA) or `"bottom_right"`
    (the queries are the last of the keys: KV cache, chunked prefill).
    recipe: how much to keep and in what precision; None is the default recipe.
    block_mask: bool, broadcastable to `[B, Hq, n_q, n_k]`: exactly these blocks are computed.
    backend: `"auto"` may route to dense attention where that is faster; a name is obeyed or
    refused, never replaced.
    label: a name for the call in the record, such as its layer's.

    Returns a tensor of the input dtype, or `(out, lse)` with the natural-log LSE `[B, Hq, Lq]`.
    """
    out, lse, _ = attention_and_run(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_align=causal_align,
        recipe=recipe,
        block_mask=block_mask,
        backend=backend,
        return_lse=return_lse,
        label=label,
    )
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attention_and_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    protect: tuple[tuple[int, int], ...] | None = None,
    recorded: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Run | None]:
    """`attention` for callers that want to know what ran: `(out, lse, run)`.

    options: the other arguments of `attention`.
    protect: token ranges in place of the recipe's, which a compiled graph can give as numbers.
    recorded: make a run, though nobody records. A call that goes through the op returns none: the
    listener of its label is told (`engine/recording.py`).
    """
    query, key, value = as_autocast(query, key, value)
    compiling, ranges = torch.compiler.is_compiling(), None
    if protect is not None and compiling:
        ranges = [number for each in protect for number in each]
    elif protect is not None and (recipe := options.get("recipe")) is not None:
        options["recipe"] = recipe_with_protected(recipe, protect)
    inputs = Inputs(query, key, value, attn_mask, block_mask)
    call, choice, sdpa = check_and_choose(inputs, **options)
    as_op = compiling or wants_op(query)
    if sdpa is not None and not (as_op or recorded or recording()):
        return F.scaled_dot_product_attention(query, key, value, **sdpa), None, None
    if attn_mask is not None or block_mask is not None:
        inputs = Inputs(query, key, value, as_4d(attn_mask), as_4d(block_mask))
    torchs_gradient = call.needs_grad and choice.backend == DENSE
    if compiling and torchs_gradient:  # the one case that cannot be recorded
        tokens = tokens_of(call, inputs)
        out, lse = attend_dense(
            query, key, value, tokens, scale=call.scale, need_lse=call.return_lse
        )
        return out, lse, None
    if as_op or (call.needs_grad and not torchs_gradient):
        flags = (call.return_lse, call.needs_grad, options.get("backend", AUTO), call.label)
        out, lse, *_ = torch.ops.sparge.attention(*inputs, *facts_of(call), *flags, ranges)
        return out, lse, None
    # The same work without the dispatcher, whose cost is noticeable in short calls.
    done = run_attention(call, choice, inputs, recorded=recorded)
    note(done.run)
    return done.out, done.lse, done.run


def make_plan(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    recipe: Recipe | None = None,
    block_mask: Tensor | None = None,
    backend: str = AUTO,
    value: Tensor | None = None,
) -> BlockPlan:
    """The first half of `attention`: which key blocks each query block will read.

    `KeepError` reads the value, to measure what skipping does; no other recipe does.
    """
    # A plan is constant, so inputs may require grad in any precision.
    given = (*as_autocast(query, key, value), attn_mask)
    query, key, value, attn_mask = (x.detach() if isinstance(x, Tensor) else x for x in given)
    call = check_call(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_align=causal_align,
        recipe=recipe,
        block_mask=block_mask,
        backend=backend,
        planning=True,
    )
    inputs = Inputs(query, key, value, as_4d(attn_mask), as_4d(block_mask))
    if not (torch.compiler.is_compiling() or wants_op(query)):
        return run_plan(call, inputs, backend=backend)
    masks = (inputs.attn_mask, inputs.block_mask)
    *plan, measured = torch.ops.sparge.plan(query, key, *masks, *facts_of(call), backend, value)
    made = plan_of_tensors(tuple(plan), call, measured)
    return made if torch.compiler.is_compiling() else made.trust()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str | None = None,
    recipe: Recipe | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """The second half of `attention`: `(out, lse)` over the blocks of a plan.

    The plan holds its diagonal; `is_causal` and `causal_align` may be left out and must agree
    if given. Of the recipe, only precision, pv_skip and what skipped blocks contribute apply.
    Without a recipe no block but the plan's contributes; to repeat what `attention` computes, give
    the recipe that the plan was made by (`sparge.DEFAULT` if none).
    """
    recipe = EXACTLY if recipe is None else recipe
    query, key, value = as_autocast(query, key, value)
    call = check_call(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=getattr(plan, "is_causal", False),
        scale=scale,
        enable_gqa=enable_gqa,
        offset=getattr(plan, "offset", 0),
        recipe=recipe,
        backend=backend,
        return_lse=True,
    )
    check_plan(plan, call, query.device, is_causal=is_causal, causal_align=causal_align)
    inputs = Inputs(query, key, value, as_4d(attn_mask))
    if not (torch.compiler.is_compiling() or wants_op(query) or call.needs_grad):
        done = run_attend(call, inputs, plan, backend=backend)
        return done.out, done.lse
    tensors = (query, key, value, inputs.attn_mask, plan.counts, plan.indices, plan.allowed)
    out, lse, _ = torch.ops.sparge.attend(*tensors, *facts_of(call), backend, plan.measured)
    return out, lse


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    recipe: Recipe | None = None,
    block_mask: Tensor | None = None,
    backend: str = AUTO,
    return_lse: bool = False,
) -> Choice:
    """Which backend `attention` would run for these arguments, and why each other would not."""
    query, key, value = as_autocast(query, key, value)
    _, choice, _ = check_and_choose(
        Inputs(query, key, value, attn_mask, block_mask),
        backend=backend,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_align=causal_align,
        recipe=recipe,
        return_lse=return_lse,
    )
    return replace(choice, rejected=dict(choice.rejected))  # the caller's own copy


def wants_op(x: Tensor) -> bool:
    """Meta tensors and tensor subclasses go through the op, which they intercept."""
    return x.is_meta or type(x) not in (Tensor, torch.nn.Parameter)
