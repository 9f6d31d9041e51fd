"""One checked call, stage by stage, timed and recorded: plan → quantize → attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .attend import Attended, attend
from .backends.cpu.calibrate import settle
from .backends.cpu.crossover import CLEARLY
from .backends.dense import attend_dense
from .blockplan import BlockPlan
from .call import Call
from .dispatch.choose import DENSE, DENSE_BACKEND, Backend, Choice, choose, get_backend, host
from .plan import make_plan
from .qtensor import Operands
from .quantize import quantize
from .record import Run, Stopwatch, note
from .support.autocast import without_autocast
from .tokenmask import EXCLUDED, TokenMask


@dataclass(frozen=True)
class Outcome:
    """What a call gave; dense attention has no plan, and an LSE only when it was asked for."""

    out: Tensor
    lse: Tensor | None
    plan: BlockPlan | None = None
    pv_skips: Tensor | None = None
    run: Run | None = None


def run_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    call: Call,
    choice: Choice,
) -> Outcome:
    """The whole journey of one call. The run is returned, not noted: varlen gathers several."""
    tokens = tokens_of(call, attn_mask)
    choice = settle(call, choice)
    watch = Stopwatch(call, choice, query.device)
    if choice.backend == DENSE:
        return _run_dense(query, key, value, tokens, call, watch)
    chosen = get_backend(choice.backend)
    with _undisturbed(call.device):
        if chosen.shares_statistics and block_mask is None:
            plan, operands = _plan_and_quantize(query, key, value, tokens, call, chosen, watch)
        else:
            with watch.stage("plan"):
                plan = _plan(query, key, value, tokens, block_mask, call, chosen)
            with watch.stage("quantize"):
                operands = _quantize(query, key, value, call, chosen)
        watch.choice = route_by_plan(plan, call, choice)
        if watch.choice.backend == DENSE:
            return _run_dense(query, key, value, tokens, call, watch)
        with watch.stage("attend"):
            done = _attend(operands, plan, tokens, call, chosen)
    run = run_of("attention", watch, plan, done.pv_skips)
    return Outcome(done.out, done.lse, plan, done.pv_skips, run)


def route_by_plan(plan: BlockPlan, call: Call, choice: Choice) -> Choice:
    """The choice again, once the plan says what it keeps: dense attention if that is faster now.

    What came before is paid for, so attention alone is compared.
    """
    if choice.estimate is None:
        return choice
    costs = host().crossover
    kept, blocks = int(plan.counts.sum()), plan.indices.numel()
    dense, ours = costs.predict_dense(call), costs.predict_attend(call, kept / blocks)
    if ours < CLEARLY * dense:
        return choice
    whole = costs.predict_attend(call, int(plan.allowed.sum()) / blocks)
    why = (
        f"the plan keeps {plan.density:.0%} of the blocks; dense attention is faster from "
        f"{CLEARLY * dense / whole:.0%} ({choice.estimate.source})"
    )
    others = {name: reason for name, reason in choice.rejected.items() if name != DENSE}
    return replace(
        choice,
        backend=DENSE,
        reason=why,
        rejected={choice.backend: why, **others},
        routed_to_dense=True,
    )


def run_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cuts: tuple[list[int], list[int]],
    call: Call,
    *,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Every packed sequence `[T, H, D]` on its own; `call` is the whole pack as one call."""
    outs, lses, runs = [], [], []
    for (q, k, v), (one, choice) in zip(
        sequences(query, key, value, cuts), choices(call, cuts, backend), strict=True
    ):
        done = run_attention(q, k, v, None, None, one, choice)
        outs.append(done.out[0].transpose(0, 1))
        lses.append(done.lse)
        runs.append(done.run)
    note(run_together(call, [run for run in runs if run is not None]))
    lse = torch.cat([x[0] for x in lses if x is not None], 1) if call.return_lse else None
    return torch.cat(outs), lse


def choices(
    call: Call, cuts: tuple[list[int], list[int]], backend: str
) -> list[tuple[Call, Choice]]:
    """What each packed sequence gets, by its own lengths; decided before any of them runs."""
    each = [
        replace(call, Lq=q_stop - q_start, Lk=k_stop - k_start)
        for (q_start, q_stop), (k_start, k_stop) in zip(*map(pairwise, cuts), strict=True)
    ]
    return [(one, choose(host(), one, backend)) for one in each]


