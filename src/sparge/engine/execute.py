"""One checked call, stage by stage, timed and recorded: prepare → predict → select → attend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.dense import attend_dense
from ..routing import Backend, Choice, choose, current_router, get_backend, host
from ..support.autocast import without_autocast
from ..support.later import Later
from ..values.backend import DENSE, torch_capability
from ..values.blockplan import BlockPlan, plan_from_mask
from ..values.call import Call, Inputs, allowed_blocks
from ..values.run import Run
from ..values.stages import (
    Attended,
    AttendedCall,
    Prepared,
    Stages,
    WholeCalls,
    prepare,
    raised_key_heads,
)
from ..values.tokenmask import EXCLUDED, TokenMask
from .recording import Stopwatch, count_blocks, note, numbers_of

Counted = dict[str, Tensor]


class Outcome(NamedTuple):
    """What a call gave. make_plan: None for dense attention, which has an LSE only when it was
    asked for."""

    out: Tensor
    lse: Tensor | None
    make_plan: Callable[[], BlockPlan] | None = None
    run: Run | None = None

    @property
    def plan(self) -> BlockPlan | None:
        return None if self.make_plan is None else self.make_plan()


def run_attention(
    call: Call,
    choice: Choice,
    inputs: Inputs,
    *,
    recorded: bool = False,
    keeps_plan: bool = False,
) -> Outcome:
    """The whole way of one call. The run is returned, not noted: varlen gathers several.

    recorded: make a run, though nobody records. keeps_plan: the outcome has the plan, if any.
    """
    if choice.provisional:
        choice = current_router().calibrate(call, choice)
    watch = Stopwatch(call, choice, inputs.query.device, recorded=recorded)
    if choice.backend == DENSE:
        return run_dense(call, inputs, watch)
    backend = get_backend(choice.backend)
    if backend.whole is not None:
        return _run_whole(backend.whole(), call, inputs, watch, keeps_plan=keeps_plan)
    with without_grad_and_autocast(call.device):
        tokens = with_kinds(backend, tokens_of(call, inputs))
        prepared, plan = _plan(call, inputs, tokens, backend, watch, to_attend=True)
        if not call.needs_grad:  # the backward needs the plan
            watch.choice = current_router().choose_after_plan(plan, call, choice)
        if watch.choice.backend == DENSE:
            return run_dense(call, inputs, watch)
        with watch.stage("attend"):
            done = attend_prepared(backend, call, prepared, plan, tokens)
    return Outcome(done.out, done.lse, lambda: plan, run_of("attention", watch, plan, done))


def _run_whole(
    whole: WholeCalls, call: Call, inputs: Inputs, watch: Stopwatch, *, keeps_plan: bool
) -> Outcome:
    """All stages at once, or dense attention once it is known to be faster."""
    plan = None
    if inputs.block_mask is not None:
        with watch.stage("select"):
            plan = _plan_of_mask(call, inputs.block_mask, tokens_of(call, inputs))
    # The backward needs the plan.
    limit = None if call.needs_grad or plan else current_router().kept_limit(call, watch.choice)
    keeps_plan |= watch.active
    found = _timed_call(whole, watch, call, inputs, plan=plan, limit=limit, keeps_plan=keeps_plan)
    done = found.attended
    if done is None:
        if watch.active:
            watch.choice = current_router().choose_after_plan(found.plan(), call, watch.choice)
        return run_dense(call, inputs, watch)
    record = run_of("attention", watch, found.plan(), done) if watch.active else None
    return Outcome(done.out, done.lse, found.plan if keeps_plan else None, record)


def _timed_call(
    whole: WholeCalls, watch: Stopwatch, call: Call, inputs: Inputs, **options: Any
) -> AttendedCall:
    if not watch.active:
        return whole.run_call(call, inputs, **options)
    start = time.perf_counter()
    found = whole.run_call(call, inputs, **options, timed=True)
    watch.whole(time.perf_counter() - start, found.seconds)
    return found


def run_plan(call: Call, inputs: Inputs, *, backend: str) -> BlockPlan:
    choice = choose(call, backend, dense_ok=False)
    watch = Stopwatch(call, choice, inputs.query.device)
    with without_grad_and_autocast(call.device):
        chosen = get_backend(choice.backend)
        if chosen.whole is not None and inputs.block_mask is None:
            plan = _timed_call(chosen.whole(), watch, call, inputs, attends=False).plan()
        else:
            tokens = with_kinds(chosen, tokens_of(call, inputs))
            _, plan = _plan(call, inputs, tokens, chosen, watch, to_attend=False)
    note(run_of("make_plan", watch, plan))
    return plan


def run_attend(call: Call, inputs: Inputs, plan: BlockPlan, *, backend: str) -> Attended:
    choice = choose(call, backend, dense_ok=False)
    chosen = get_backend(choice.backend)
    call = replace(call, plan_measured=plan.measured is not None)
    watch = Stopwatch(call, choice, inputs.query.device)
    with without_grad_and_autocast(call.device):
        tokens = tokens_of(call, inputs)
        if call.has_mask and not plan.has_mask:
            # Blocks that the mask hides wholly are neither attended nor counted.
            tokens = with_kinds(chosen, tokens)
            plan = plan_from_mask(plan.to_mask(), tokens, measured=plan.measured)
        if chosen.whole is not None:
            found = _timed_call(chosen.whole(), watch, call, inputs, plan=plan)
            assert found.attended is not None
            done = found.attended
        else:
            tokens, stages = with_kinds(chosen, tokens), chosen.stages()
            with watch.stage("prepare"):
                prepared = prepare(stages, call, inputs, to_plan=False, to_attend=True)
            with watch.stage("attend"):
                done = attend_prepared(chosen, call, prepared, plan, tokens)
    note(run_of("attend", watch, plan, done))
    return done


def attend_prepared(
    backend: Backend, call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask
) -> Attended:
    """The attend stage of a backend, with raised heads in `call.own_precision`."""
    if backend.raises_heads:
        return backend.stages().attend(call, prepared, plan, tokens)
    return attend_heads(backend.stages(), call, prepared, plan, tokens)


def _plan(
    call: Call,
    inputs: Inputs,
    tokens: TokenMask,
    backend: Backend,
    watch: Stopwatch,
    *,
    to_attend: bool,
) -> tuple[Prepared, BlockPlan]:
    """The first three stages; a block mask of the caller's is the plan itself."""
    stages, mask = backend.stages(), inputs.block_mask
    with watch.stage("prepare"):
        prepared = prepare(stages, call, inputs, to_plan=mask is None, to_attend=to_attend)
    if mask is not None:
        with watch.stage("select"):
            return prepared, _plan_of_mask(call, mask, tokens)
    mass = None
    if call.predicts:
        with watch.stage("predict"):
            mass = stages.predict(call, prepared, tokens)
    with watch.stage("select"):
        return prepared, stages.select(call, prepared, mass, tokens)


