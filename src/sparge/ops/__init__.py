"""The stages as `torch.ops.sparge.*`, with fake kernels, so that a compiled graph holds them whole.

A recipe travels as its JSON, a plan as its three tensors. What an op needs to know of a call it
reads off its tensors again, at run time; the caller's mistakes were found before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.reference.backward import attend_backward
from ..blockplan import BlockPlan, plan_of
from ..call import Call, work_dtype
from ..check import check_boundaries
from ..dispatch.choose import backends, choose, host
from ..execute import run_attend, run_attention, run_plan, run_quantize, run_varlen, tokens_of
from ..geometry import BLOCK_K
from ..qtensor import Operands, QTensor
from ..recipe import KeepAll, Recipe, recipe_from_json
from ..record import note
from ..support.autocast import without_autocast
from . import meta as fakes

_CALL = "bool is_causal, str causal_align, float scale, str recipe"
_library = torch.library.Library("sparge", "DEF")
_library.define(
    f"plan(Tensor query, Tensor key, Tensor? attn_mask, Tensor? block_mask, {_CALL}, str backend,"
    " Tensor? value=None) -> (Tensor counts, Tensor indices, Tensor allowed)"
)
_library.define(
    f"quantize(Tensor query, Tensor key, Tensor value, {_CALL}, str backend)"
    " -> (Tensor q_codes, Tensor q_scale, Tensor k_codes, Tensor k_scale, Tensor v, Tensor v_scale,"
    " Tensor lse_shift)"
)
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor counts,"
    f" Tensor indices, Tensor allowed, {_CALL}, str backend)"
    " -> (Tensor out, Tensor lse, Tensor pv_skips)"
)
_library.define(
    "attend_quantized(Tensor q_codes, Tensor q_scale, Tensor k_codes, Tensor k_scale, Tensor v,"
    " Tensor v_scale, Tensor lse_shift, Tensor? attn_mask, Tensor counts, Tensor indices,"
    f" Tensor allowed, {_CALL}, ScalarType dtype, int q_rows_per_scale, int k_rows_per_scale,"
    " str backend)"
    " -> (Tensor out, Tensor lse, Tensor pv_skips)"
)
_library.define(
    "attend_backward(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value,"
    " Tensor out, Tensor? attn_mask, Tensor counts, Tensor indices, Tensor allowed,"
    f" {_CALL}, str backend) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? block_mask,"
    f" {_CALL}, bool return_lse, bool needs_grad, str backend, str label='')"
    " -> (Tensor out, Tensor lse, Tensor counts, Tensor indices, Tensor allowed)"
)
_library.define(
    "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
    f" Tensor cu_seqlens_k, {_CALL}, bool return_lse, str backend) -> (Tensor out, Tensor lse)"
)


def call_of(
    query: Tensor,
    key: Tensor,
    Dv: int,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    *,
    dtype: torch.dtype | None = None,
    label: str = "",
    **facts: bool,
) -> Call:
    B, Hq, Lq, D = query.shape
    return Call(
        B=B,
        Hq=Hq,
        Hk=key.shape[1],
        Lq=Lq,
        Lk=key.shape[2],
        D=D,
        Dv=Dv,
        dtype=dtype or query.dtype,
        device=query.device.type,
        scale=scale,
        recipe=recipe_from_json(recipe),
        is_causal=is_causal,
        causal_align=causal_align,
        label=label,
        **facts,
    )


def plan_of_tensors(
    plan: tuple[Tensor, Tensor, Tensor], call: Call, attn_mask: Tensor | None
) -> BlockPlan:
    return BlockPlan(
        *plan,
        Lq=call.Lq,
        Lk=call.Lk,
        is_causal=call.is_causal,
        causal_align=call.causal_align,
        has_mask=attn_mask is not None,
    )


def _plan(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    backend: str,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = call_of(
        query,
        key,
        query.shape[3] if value is None else value.shape[3],
        is_causal,
        causal_align,
        scale,
        recipe,
        has_mask=attn_mask is not None,
        has_block_mask=block_mask is not None,
    )
    plan = run_plan(query, key, attn_mask, block_mask, call, backend=backend, value=value)
    return plan.counts, plan.indices, plan.allowed


def _quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    backend: str,
) -> tuple[Tensor, ...]:
    call = call_of(query, key, value.shape[3], is_causal, causal_align, scale, recipe)
    done = run_quantize(query, key, value, call, backend=backend)
    assert isinstance(done.query, QTensor)
    assert isinstance(done.key, QTensor)
    assert done.lse_shift is not None
    if isinstance(done.value, QTensor):
        v, v_scale = done.value.codes, done.value.scale
    else:
        # An op may not return one of its inputs; V is read as it is.
        v, v_scale = done.value.new_empty(0), done.lse_shift.new_empty(0)
    tensors = (done.query.codes, done.query.scale, done.key.codes, done.key.scale, v, v_scale)
    return (*(x.contiguous() for x in tensors), done.lse_shift)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    call = call_of(query, key, value.shape[3], is_causal, causal_align, scale, recipe)
    plan = plan_of_tensors((counts, indices, allowed), call, attn_mask)
    done = run_attend(Operands(query, key, value), plan, attn_mask, call, backend=backend)
    return done.out, done.lse, done.pv_skips


def _attend_quantized(
    q_codes: Tensor,
    q_scale: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    lse_shift: Tensor,
    attn_mask: Tensor | None,
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    dtype: torch.dtype,
    q_rows_per_scale: int,
    k_rows_per_scale: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    facts = (v.shape[3], is_causal, causal_align, scale, recipe)
    call = call_of(q_codes, k_codes, *facts, dtype=dtype)
    plan = plan_of_tensors((counts, indices, allowed), call, attn_mask)
    operands = Operands(
        QTensor(q_codes, q_scale, q_rows_per_scale),
        QTensor(k_codes, k_scale, k_rows_per_scale),
        QTensor(v, v_scale, BLOCK_K, per_channel=True) if v_scale.numel() else v,
        lse_shift,
    )
    done = run_attend(operands, plan, attn_mask, call, backend=backend)
    return done.out, done.lse, done.pv_skips


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    attn_mask: Tensor | None,
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    call = call_of(query, key, value.shape[3], is_causal, causal_align, scale, recipe)
    tokens = tokens_of(call, attn_mask)
    plan, precise = plan_of_tensors((counts, indices, allowed), call, attn_mask), call.recipe
    if bool((counts < 0).any()):
        # The op routed to dense attention: every block, and no rounding of the operands.
        every = torch.ones_like(indices, dtype=torch.bool)
        plan = plan_of(every, tokens)
        precise = Recipe(KeepAll(), precision="exact")
    elif precise.quantized:
        raise ValueError(
            f"the forward ran in precision {precise.precision!r}, which has no gradient; use "
            "'half' or 'exact'"
        )
    saved = (grad_out, grad_lse, query, key, value, out)
    # The backend that ran the forward; for dense attention or `auto`, the first that can.
    asked = [b for b in backends() if b.name == backend] or backends()
    able = next(b for b in asked if b.refusal(host(), call) is None)
    gradient = getattr(able.stage("attend"), "attend_backward", attend_backward)
    with torch.no_grad(), without_autocast(call.device):
        return gradient(*saved, plan, tokens, scale=scale, recipe=precise)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    return_lse: bool,
    needs_grad: bool,
    backend: str,
    label: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = call_of(
        query,
        key,
        value.shape[3],
        is_causal,
        causal_align,
        scale,
        recipe,
        has_mask=attn_mask is not None,
        has_block_mask=block_mask is not None,
        return_lse=return_lse,
        needs_grad=needs_grad,
        label=label,
    )
    choice = choose(host(), call, backend)
    done = run_attention(query, key, value, attn_mask, block_mask, call, choice)
    note(done.run)
    plan = done.plan or _no_plan(query, key)
    lse = _unasked(query, query.shape[:3]) if done.lse is None else done.lse
    return done.out.contiguous(), lse, plan.counts, plan.indices, plan.allowed


def _no_plan(query: Tensor, key: Tensor) -> BlockPlan:
    """What stands for the plan of dense attention; the backward knows it by its counts."""
    counts, indices, allowed = fakes.fake_plan(query, key)
    tensors = (counts.fill_(-1), indices.fill_(-1), allowed.fill_(-1))
    return BlockPlan(*tensors, Lq=query.shape[2], Lk=key.shape[2])


def _attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    causal_align: str,
    scale: float,
    recipe: str,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    cuts = check_boundaries(query, key, cu_seqlens_q, cu_seqlens_k)
    q, k = (x.transpose(0, 1).unsqueeze(0) for x in (query, key))
    facts = (value.shape[2], is_causal, causal_align, scale, recipe)
    call = call_of(q, k, *facts, return_lse=return_lse)
    out, lse = run_varlen(query, key, value, cuts, call, backend=backend)
    return out, _unasked(query, (query.shape[1], query.shape[0])) if lse is None else lse


def _unasked(query: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for an LSE that nobody asked for: an op returns as many tensors on every route."""
    return query.new_full(shape, math.inf, dtype=work_dtype(query.dtype))  # which no LSE is


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, attn_mask, counts, indices, allowed, *ctx.facts = inputs
    out, _, pv_skips = output
    ctx.mark_non_differentiable(pv_skips)
    ctx.save_for_backward(query, key, value, out, attn_mask, counts, indices, allowed)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, attn_mask, _, *facts, _, _, backend, _ = inputs
    ctx.facts = (*facts, backend)
    out, _, *plan = output
    ctx.mark_non_differentiable(*plan)
    ctx.save_for_backward(query, key, value, out, attn_mask, *plan)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor, *_: Any) -> tuple[Any, ...]:
    """For `attend` and `attention` alike; what stands behind query, key, value has none."""
    grads = torch.ops.sparge.attend_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.facts)
    return (*grads, *(None,) * (len(ctx.needs_input_grad) - 3))


def _or_fake(impl: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors on the meta device have no numbers to compute with, only shapes."""
    return lambda query, *rest: (fake if query.is_meta else impl)(query, *rest)


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plan": (_plan, fakes.fake_plan),
    "quantize": (_quantize, fakes.fake_quantize),
    "attend": (_attend, fakes.fake_attend),
    "attend_quantized": (_attend_quantized, fakes.fake_attend_quantized),
    "attend_backward": (_backward, fakes.fake_backward),
    "attention": (_attention, fakes.fake_attention),
    "attention_varlen": (_attention_varlen, fakes.fake_attention_varlen),
}
for _name, (_impl, _fake) in _OPS.items():
    _library.impl(_name, _or_fake(_impl, _fake), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparge::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "sparge::attend", _gradients, setup_context=_save_attend, lib=_library
)
torch.library.register_autograd(
    "sparge::attention", _gradients, setup_context=_save_attention, lib=_library
)
