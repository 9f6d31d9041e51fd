"""`torch.ops.sparge.*`: the public calls as ops, with fake kernels, for compiled graphs.

A recipe crosses as its JSON, a plan as its tensors, the diagonal as an integer offset. Token ranges
that are protected in place of the recipe's cross as `start, stop, start, stop, …`: a graph knows
them only while it is traced, and cannot make a recipe. Every op checks its arguments when it runs,
as the Python functions do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..routing import choose, current_router, get_backend
from ..values.backend import AUTO, DENSE, Backend
from ..values.blockplan import BlockPlan, plan_from_mask
from ..values.call import BLOCK_K, BLOCK_Q, Call, Inputs, n_blocks, work_dtype
from ..values.recipe import KeepAll, KeepError, Recipe, recipe_from_json, recipe_with_protected
from ..values.stages import Saved
from .check import check_and_choose, check_boundaries, check_call, check_plan, check_varlen
from .execute import run_attend, run_attention, run_plan, tokens_of, without_grad_and_autocast
from .execute_varlen import run_varlen
from .recording import GRAPH_LISTENERS, note

_FACTS = "bool is_causal, SymInt offset, float scale, str recipe"
_PLAN = "Tensor counts, Tensor indices, Tensor allowed"
_library = torch.library.Library("sparge", "DEF")
_library.define(
    f"plan(Tensor query, Tensor key, Tensor? attn_mask, Tensor? block_mask, {_FACTS}, str backend,"
    f" Tensor? value=None) -> ({_PLAN}, Tensor measured)"
)
_library.define(
    f"attend(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_PLAN}, {_FACTS},"
    " str backend, Tensor? measured=None) -> (Tensor out, Tensor lse, Tensor pv_skips)"
)
_library.define(
    "attend_backward(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value,"
    f" Tensor out, Tensor? attn_mask, {_PLAN}, {_FACTS}, str backend)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? block_mask,"
    f" {_FACTS}, bool return_lse, bool needs_grad, str backend, str label='',"
    f" int[]? protect=None) -> (Tensor out, Tensor lse, {_PLAN})"
)
_library.define(
    "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, bool is_causal, str causal_align, float scale, str recipe,"
    " bool return_lse, str backend) -> (Tensor out, Tensor lse)"
)
PlanTensors = tuple[Tensor, Tensor, Tensor]


class Given(SimpleNamespace):
    """The arguments of an op, by their names in its schema; these are None where it has none."""

    attn_mask: Any = None
    block_mask: Any = None
    measured: Any = None
    protect: Any = None

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.query, self.key, self.value, self.attn_mask, self.block_mask)

    @property
    def facts(self) -> dict[str, Any]:
        """Arguments of `check_call`; heads may always be grouped here."""
        recipe = recipe_from_json(self.recipe)
        if self.protect is not None:
            pairs = zip(self.protect[::2], self.protect[1::2], strict=True)
            recipe = recipe_with_protected(recipe, tuple(pairs))
        facts = {"is_causal": self.is_causal, "scale": self.scale, "backend": self.backend}
        return {**facts, "enable_gqa": True, "recipe": recipe}

    def call(self, **more: Any) -> Call:
        masks = {"attn_mask": self.attn_mask, "block_mask": self.block_mask}
        facts = {**masks, **self.facts, "offset": self.offset, **more}
        return check_call(self.query, self.key, self.value, **facts)

    def plan(self, call: Call) -> BlockPlan:
        tensors = (self.counts, self.indices, self.allowed)
        plan = plan_of_tensors(tensors, call, self.measured)
        check_plan(plan, call, self.query.device)
        return plan


def facts_of(call: Call) -> tuple[bool, int, float, str]:
    """What an op is told of a call besides its tensors."""
    return call.is_causal, call.offset, call.scale, call.recipe.to_json()


def plan_of_tensors(plan: PlanTensors, call: Call, measured: Tensor | None = None) -> BlockPlan:
    return BlockPlan(
        *plan,
        Lq=call.Lq,
        Lk=call.Lk,
        is_causal=call.is_causal,
        offset=call.offset,
        has_mask=call.has_mask,
        measured=measured if measured is not None and measured.numel() else None,
    )


def _plan(given: Given) -> tuple[Tensor, ...]:
    plan = run_plan(given.call(planning=True), given.inputs, backend=given.backend)
    measured = plan.measured
    if measured is None:
        measured = given.query.new_empty(0, dtype=torch.float64)
    return plan.counts, plan.indices, plan.allowed, measured


def _attend(given: Given) -> tuple[Tensor, ...]:
    call = given.call()
    # Whether it was made with the mask is not known here; without it, `allowed` is made anew.
    plan = replace(given.plan(call), has_mask=False)
    done = run_attend(call, given.inputs, plan, backend=given.backend)
    return done.out, done.lse, done.pv_skips


def _backward(given: Given) -> tuple[Tensor, ...]:
    call = replace(given.call(backend=AUTO), needs_grad=True)
    query, rows = given.query, (call.B, call.Hq, call.Lq)
    for name, shape in (
        ("grad_out", (*rows, call.Dv)),
        ("out", (*rows, call.Dv)),
        ("grad_lse", rows),
    ):
        x = getattr(given, name)
        if x.shape != shape or x.device != query.device or not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating point of shape {list(shape)} on {query.device}, got "
                f"{x.dtype} {list(x.shape)} on {x.device}"
            )
    dense = choose(call, given.backend).backend == DENSE
    _check_gradient(call, dense=dense)
    if dense:  # it kept every block and rounded nothing
        call = replace(call, recipe=Recipe(KeepAll(), precision="exact"))
    plan, tokens = given.plan(call), tokens_of(call, given.inputs)
    saved = Saved(query, given.key, given.value, given.out, given.grad_out, given.grad_lse)
    with without_grad_and_autocast(call.device):
        return _gradient_backend(call, given.backend).stages().backward(call, saved, plan, tokens)


def _check_gradient(call: Call, *, dense: bool) -> None:
    if call.recipe.quantized and not dense:
        raise ValueError(
            f"precision {call.recipe.precision!r} has no gradient; use 'half' or 'exact'"
        )
    if call.recipe.pools and not dense:
        raise ValueError("skipped 'pool' has no gradient; use skipped='drop'")


def _gradient_backend(call: Call, backend: str) -> Backend:
    """The backend that was asked for; the first that can where dense attention or `auto` was."""
    router = current_router()
    requested, _ = router.requested(backend)
    if requested not in (AUTO, DENSE):
        return get_backend(choose(call, backend, dense_ok=False).backend)
    return router.first_able(call)


def _attention(given: Given) -> tuple[Tensor, ...]:
    inputs, more = given.inputs, {"return_lse": given.return_lse, "label": given.label}
    call, choice, _ = check_and_choose(inputs, **{**given.facts, "offset": given.offset, **more})
    if given.needs_grad:
        call = replace(call, needs_grad=True)
        choice = choose(call, given.backend)
        _check_gradient(call, dense=choice.backend == DENSE)
    listener = GRAPH_LISTENERS.get(given.label)
    done = run_attention(call, choice, inputs, recorded=listener is not None, keeps_plan=True)
    note(done.run)
    if listener is not None and done.run is not None:
        listener.note(done.run)
    plan = done.plan or _plan_of_dense(call, inputs)
    lse = _unasked(given.query, given.query.shape[:3]) if done.lse is None else done.lse
    return done.out.contiguous(), lse, plan.counts, plan.indices, plan.allowed


def _plan_of_dense(call: Call, inputs: Inputs) -> BlockPlan:
    """Every block, for the backward; without a gradient nobody reads it, and it says -1."""
    if call.needs_grad:
        every = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=inputs.query.device)
        shape = (call.B, call.Hq, call.n_q, call.n_k)
        return plan_from_mask(every.expand(shape), tokens_of(call, inputs))
    counts, indices, allowed = (x.fill_(-1) for x in _plan_tensors(inputs.query, call.Lk))
    return plan_of_tensors((counts, indices, allowed), call)


def _attention_varlen(given: Given) -> tuple[Tensor, ...]:
    query, key, align = given.query, given.key, given.causal_align
    packed = (query, key, given.value)
    boundaries = (given.cu_seqlens_q, given.cu_seqlens_k)
    facts = {**given.facts, "causal_align": align, "return_lse": given.return_lse}
    call = check_varlen(*packed, *boundaries, **facts)
    cuts = check_boundaries(query, key, *boundaries)
    done = run_varlen(call, *packed, cuts, backend=given.backend, align=align)
    note(done.run)
    lse = _unasked(query, (query.shape[1], query.shape[0])) if done.lse is None else done.lse
    return done.out, lse


def _unasked(query: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for an LSE that nobody asked for."""
    return query.new_full(shape, math.inf, dtype=work_dtype(query.dtype))  # which no LSE is


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, attn_mask, counts, indices, allowed, *facts = inputs
    ctx.facts = facts[:5]  # `measured` chooses precisions that have no gradient
    out, _, pv_skips = output
    ctx.mark_non_differentiable(pv_skips)
    ctx.save_for_backward(query, key, value, out, attn_mask, counts, indices, allowed)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, attn_mask, _, *facts, _, _, backend, _, _ = inputs
    ctx.facts = (*facts, backend)
    out, _, *plan = output
    ctx.mark_non_differentiable(*plan)
    ctx.save_for_backward(query, key, value, out, attn_mask, *plan)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor, *_: Any) -> tuple[Any, ...]:
    """For `attend` and `attention` alike; the arguments after query, key and value have none."""
    grads = torch.ops.sparge.attend_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.facts)
    return (*grads, *(None,) * (len(ctx.needs_input_grad) - 3))


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "sparge attention has no second derivative; use F.scaled_dot_product_attention where "
        "gradients of gradients are needed (create_graph=True)"
    )