def sequences(
    query: Tensor, key: Tensor, value: Tensor, cuts: tuple[list[int], list[int]]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views `[1, H, L, D]` of the packed sequences, one after another."""
    q_cuts, k_cuts = cuts
    for i in range(len(q_cuts) - 1):
        q_rows, k_rows = slice(q_cuts[i], q_cuts[i + 1]), slice(k_cuts[i], k_cuts[i + 1])
        parts = (query[q_rows], key[k_rows], value[k_rows])
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in parts)
        yield q, k, v


def run_plan(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    block_mask: Tensor | None,
    call: Call,
    *,
    backend: str,
    value: Tensor | None = None,
) -> BlockPlan:
    choice = choose(host(), call, backend, dense_ok=False)
    watch = Stopwatch(call, choice, query.device)
    with _undisturbed(call.device), watch.stage("plan"):
        tokens = tokens_of(call, attn_mask)
        chosen = get_backend(choice.backend)
        plan = _plan(query, key, value, tokens, block_mask, call, chosen)
    note(run_of("make_plan", watch, plan))
    return plan


def run_quantize(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, backend: str
) -> Operands:
    choice = choose(host(), call, backend, dense_ok=False)
    with _undisturbed(call.device):
        return _quantize(query, key, value, call, get_backend(choice.backend))


def run_attend(
    operands: Operands | tuple[Tensor, Tensor, Tensor],
    plan: BlockPlan,
    attn_mask: Tensor | None,
    call: Call,
    *,
    backend: str,
) -> Attended:
    """Attend to operands, or to the caller's tensors, which are quantized first."""
    choice = choose(host(), call, backend, dense_ok=False)
    chosen = get_backend(choice.backend)
    watch = Stopwatch(call, choice, plan.counts.device)
    with _undisturbed(call.device):
        if not isinstance(operands, Operands):
            with watch.stage("quantize"):
                operands = _quantize(*operands, call, chosen)
        with watch.stage("attend"):
            done = _attend(operands, plan, tokens_of(call, attn_mask), call, chosen)
    note(run_of("attend", watch, plan, done.pv_skips))
    return done


def tokens_of(call: Call, attn_mask: Tensor | None) -> TokenMask:
    return TokenMask(call.Lq, call.Lk, call.is_causal, call.causal_align, attn_mask)


def run_of(
    what: str, watch: Stopwatch, plan: BlockPlan, pv_skips: Tensor | None = None
) -> Run | None:
    """The record of a sparse run; None, at no cost, while nobody records."""
    if not watch.active:
        return None
    return _run(
        what,
        watch,
        isa=get_backend(watch.choice.backend).isa(host(), watch.call),
        sparsity=plan.sparsity(pv_skips),
        kept=int(plan.counts.sum()),
        allowed=int(plan.allowed.sum()),
        pv_skips=0 if pv_skips is None else int(pv_skips.sum()),
        pv_groups=plan.pv_groups,
        kept_by_head=_by_head(plan.counts),
        allowed_by_head=_by_head(plan.allowed),
        pv_skips_by_head=() if pv_skips is None else _by_head(pv_skips),
        error_by_head=None if plan.error is None else tuple(plan.error.amax(0).tolist()),
    )


def _by_head(counts: Tensor) -> tuple[int, ...]:
    """`[B, Hq, n_q]` to one number for each query head."""
    return tuple(counts.sum((0, 2)).tolist())


def _run_dense(
    query: Tensor, key: Tensor, value: Tensor, tokens: TokenMask, call: Call, watch: Stopwatch
) -> Outcome:
    with watch.stage("attend"):
        out, lse = attend_dense(
            query, key, value, tokens, scale=call.scale, need_lse=call.return_lse
        )
    return Outcome(out, lse, run=_run_of_dense(watch, tokens))


def _run_of_dense(watch: Stopwatch, tokens: TokenMask) -> Run | None:
    if not watch.active:
        return None
    mask = tokens.attn_mask
    may = tokens.block_kinds(torch.device("cpu") if mask is None else mask.device)
    heads = watch.call.B * watch.call.Hq // (may.shape[0] * may.shape[1])
    allowed = int((may != EXCLUDED).sum()) * heads
    facts = {"sparsity": 0.0, "pv_skips": 0, "pv_groups": 0}
    isa = DENSE_BACKEND.isa(host(), watch.call)
    return _run("attention", watch, isa=isa, kept=allowed, allowed=allowed, **facts)


def _run(what: str, watch: Stopwatch, **facts: Any) -> Run:
    choice: Choice = watch.choice
    return Run(
        what=what,
        call=str(watch.call),
        label=watch.call.label,
        backend=choice.backend,
        reason=choice.reason,
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
    # Sequences may go to different backends; short ones to dense, say.
    names = list(dict.fromkeys(run.backend for run in runs))
    stages = dict.fromkeys(name for run in runs for name in run.seconds)
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
        error_by_head=None,
        seconds={name: sum(run.seconds.get(name, 0.0) for run in runs) for name in stages},
        parts=tuple(runs),
    )


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    tokens: TokenMask,
    block_mask: Tensor | None,
    call: Call,
    backend: Backend,
) -> BlockPlan:
    return make_plan(
        query,
        key,
        tokens,
        block_mask=block_mask,
        scale=call.scale,
        recipe=call.recipe,
        backend=backend,
        value=value,
    )


def _plan_and_quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: TokenMask,
    call: Call,
    backend: Backend,
    watch: Stopwatch,
) -> tuple[BlockPlan, Operands]:
    """Both from one pass over the tensors."""
    with watch.stage("quantize"):
        operands, statistics = backend.stage("quantize").prepare(
            query, key, value, scale=call.scale, recipe=call.recipe
        )
    with watch.stage("plan"):
        plan = backend.stage("plan").plan_from(
            operands, statistics, tokens, scale=call.scale, recipe=call.recipe, value=value
        )
    return plan, operands


def _quantize(query: Tensor, key: Tensor, value: Tensor, call: Call, backend: Backend) -> Operands:
    precision = call.recipe.precision
    return quantize(query, key, value, scale=call.scale, precision=precision, backend=backend)


def _attend(
    operands: Operands, plan: BlockPlan, tokens: TokenMask, call: Call, backend: Backend
) -> Attended:
    return attend(
        operands,
        plan,
        tokens,
        scale=call.scale,
        recipe=call.recipe,
        dtype=call.dtype,
        backend=backend,
    )


@contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    """Stages compute without autograd, and autocast must not touch the integers in their sums."""
    with torch.no_grad(), without_autocast(device):
        yield
