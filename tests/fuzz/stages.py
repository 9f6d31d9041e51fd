"""Quantization, statistics and plan against the reference, up to rounding and near-ties."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparge import BlockPlan, KeepAll, KeepError, KeepFraction
from sparge.backends.cpu import stages as cpu
from sparge.backends.reference import stages as reference
from sparge.backends.reference.similarity import untrusted
from sparge.rules.forced_blocks import forced_blocks
from sparge.values.call import BLOCK_K, BLOCK_Q, in_blocks
from sparge.values.recipe import heads_of
from sparge.values.stages import Pooled, QTensor, finite_rows, prepare
from sparge.values.tokenmask import EXCLUDED

from .case import EPS, PRECISE, Case, largest_of, need


def judge_statistics(case: Case) -> None:
    recipe = case.recipe
    made = prepare(cpu, case.call, case.inputs, to_plan=True, to_attend=True)
    queries, keys = made.queries, made.keys
    if recipe.quantized:
        for name, ours, theirs, x in (
            ("query", queries.rows, case.queries.rows, case.q),
            ("key", keys.key, case.keys.key, case.k),
            ("value", keys.value, case.keys.value, case.v),
        ):
            if isinstance(theirs, QTensor):
                judge_codes(ours, theirs, x, name)
        largest = largest_of(case.k)
        off = (queries.lse_shift - case.queries.lse_shift).abs().double()
        room = case.q.double().abs().nan_to_num(0, 0, 0).sum(-1) * case.heads(largest)[..., 0]
        fine = finite_rows(case.q) & case.heads(finite_rows(case.k).all(-1, True))
        fine &= room * max(1.0, abs(case.scale)) < 1e37
        # The mean sums numbers scaled by 2⁻⁷; the smallest lose their last bits.
        ours = case.q.double().abs().nan_to_num(0, 0, 0).sum(-1) * 2**-140
        terms = ((BLOCK_K + case.drawn.D) * EPS * room + ours) * abs(case.scale) + 1e-30
        wrong = fine & ~(off <= terms)
        need(not wrong.any(), "lse_shift differs", wrong)
    if queries.pooled is not None:
        judge_pooled(queries.pooled, case.queries.pooled, case.q, BLOCK_Q, "query")
        judge_pooled(keys.pooled, case.keys.pooled, case.k, BLOCK_K, "key")
    if recipe.pools:
        judge_entries(case, keys.entries, case.keys.entries)


def judge_entries(case: Case, ours: Pooled, theirs: Pooled) -> None:
    """Pooled keys and values: codes up to a step, or means up to rounding."""
    for name, x in (("key", case.k), ("value", case.v)):
        mine, wanted = getattr(ours, name), getattr(theirs, name)
        if isinstance(wanted, QTensor):
            judge_codes(mine, wanted, x, f"pooled {name}")
            continue
        need(mine.dtype == wanted.dtype, f"pooled {name}: another dtype")
        judge_pooled(mine, wanted, x, BLOCK_K, f"pooled {name}", torch.finfo(mine.dtype).eps)


def judge_codes(ours: QTensor, theirs: QTensor, x: Tensor, name: str) -> None:
    lost = ours.scale.isnan() != theirs.scale.isnan()
    if largest_of(x).max() < 1e38:  # above, the mean may overflow in one order and not in another
        need(not lost.any(), f"{name}: NaN scales differ", lost)
    steps = [x.row_scale().double() for x in (ours, theirs)]
    ours_step, step = steps if theirs.per_channel else [x[..., None] for x in steps]
    a, b = ours.codes * ours_step, theirs.codes * step
    # The mean of a head is summed row by row within a block.
    room = step * 1.01 + BLOCK_K * EPS * largest_of(x) + 2**-140
    wrong = ~((a - b).abs() <= room) & ~a.isnan() & ~b.isnan()
    need(not wrong.any(), f"{name}: codes differ by more than one step", wrong)


def judge_pooled(
    ours: Tensor, theirs: Tensor, x: Tensor, block: int, name: str, eps: float = 0.0
) -> None:
    largest = largest_of(x)
    if largest.max() > 1e37:
        return
    need(torch.equal(ours.isnan(), theirs.isnan()), f"{name}: pooled NaN differ")
    off = (ours.double() - theirs.double()).abs()
    room = (
        (2 * block * EPS + eps) * largest
        + 2**-140
        + 2 * torch.finfo(ours.dtype).smallest_normal * eps
    )
    wrong = ours.isfinite() & theirs.isfinite() & ~(off <= room)
    need(not wrong.any(), f"{name}: pooled tokens differ", wrong)


# ---- the plan


def judge_plan(case: Case) -> None:
    """The plan from the reference's statistics: the kept blocks are right up to ties."""
    if case.drawn.blocks is not None:
        return
    call, recipe, tokens = case.call, case.recipe, replace(case.tokens)
    mass = cpu.predict(call, case.prepared, tokens) if call.predicts else None
    plan = cpu.select(call, case.prepared, mass, tokens)
    plan.validate()
    need(torch.equal(plan.allowed, case.plan.allowed), "allowed blocks differ")
    kept, theirs = plan.to_mask(), case.plan.to_mask()
    differs = (kept != theirs).any(-1)
    if isinstance(recipe.keep, KeepError):
        judge_budget(case, plan)
    elif differs.any():
        need(not isinstance(recipe.keep, KeepAll), "KeepAll keeps something else", differs)
        judge_kept(case, kept, theirs, differs)