# Fake kernels: shapes, dtypes and strides of what the ops return, for graphs being traced.


def _plan_tensors(query: Tensor, Lk: int) -> tuple[Tensor, Tensor, Tensor]:
    """counts, indices, allowed, not written."""
    B, Hq, Lq = query.shape[:3]
    rows = (B, Hq, n_blocks(Lq, BLOCK_Q))
    counts, indices, allowed = (
        query.new_empty(shape, dtype=torch.int32)
        for shape in (rows, (*rows, n_blocks(Lk, BLOCK_K)), rows)
    )
    return counts, indices, allowed


def _fake_plan(
    query: Tensor, key: Tensor, attn_mask: Any, block_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recipe = recipe_from_json(rest[3])
    measures = isinstance(recipe.keep, KeepError) and block_mask is None
    shape = (3, *query.shape[:2]) if measures else (0,)
    return (*_plan_tensors(query, key.shape[2]), query.new_empty(shape, dtype=torch.float64))


def _fake_attend(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, Hq, Lq = query.shape[:3]
    return (
        query.new_empty((B, Hq, Lq, value.shape[3])),
        query.new_empty((B, Hq, Lq), dtype=work_dtype(query.dtype)),
        query.new_empty((B, Hq, n_blocks(Lq, BLOCK_Q)), dtype=torch.int32),
    )


def _fake_attend_backward(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (query, key, value))
    return q, k, v


def _fake_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, lse, _ = _fake_attend(query, key, value)
    return (out, lse, *_plan_tensors(query, key.shape[2]))


def _fake_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    Tq, Hq = query.shape[:2]
    lse = query.new_empty((Hq, Tq), dtype=work_dtype(query.dtype))
    return query.new_empty((Tq, Hq, value.shape[2])), lse


def _kernel(
    name: str, impl: Callable[[Given], Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """The op's function: by names, or the fake one for tensors on the meta device."""
    arguments = getattr(torch.ops.sparge, name).default._schema.arguments
    defaults = {each.name: each.default_value for each in arguments}

    def run(*values: Any) -> Any:
        if values[0].is_meta:
            return fake(*values)
        # Trailing arguments that have their default are not passed on.
        return impl(Given(**{**defaults, **dict(zip(defaults, values, strict=False))}))

    return run


_OPS: dict[str, tuple[Callable[[Given], Any], Callable[..., Any]]] = {
    "plan": (_plan, _fake_plan),
    "attend": (_attend, _fake_attend),
    "attend_backward": (_backward, _fake_attend_backward),
    "attention": (_attention, _fake_attention),
    "attention_varlen": (_attention_varlen, _fake_attention_varlen),
}
_AUTOGRAD: dict[str, tuple[Callable[..., Any], Callable[..., None] | None]] = {
    "attend": (_gradients, _save_attend),
    "attention": (_gradients, _save_attention),
    "attend_backward": (_no_second_derivative, None),
}
for _name, (_impl, _fake) in _OPS.items():
    _library.impl(_name, _kernel(_name, _impl, _fake), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparge::{_name}", _fake, lib=_library)
for _name, (_back, _save) in _AUTOGRAD.items():
    torch.library.register_autograd(f"sparge::{_name}", _back, setup_context=_save, lib=_library)