def _plan_of_mask(call: Call, mask: Tensor, tokens: TokenMask) -> BlockPlan:
    return plan_from_mask(mask.expand(call.B, call.Hq, call.n_q, call.n_k), tokens)


def tokens_of(call: Call, inputs: Inputs) -> TokenMask:
    return TokenMask(call.Lq, call.Lk, call.is_causal, call.offset, inputs.attn_mask)


def run_of(
    what: str, watch: Stopwatch, plan: BlockPlan, done: Attended | None = None
) -> Run | None:
    """The record of a sparse run; None, at no cost, while nobody records."""
    if not watch.active:
        return None
    pv_skips = None if done is None else done.pv_skips
    counted = None if watch.captured else watch.to_host(count_blocks(plan, pv_skips))
    return run_of_counted(what, watch, counted)


def run_of_counted(what: str, watch: Stopwatch, counted: Later[Counted] | None) -> Run:
    """The same by what was counted of the plan; None where a graph is captured."""
    backend, call = get_backend(watch.choice.backend), watch.call
    rows = backend.row_group
    facts = {"isa": backend.isa(host(*call.where), call), "row_group": rows}
    return make_run(what, watch, facts, counted, partial(numbers_of, call, row_group=rows))


def run_dense(call: Call, inputs: Inputs, watch: Stopwatch) -> Outcome:
    """Dense attention of one call, timed as the attend stage."""
    assert inputs.value is not None
    tokens = tokens_of(call, inputs)
    with watch.stage("attend"):
        out, lse = attend_dense(
            inputs.query,
            inputs.key,
            inputs.value,
            tokens,
            scale=call.scale,
            need_lse=call.return_lse,
        )
    return Outcome(out, lse, run=_run_of_dense(watch, tokens))


