"""One checked call, stage by stage, timed and recorded: prepare → predict → select → attend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

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
from ..values.stages import Attended, Prepared, Stages, WholeCalls, prepare, raised_key_heads
from ..values.tokenmask import EXCLUDED, TokenMask
from .recording import Stopwatch, count_blocks, note, numbers_of

Counted = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a call gave; dense attention has no plan, and an LSE only when it was asked for."""

    out: Tensor
    lse: Tensor | None
    plan: BlockPlan | None = None
    run: Run | None = None


def run_attention(call: Call, choice: Choice, inputs: Inputs, *, recorded: bool = False) -> Outcome:
    """The whole way of one call. The run is returned, not noted: varlen gathers several.

    recorded: make a run, though nobody records.
    """
    tokens = tokens_of(call, inputs)
    if choice.provisional:
        choice = current_router().calibrate(call, choice)
    watch = Stopwatch(call, choice, inputs.query.device, recorded=recorded)
    if choice.backend == DENSE:
        return run_dense(call, inputs, tokens, watch)
    backend = get_backend(choice.backend)
    whole = None if call.needs_grad or call.has_block_mask else backend.whole
    if whole is not None and whole().why_in_stages(call) is None:
        return _run_whole(whole(), call, inputs, tokens, watch)
    with without_grad_and_autocast(call.device):
        tokens = with_kinds(backend, tokens)
        prepared, plan = _plan(call, inputs, tokens, backend, watch, to_attend=True)
        if not call.needs_grad:  # the backward needs the plan
            watch.choice = current_router().choose_after_plan(plan, call, choice)
        if watch.choice.backend == DENSE:
            return run_dense(call, inputs, tokens, watch)
        with watch.stage("attend"):
            done = _attend(backend, call, prepared, plan, tokens)
    return Outcome(done.out, done.lse, plan, run_of("attention", watch, plan, done.pv_skips))


def _run_whole(
    whole: WholeCalls, call: Call, inputs: Inputs, tokens: TokenMask, watch: Stopwatch
) -> Outcome:
    """All stages at once, or dense attention once it is known to be faster."""
    router, start = current_router(), time.perf_counter()
    limit = router.kept_limit(call, watch.choice)
    found = whole.attend_call(call, inputs, tokens, limit=limit, timed=watch.active)
    if found.attended is None:
        watch.choice = router.choose_after_plan(found.plan, call, watch.choice)
    if watch.active:
        watch.whole(time.perf_counter() - start, found.seconds)
    done = found.attended
    if done is None:
        return run_dense(call, inputs, tokens, watch)
    record = run_of("attention", watch, found.plan, done.pv_skips)
    return Outcome(done.out, done.lse, found.plan, record)


def run_plan(call: Call, inputs: Inputs, *, backend: str) -> BlockPlan:
    choice = choose(call, backend, dense_ok=False)
    watch = Stopwatch(call, choice, inputs.query.device)
    with without_grad_and_autocast(call.device):
        chosen = get_backend(choice.backend)
        tokens = with_kinds(chosen, tokens_of(call, inputs))
        _, plan = _plan(call, inputs, tokens, chosen, watch, to_attend=False)
    note(run_of("make_plan", watch, plan))
    return plan


def run_attend(call: Call, inputs: Inputs, plan: BlockPlan, *, backend: str) -> Attended:
    choice = choose(call, backend, dense_ok=False)
    chosen = get_backend(choice.backend)
    stages = chosen.stages()
    watch = Stopwatch(call, choice, inputs.query.device)
    with without_grad_and_autocast(call.device):
        tokens = with_kinds(chosen, tokens_of(call, inputs))
        if call.has_mask and not plan.has_mask:
            # Blocks that the mask hides wholly are neither attended nor counted.
            plan = plan_from_mask(plan.to_mask(), tokens, measured=plan.measured)
        with watch.stage("prepare"):
            prepared = prepare(stages, call, inputs, to_plan=False, to_attend=True)
        with watch.stage("attend"):
            done = _attend(chosen, call, prepared, plan, tokens)
    note(run_of("attend", watch, plan, done.pv_skips))
    return done


def _attend(
    backend: Backend, call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask
) -> Attended:
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
    counted = None if watch.captured else watch.to_host(count_blocks(plan, pv_skips))
    return run_of_counted(what, watch, counted)


def run_of_counted(what: str, watch: Stopwatch, counted: Later[Counted] | None) -> Run:
    """The same by what was counted of the plan; None where a graph is captured."""
    backend, call = get_backend(watch.choice.backend), watch.call
    rows = backend.row_group
    facts = {"isa": backend.isa(host(*call.where), call), "row_group": rows}
    return make_run(what, watch, facts, counted, partial(numbers_of, call, row_group=rows))


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
    return Run.of(known, counted.then(lambda x: {**numbers(x), "seconds": watch.seconds()}))


@contextmanager
def without_grad_and_autocast(device: str) -> Iterator[None]:
    """Stages compute without autograd, and autocast must not touch the integers in their sums."""
    with torch.no_grad(), without_autocast(device):
        yield


def attend_heads(
    stages: Stages, call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask
) -> Attended:
    """`Stages.attend`, with raised heads in `call.own_precision`."""
    raised = raised_key_heads(plan, call.Hk) if call.recipe.quantized else [False]
    if not any(raised):
        return stages.attend(call, prepared, plan, tokens)
    parts = []
    for is_raised, run in groupby(range(call.Hk), key=raised.__getitem__):
        heads = list(run)
        own = HeadRange(heads[0], heads[-1] + 1, call.Hq // call.Hk)
        recipe = call.recipe.heads(own.queries.start, own.queries.stop)
        if is_raised:
            recipe = replace(recipe, precision=call.own_precision)
        Hq = own.queries.stop - own.queries.start
        part = replace(call, Hq=Hq, Hk=len(heads), recipe=recipe)
        if is_raised:
            its = prepare(stages, part, own.inputs(prepared), to_plan=False, to_attend=True)
        else:
            its = prepared.heads(own.keys, own.queries)
        parts.append(stages.attend(part, its, own.plan(plan), tokens.heads(own.queries)))
    return Attended(
        torch.cat([part.out for part in parts], 1),
        torch.cat([part.lse for part in parts], 1),
        torch.cat([part.pv_skips for part in parts], 1),
    )


class HeadRange:
    """Key heads `start … stop-1` and their query heads, cut out of what a stage reads."""

    def __init__(self, start: int, stop: int, group: int) -> None:
        self.keys, self.queries = slice(start, stop), slice(start * group, stop * group)

    def inputs(self, prepared: Prepared) -> Inputs:
        """The caller's own tensors."""
        query, key, value = prepared.queries.own, prepared.keys.own_key, prepared.keys.own_value
        assert query is not None
        assert key is not None
        assert value is not None
        return Inputs(query[:, self.queries], key[:, self.keys], value[:, self.keys])

    def plan(self, plan: BlockPlan) -> BlockPlan:
        def cut(x: Tensor) -> Tensor:
            return x[:, self.queries].contiguous()

        counts, indices, allowed = cut(plan.counts), cut(plan.indices), cut(plan.allowed)
        lists = replace(plan, counts=counts, indices=indices, allowed=allowed, measured=None)
        return lists.trust()


def with_kinds(backend: Backend, tokens: TokenMask) -> TokenMask:
    """The same with the kinds of its blocks, where they follow from a caller's mask and the backend
    computes them once for all stages."""
    if tokens.attn_mask is None or backend.block_kinds is None:
        return tokens
    return replace(tokens, kinds=backend.block_kinds(tokens))