def judge_kept(case: Case, kept: Tensor, theirs: Tensor, differs: Tensor) -> None:
    """Rows that differ must be near-ties in the reference's prediction."""
    recipe, Hq = case.recipe, case.drawn.Hq
    may = (case.tokens.block_kinds(case.q.device) != EXCLUDED).expand(kept.shape)
    p = reference.predict(case.call, case.prepared, case.tokens)
    distrusted = torch.zeros_like(may)
    if recipe.min_similarity is not None:
        rows = untrusted(case.call, case.queries.similarity)[..., None]
        distrusted = rows | untrusted(case.call, case.keys.similarity)[..., None, :]
    drift = in_blocks(case.drift, -1, BLOCK_Q).amax(-1)
    overflows = in_blocks(~case.settled, -1, BLOCK_Q, fill=False).any(-1)
    p = p.double()
    known = p.isfinite().all(-1) & (p > 0).any(-1)
    wrong = differs & ~known & ~overflows
    need(not wrong.any(), "a row without a prediction does not keep everything", wrong)
    room = 2e-5 + 8 * drift
    precise = differs & known & (drift < PRECISE)
    free = may & ~distrusted & ~forced_blocks(case.tokens, recipe, case.q.device)
    smallest = torch.where(kept & free, p, math.inf).amin(-1)
    largest_left = torch.where(may & ~kept, p, -math.inf).amax(-1)
    wrong = precise & (smallest < largest_left - room)
    need(not wrong.any(), "a smaller block is kept than one that is left", wrong)
    if isinstance(recipe.keep, KeepFraction):
        return
    mass = torch.tensor(heads_of(recipe.keep.mass, Hq, none=1.0), dtype=torch.float64)[:, None]
    whole, has = torch.where(may, p, 0).sum(-1), torch.where(kept, p, 0).sum(-1)
    wrong = precise & (has < mass * whole - room)
    need(not wrong.any(), "the mass is not reached", wrong)
    theirs_has = torch.where(theirs, p, 0).sum(-1)
    wrong = precise & (
        has - smallest.nan_to_num(0, 0, 0) > torch.maximum(mass * whole, theirs_has) + room
    )
    need(not wrong.any(), "a smaller set would do", wrong)


def judge_budget(case: Case, plan: BlockPlan) -> None:
    """What a head skips is within its budget by the bound, and every step keeps what is forced.

    The sums behind it are compared row by row in tests/backends/cpu/test_native_budget.py.
    """
    kept, Hq = plan.to_mask(), case.drawn.Hq
    assert plan.error is not None
    assert plan.bound is not None
    error, bound = plan.error, plan.bound
    finite = error.isfinite() & bound.isfinite() & (error >= 0) & (bound >= 0)
    need(finite.all(), "the reported error is no number", ~finite)
    need((error <= bound + 1e-12).all(), "the error told is above its bound", error > bound + 1e-12)
    budget = torch.tensor(heads_of(case.recipe.keep.max_error, Hq, none=1.0), dtype=torch.float64)
    may = (case.tokens.block_kinds(case.q.device) != EXCLUDED).expand(kept.shape)
    skips = (may & ~kept).flatten(2).any(-1)
    over = skips & (bound > budget)
    need(not over.any(), "the bound of what is skipped is not within the budget", over)
    forced = forced_blocks(case.tokens, case.recipe, case.q.device) & may & ~kept
    need(not forced.any(), "a forced block is skipped", forced.flatten(2).any(-1))