def _run_of_dense(watch: Stopwatch, tokens: TokenMask) -> Run | None:
    if not watch.active:
        return None
    call, mask = watch.call, tokens.attn_mask
    facts = {"isa": torch_capability(host(*call.where), call)}
    if watch.captured:
        return make_run("attention", watch, facts, None, dict)
    heads, counted = call.B * call.Hq, Counted()
    if mask is None:
        blocks = allowed_blocks(call.Lq, call.Lk, is_causal=call.is_causal, offset=call.offset)
    else:
        may = tokens.block_kinds(mask.device) != EXCLUDED
        counted, blocks = {"blocks": may.sum()}, 0
        heads //= may.shape[0] * may.shape[1]

    def numbers(found: Counted) -> dict[str, Any]:
        allowed = (int(found["blocks"]) if found else blocks) * heads
        nothing = {"sparsity": 0.0, "pv_skips": 0, "pv_groups": 0}
        return {"kept": allowed, "allowed": allowed, **nothing}

    return make_run("attention", watch, facts, watch.to_host(counted), numbers)


def make_run(
    what: str,
    watch: Stopwatch,
    facts: dict[str, Any],
    counted: Later[Counted] | None,
    numbers: Callable[[Counted], dict[str, Any]],
) -> Run:
    """The record of a call. facts: of this kind of run. numbers: makes those of the record of what
    was counted, which is None where a graph is captured."""
    choice = watch.choice
    known = {
        "what": what,
        "call": str(watch.call),
        "label": watch.call.label,
        "backend": choice.backend,
        "reason": choice.reason,
        "cost_source": "" if choice.estimate is None else choice.estimate.source,
        "routed_to_dense": choice.routed_to_dense,
        "rejected": dict(choice.rejected),
        "recipe": watch.call.recipe,
        **facts,
    }
    if counted is None:
        return Run.of_captured(known)
    return Run.of(known, counted.then(lambda x: {**numbers(x), **watch.times()}))


@contextmanager
def without_grad_and_autocast(device: str) -> Iterator[None]:
    """Stages compute without autograd, and autocast must not touch the integers in their sums."""
    with torch.no_grad(), without_autocast(device):
        yield


def attend_heads(
    stages: Stages, call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask
) -> Attended:
    """`Stages.attend` of a backend that attends in one precision: where an error budget raised
    heads, everything is attended a second time, in `call.own_precision`, and they take that."""
    done = stages.attend(call, prepared, plan, tokens)
    raised = raised_key_heads(plan, call.Hk) if call.recipe.quantized else []
    if not any(raised):
        return done
    own = replace(call, recipe=replace(call.recipe, precision=call.own_precision))
    queries, keys = prepared.queries, prepared.keys
    assert queries.own is not None
    assert keys.own_key is not None
    inputs = Inputs(queries.own, keys.own_key, keys.own_value)
    again = prepare(stages, own, inputs, to_plan=False, to_attend=True)
    heads = torch.tensor(raised, device=done.lse.device).repeat_interleave(call.Hq // call.Hk)
    pairs = zip(stages.attend(own, again, plan, tokens), done, strict=True)
    return Attended(*(torch.where(heads.view(-1, *[1] * (x.dim() - 2)), x, y) for x, y in pairs))


def with_kinds(backend: Backend, tokens: TokenMask) -> TokenMask:
    """The same with the kinds of its blocks, where they follow from a caller's mask and the backend
    computes them once for all stages."""
    if tokens.attn_mask is None or backend.block_kinds is None:
        return tokens
    return replace(tokens, kinds=backend.block_kinds(tokens))
