"""One checked call, stage by stage, timed and recorded: prepare → predict → select → attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .attend_heads import attend_heads
from .backend import DENSE, torch_capability
from .backends.dense import attend_dense
from .blockplan import BlockPlan, plan_from_mask
from .call import Call, Inputs
from .dispatch import Backend, Choice, choose, get_backend, host, route_by_plan, settle
from .geometry import diagonal_offset
from .record import Run, Stopwatch, note
from .stages import Attended, AttendedPack, PackedStages, Prepared, raised_key_heads
from .support.autocast import without_autocast
from .tokenmask import EXCLUDED, TokenMask

Cuts = tuple[list[int], list[int]]
"""Where packed sequences begin and end: of the queries, and of the keys."""


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
        return _run_dense(call, inputs, tokens, watch)
    backend = get_backend(choice.backend)
    with undisturbed(call.device):
        prepared, plan = _plan(call, inputs, tokens, backend, watch, to_attend=True)
        if not call.needs_grad:  # the backward needs the plan
            watch.choice = route_by_plan(plan, call, choice)
        if watch.choice.backend == DENSE:
            return _run_dense(call, inputs, tokens, watch)
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


def run_varlen(
    call: Call, query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, *, backend: str, align: str
) -> tuple[Tensor, Tensor | None]:
    """Packed sequences `[T, H, D]`: all at once where one backend serves them all and can, or one
    after another. `call` is the whole pack as one call."""
    outs, lses, runs = [], [], []
    each = choices(call, cuts, backend, align)
    at_once = _packed_stages(call, each)
    if at_once is not None:
        return _run_packed(call, query, key, value, cuts, align, at_once, each)
    for inputs, (one, choice) in zip(sequences(query, key, value, cuts), each, strict=True):
        done = run_attention(one, choice, inputs)
        outs.append(done.out[0].transpose(0, 1))
        lses.append(done.lse)
        runs.append(done.run)
    note(run_together(call, [run for run in runs if run is not None]))
    lse = torch.cat([x[0] for x in lses if x is not None], 1) if call.return_lse else None
    return torch.cat(outs), lse


def _packed_stages(call: Call, each: list[tuple[Call, Choice]]) -> PackedStages | None:
    """Stages that attend all sequences at once, if the same backend was chosen for all."""
    names = {choice.backend for _, choice in each}
    if len(names) != 1 or DENSE in names:
        return None
    backend = get_backend(names.pop())
    stages = None if backend.packed is None else backend.packed()
    return None if stages is None or stages.why_not_packed(call) else stages


def _run_packed(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cuts: Cuts,
    align: str,
    stages: PackedStages,
    each: list[tuple[Call, Choice]],
) -> tuple[Tensor, Tensor | None]:
    inputs = Inputs(*(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
    watch = Stopwatch(call, each[0][1], query.device)
    with undisturbed(call.device):
        done = stages.attend_packed(call, inputs, cuts, align, watch.stage)
    if watch.active:
        note(run_together(call, _parts_of_pack(watch, each, done)))
    return done.out, done.lse if call.return_lse else None


def _parts_of_pack(
    watch: Stopwatch, each: list[tuple[Call, Choice]], done: AttendedPack
) -> list[Run]:
    """One run for each sequence. They ran together: each has its share of the time, by blocks."""
    plans = done.plans()
    whole = max(sum(int(plan.allowed.sum()) for plan, _ in plans), 1)
    runs = []
    for (one, choice), (plan, skips) in zip(each, plans, strict=True):
        own = Stopwatch(one, choice, watch.device)
        share = int(plan.allowed.sum()) / whole
        own.seconds = {name: seconds * share for name, seconds in watch.seconds.items()}
        run = run_of("attention", own, plan, skips)
        assert run is not None
        runs.append(run)
    return runs


def choices(call: Call, cuts: Cuts, backend: str, align: str) -> list[tuple[Call, Choice]]:
    """What each packed sequence gets, by its own lengths; decided before any of them runs."""
    each = []
    for (q_start, q_stop), (k_start, k_stop) in zip(*map(pairwise, cuts), strict=True):
        Lq, Lk = q_stop - q_start, k_stop - k_start
        each.append(replace(call, Lq=Lq, Lk=Lk, offset=diagonal_offset(Lq, Lk, align)))
    return [(one, choose(one, backend)) for one in each]


def sequences(query: Tensor, key: Tensor, value: Tensor, cuts: Cuts) -> Iterator[Inputs]:
    """Views `[1, H, L, D]` of the packed sequences, one after another."""
    for (q_start, q_stop), (k_start, k_stop) in zip(*map(pairwise, cuts), strict=True):
        parts = (query[q_start:q_stop], key[k_start:k_stop], value[k_start:k_stop])
        yield Inputs(*(x.transpose(0, 1).unsqueeze(0) for x in parts))


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
        isa=backend.isa(host(watch.call.device), watch.call),
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


def _run_dense(call: Call, inputs: Inputs, tokens: TokenMask, watch: Stopwatch) -> Outcome:
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
    isa = torch_capability(host(call.device), call)
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


def run_together(call: Call, runs: list[Run]) -> Run | None:
    """One record of a varlen call: blocks add up, and each sequence keeps its own in `parts`."""
    if not runs:
        return None
    allowed = sum(run.allowed for run in runs)
    # Sequences may go to different backends, short ones to dense for example.
    names = list(dict.fromkeys(run.backend for run in runs))
    stages = dict.fromkeys(name for run in runs for name in run.seconds)
    errors, bounds = (
        [x for run in runs if (x := getattr(run, name)) is not None]
        for name in ("error_by_head", "bound_by_head")
    )
    return replace(
        runs[0],
        what="attention_varlen",
        call=f"{len(runs)} sequences, {call}",
        backend="+".join(names),
        isa="+".join(dict.fromkeys(run.isa for run in runs)),
        reason=runs[0].reason if len(names) == 1 else "each sequence by its own length; see parts",
        rejected=runs[0].rejected if len(names) == 1 else {},
        routed_to_dense=all(run.routed_to_dense for run in runs),
        sparsity=sum(run.sparsity * run.allowed for run in runs) / max(allowed, 1),
        kept=sum(run.kept for run in runs),
        allowed=allowed,
        pv_skips=sum(run.pv_skips for run in runs),
        pv_groups=sum(run.pv_groups for run in runs),
        kept_by_head=(),
        allowed_by_head=(),
        pv_skips_by_head=(),
        error_by_head=tuple(map(max, zip(*errors, strict=True))) if errors else None,
        bound_by_head=tuple(map(max, zip(*bounds, strict=True))) if bounds else None,
        precision_by_head=None,
        seconds={name: sum(run.seconds.get(name, 0.0) for run in runs) for name in stages},
        parts=tuple(runs),
    )


@contextmanager
def undisturbed(device: str) -> Iterator[None]:
    """Stages compute without autograd, and autocast must not touch the integers in their sums."""
    with torch.no_grad(), without_autocast(device):
        yield
