"""One checked call, stage by stage, timed and recorded: prepare → predict → select → attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attend_heads import attend_heads
from .backend import DENSE, torch_capability
from .backends.dense import attend_dense
from .blockplan import BlockPlan, plan_from_mask
from .call import Call, Inputs
from .dispatch import Backend, Choice, choose, get_backend, host, route_by_plan, settle
from .record import Run, Stopwatch, note
from .stages import Attended, Prepared, raised_key_heads
from .support.autocast import without_autocast
from .tokenmask import EXCLUDED, TokenMask


@dataclass(frozen=True)
class Outcome:
    """What a call gave; dense attention has no plan, and an LSE only when it was asked for."""

    out: Tensor
    lse: Tensor | None
    plan: BlockPlan | None = None
    run: Run | None = None


def run_attention(call: Call, choice: Choice, inputs: Inputs) -> Outcome:
    """The whole way of one call. The run is returned, not noted: varlen gathers several."""
    tokens = tokens_of(call, inputs)
    choice = settle(call, choice)
    watch = Stopwatch(call, choice, inputs.query.device)
    if choice.backend == DENSE:
        return run_dense(call, inputs, tokens, watch)
    backend = get_backend(choice.backend)
    with undisturbed(call.device):
        prepared, plan = _plan(call, inputs, tokens, backend, watch, to_attend=True)
        if not call.needs_grad:  # the backward needs the plan
            watch.choice = route_by_plan(plan, call, choice)
        if watch.choice.backend == DENSE:
            return run_dense(call, inputs, tokens, watch)
        with watch.stage("attend"):
            done = _attend(backend, call, inputs, prepared, plan, tokens)
    return Outcome(done.out, done.lse, plan, run_of("attention", watch, plan, done.pv_skips))


def run_plan(call: Call, inputs: Inputs, *, backend: str) -> BlockPlan:
    choice = choose(call, backend, dense_ok=False)
    watch = Stopwatch(call, choice, inputs.query.device)
    with undisturbed(call.device):
        chosen = get_backend(choice.backend)
        _, plan = _plan(call, inputs, tokens_of(call, inputs), chosen, watch, to_attend=False)
    note(run_of("make_plan", watch, plan))
    return plan


def run_attend(call: Call, inputs: Inputs, plan: BlockPlan, *, backend: str) -> Attended:
    choice = choose(call, backend, dense_ok=False)
    chosen = get_backend(choice.backend)
    stages = chosen.stages()
    watch = Stopwatch(call, choice, inputs.query.device)
    tokens = tokens_of(call, inputs)
    with undisturbed(call.device):
        if call.has_mask and not plan.has_mask:
            # Blocks that the mask hides wholly are neither attended nor counted.
            plan = plan_from_mask(plan.to_mask(), tokens, measured=plan.measured)
        with watch.stage("prepare"):
            prepared = stages.prepare(call, inputs, to_plan=False, to_attend=True)
        with watch.stage("attend"):
            done = _attend(chosen, call, inputs, prepared, plan, tokens)
    note(run_of("attend", watch, plan, done.pv_skips))
    return done


def _attend(
    backend: Backend,
    call: Call,
    inputs: Inputs,
    prepared: Prepared,
    plan: BlockPlan,
    tokens: TokenMask,
) -> Attended:
    if backend.raises_heads:
        return backend.stages().attend(call, prepared, plan, tokens)
    return attend_heads(backend.stages(), call, inputs, prepared, plan, tokens)


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
        prepared = stages.prepare(call, inputs, to_plan=mask is None, to_attend=to_attend)
    if mask is not None:
        with watch.stage("select"):
            return prepared, plan_from_mask(
                mask.expand(call.B, call.Hq, call.n_q, call.n_k), tokens
            )
    mass = None
    if call.predicts:
        with watch.stage("predict"):
            mass = stages.predict(call, prepared, tokens)
    with watch.stage("select"):
        return prepared, stages.select(call, prepared, mass, tokens)


def tokens_of(call: Call, inputs: Inputs) -> TokenMask:
    return TokenMask(call.Lq, call.Lk, call.is_causal, call.offset, inputs.attn_mask)


def run_of(
    what: str, watch: Stopwatch, plan: BlockPlan, pv_skips: Tensor | None = None
) -> Run | None:
    """The record of a sparse run; None, at no cost, while nobody records."""
    if not watch.active:
        return None
    backend = get_backend(watch.choice.backend)
    rows = backend.row_group
    return _run(
        what,
        watch,
        isa=backend.isa(host(*watch.call.where), watch.call),
        sparsity=plan.sparsity(pv_skips, rows),
        kept=int(plan.counts.sum()),
        allowed=int(plan.allowed.sum()),
        pv_skips=0 if pv_skips is None else int(pv_skips.sum()),
        pv_groups=plan.pv_groups(rows),
        row_group=rows,
        kept_by_head=_by_head(plan.counts),
        allowed_by_head=_by_head(plan.allowed),
        pv_skips_by_head=() if pv_skips is None else _by_head(pv_skips),
        error_by_head=_worst(plan.error),
        bound_by_head=_worst(plan.bound),
        precision_by_head=_precisions(watch.call, plan),
    )


def _worst(x: Tensor | None) -> tuple[float, ...] | None:
    """`[B, Hq]` to the largest number of the batch for each query head."""
    return None if x is None else tuple(x.amax(0).tolist())


def _precisions(call: Call, plan: BlockPlan) -> tuple[str, ...] | None:
    raised = raised_key_heads(plan, call.Hk)
    if not any(raised) or not call.recipe.quantized:
        return None
    group, names = call.Hq // call.Hk, (call.recipe.precision, call.own_precision)
    return tuple(names[x] for x in raised for _ in range(group))


def _by_head(counts: Tensor) -> tuple[int, ...]:
    """`[B, Hq, n_q]` to one number for each query head."""
    return tuple(counts.sum((0, 2)).tolist())


def run_dense(call: Call, inputs: Inputs, tokens: TokenMask, watch: Stopwatch) -> Outcome:
    """Dense attention of one call, timed as the attend stage."""
    assert inputs.value is not None
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
    may = tokens.block_kinds(torch.device("cpu") if mask is None else mask.device)
    heads = call.B * call.Hq // (may.shape[0] * may.shape[1])
    allowed = int((may != EXCLUDED).sum()) * heads
    facts = {"sparsity": 0.0, "pv_skips": 0, "pv_groups": 0}
    isa = torch_capability(host(*call.where), call)
    return _run("attention", watch, isa=isa, kept=allowed, allowed=allowed, **facts)


def _run(what: str, watch: Stopwatch, **facts: Any) -> Run:
    choice: Choice = watch.choice
    return Run(
        what=what,
        call=str(watch.call),
        label=watch.call.label,
        backend=choice.backend,
        reason=choice.reason,
        cost_source="" if choice.estimate is None else choice.estimate.source,
        routed_to_dense=choice.routed_to_dense,
        rejected=dict(choice.rejected),
        recipe=watch.call.recipe,
        seconds={**watch.seconds, "total": sum(watch.seconds.values())},
        **facts,
    )


@contextmanager
def undisturbed(device: str) -> Iterator[None]:
    """Stages compute without autograd, and autocast must not touch the integers in their sums."""
    with torch.no_grad(), without_autocast(device):
        yield
