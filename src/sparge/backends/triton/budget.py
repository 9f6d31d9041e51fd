"""What `KeepError` measures (rules/error_budget.py), on the device.

    first_steps    the first step that keeps each block: how many steps are reached by the mass of
                   the blocks ahead of it, larger ones and equal ones of smaller index
    survey_rows    the mass that each step drops from surveyed rows
    measure_rows   outputs of measured rows over the blocks of each measured step, and over all
    take_steps     the lists of the step that each head takes

A row is measured by a program of its own: with one product per key block and an addition to the
steps that keep it, the products with V are made once for all steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...rules import error_budget as budget
from ...support.device_constants import constant
from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.recipe import KeepError, Recipe
from ...values.stages import Prepared, PreparedQueries, QTensor
from ...values.tokenmask import TokenMask
from .arguments import LOG2E, types_of, within
from .blocks import (
    AT_ONCE,
    Forced,
    allowed_of,
    append_kept,
    end_list,
    forced_blocks,
    is_causal,
    is_forced,
    is_open,
    kinds_of_row,
    kinds_under,
    mask_kind,
    mask_of,
    plan_of,
)
from .launch import launch
from .operands import (
    KeysOnDevice,
    QueriesOnDevice,
    empty_lists,
    key_rows,
    keys_of,
    pooled_entries,
    query_rows,
    value_rows,
)
from .primitives import (
    BLOCK_K,
    BLOCK_Q,
    Rows,
    Sequence,
    View,
    add_scores,
    as_held,
    causal_stop,
    wide,
)
from .tiles import keys_of_head, load_rows, score_row, score_rows

ROWS = tl.constexpr(16)
N = tl.constexpr(64)

STEPS_AT_ONCE = 32
_OPTIONS = {"num_warps": 4, "num_stages": 2}


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset", "sink", "reach", "n_ranges"])
def first_steps(
    mass, masses, ranges, first, allowed, kinds,
    Hq, Lq, Lk, n_q, n_k, offset, sink, reach, n_ranges,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One query block: 0 for forced blocks and where nothing is known, -1 for excluded blocks."""
    own = Sequence(0, Lq, 0, Lk, 0, 0, offset, 0)
    force = Forced(sink, reach, n_ranges)
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (b * Hq + h) * n_q + i
    mass_row = mass + row * n_k
    kinds_row = kinds_of_row(kinds, h, b, i, n_k)
    stop = n_k
    if CAUSAL:
        stop = causal_stop(tl.minimum((i + 1) * BLOCK_Q, Lq) - 1, offset, n_k)
    n = tl.arange(0, N)
    whole = tl.zeros([], tl.float64)
    n_odd, n_may = 0, 0
    for start in tl.range(0, stop, N):
        may = allowed_of(start + n, stop, kinds_row)
        m = tl.load(mass_row + start + n, mask=may, other=0.0)
        whole += tl.sum(m.to(tl.float64), 0)
        n_odd += tl.sum(((m >= 0.0) & (m < float("inf"))).to(tl.int32) ^ 1, 0)
        n_may += tl.sum(may.to(tl.int32), 0)
    known = ((n_odd == 0) & (whole > 0.0)).to(tl.int32)
    step = tl.arange(0, N)
    reach_of = tl.load(masses + step, mask=step < STEPS, other=2.0) * whole
    for start in tl.range(0, n_k, N):
        j = start + n
        may = allowed_of(j, stop, kinds_row)
        m = tl.load(mass_row + j, mask=may, other=0.0)
        ahead = tl.zeros([N], tl.float64)
        for other in tl.range(0, stop, N):
            k = other + n
            theirs = tl.load(mass_row + k, mask=allowed_of(k, stop, kinds_row), other=0.0)
            larger = theirs[None, :] > m[:, None]  # [64, 64]
            tied = (theirs[None, :] == m[:, None]) & (k[None, :] < j[:, None])
            ahead += tl.sum(tl.where(larger | tied, theirs[None, :].to(tl.float64), 0.0), 1)
        found = tl.sum((ahead[:, None] >= reach_of[None, :]).to(tl.int32), 1)
        forced = is_forced(i, j, own, ranges, force, CAUSAL=CAUSAL, NEAR=NEAR)
        found = tl.where(forced, 0, found) * known
        found = tl.where(may, found, -1)
        tl.store(first + row * n_k + j, found, mask=j < n_k)
    tl.store(allowed + row, n_may)


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset", "n_rows"])
def survey_rows(
    q, k, mask, first, rows, dropped,
    Hq, group, Lq, Lk, n_q, n_k, offset, n_rows, scale_log2,
    TYPES: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """16 rows of one head: the share of their mass that each step drops; 0 for rows of -1."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    h_k = wide(h // group)
    head, key_head = b * Hq + h, b * (Hq // group) + h_k
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + head * n_rows + place, mask=place < n_rows, other=-1).to(tl.int32)
    used = row >= 0
    row = tl.maximum(row, 0)
    queries = load_rows(q, head * Lq, h, b, 0, row, used, scale_log2, TYPES)
    last_key = row + offset
    own = Sequence(0, Lq, 0, Lk, 0, 0, offset, 0)
    keys = keys_of_head(k, mask, own, h, h_k, b, key_head * n_k)
    stop = n_k
    if CAUSAL:
        stop = causal_stop(tl.max(last_key, 0), 0, n_k)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for j in tl.range(0, stop):
        s = score_rows(queries, last_key, keys, j, TYPES, CAUSAL=CAUSAL, MASK=MASK)
        best, total = add_scores(s, best, total)
    shift = tl.where(best == float("-inf"), 0.0, best)
    step = tl.arange(0, N)
    missing = tl.zeros([ROWS, N], tl.float32)  # of each row and step
    first_row = first + (head * n_q + row // BLOCK_Q) * n_k
    for j in tl.range(0, stop):
        s = score_rows(queries, last_key, keys, j, TYPES, CAUSAL=CAUSAL, MASK=MASK)
        mine = tl.sum(tl.math.exp2(s - shift[:, None]), 1)
        kept_from = tl.load(first_row + j, mask=used, other=-1)
        missing += tl.where(kept_from[:, None] > step[None, :], mine[:, None], 0.0)
    missing = missing / tl.where(total == 0.0, 1.0, total)[:, None]
    at = dropped + (head * n_rows + place)[:, None] * STEPS + step[None, :]
    tl.store(at, missing, mask=(place < n_rows)[:, None] & (step < STEPS)[None, :])


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset", "n_rows"])
def measure_rows(
    q, k, v, q_scale, k_scale, v_scale, mask, kinds, first, steps, rows, outs, pooled,
    q_strides, k_strides, v_strides, mask_strides, kind_strides,
    Hq, group, Lq, Lk, n_q, n_k, offset, n_rows, scale_log2,
    TYPES: tl.constexpr, VALUES: tl.constexpr, STEPS: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, POOL_GROUP: tl.constexpr,
):  # fmt: skip
    """One row: outputs over the blocks of each of STEPS steps, then over all, `[STEPS + 1, DV]`, P
    and V rounded as `attend` rounds them. Pointers come before strides: see primitives.py."""
    CODED: tl.constexpr = q_scale is not None
    BLOCK_D: tl.constexpr = TYPES.BLOCK_D
    DV: tl.constexpr = VALUES.DV
    BLOCK_DV: tl.constexpr = VALUES.BLOCK_DV
    at_row, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h_k = wide(h // group)
    head, key_head = b * Hq + h, b * (Hq // group) + h_k
    row = tl.maximum(tl.load(rows + head * n_rows + at_row).to(tl.int32), 0)
    n, d, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_at = q + b * q_strides.b + wide(h) * q_strides.h + wide(row) * q_strides.n + d
    if CODED:
        own_q = tl.load(q_at).to(tl.int32)  # [BLOCK_D]
        factor = scale_log2 * tl.load(q_scale + head * Lq + row)
    else:
        own_q = as_held(tl.load(q_at, mask=d < TYPES.D, other=0.0), TYPES).to(tl.float32)
        factor = scale_log2 + tl.sum(own_q * 0.0, 0)
    own = Sequence(0, Lq, 0, Lk, 0, 0, offset, 0)
    k, mask = Rows(k, k_scale, k_strides), View(mask, mask_strides)
    keys = keys_of_head(k, mask, own, h, h_k, b, key_head * n_k)
    v_base = v + b * v_strides.b + h_k * v_strides.h
    i = row // BLOCK_Q
    kinds_row = kinds_of_row(View(kinds, kind_strides), h, b, i, n_k)
    last_key = row + offset
    stop = n_k
    if CAUSAL:
        stop = causal_stop(last_key, 0, n_k)
    best = tl.full([], float("-inf"), tl.float32)
    for j in tl.range(0, stop):
        s = score_row(own_q, factor, row, last_key, keys, j, TYPES, CAUSAL=CAUSAL, MASK=MASK)
        best = tl.maximum(best, tl.max(s, 0))
    shift = tl.where(best == float("-inf"), 0.0, best)
    slot = tl.arange(0, BLOCK_S)
    # A step behind the last keeps everything that may be attended.
    step = tl.load(steps + slot, mask=slot < STEPS, other=1 << 20)
    acc = tl.zeros([BLOCK_S, BLOCK_DV], tl.float32)
    sums = tl.zeros([BLOCK_S], tl.float32)
    first_row = first
    if STEPS > 0:
        first_row = first + (head * n_q + i) * n_k
    for j in tl.range(0, stop):
        s = score_row(own_q, factor, row, last_key, keys, j, TYPES, CAUSAL=CAUSAL, MASK=MASK)
        left = Lk - j * BLOCK_K
        p = tl.math.exp2(s - shift)
        mine = tl.sum(p, 0)
        # own_v, values [64, BLOCK_DV]
        there = (n < left)[:, None] & (dv < DV)[None, :]
        if v_scale is not None:
            at = v_base + j * BLOCK_K + n[:, None] + dv[None, :] * v_strides.d
            own_v = tl.load(at)
            top = tl.max(p, 0)
            unit = tl.where(top > 0.0, top, 1.0) * (1.0 / VALUES.P_MAX)
            p = (p / unit).to(own_v.dtype).to(tl.float32) * unit
            values = own_v.to(tl.float32) * tl.load(v_scale + key_head * n_k + j)
        else:
            at = v_base + wide(j) * wide(BLOCK_K * v_strides.n)
            at = at + n[:, None] * v_strides.n + dv[None, :]
            values = as_held(tl.load(at, mask=there, other=0.0), TYPES).to(tl.float32)
            if TYPES.EXACT == "":
                p = p.to(TYPES.HELD).to(tl.float32)
        part = tl.sum(p[:, None] * values, 0)
        takes = step >= 0
        if STEPS > 0:
            kept_from = tl.load(first_row + j)
            takes = (step >= kept_from) & (kept_from >= 0) | (step == 1 << 20)
        if POOL_GROUP:
            ENTRIES: tl.constexpr = BLOCK_K // POOL_GROUP
            entry = j * ENTRIES + tl.arange(0, ENTRIES)
            valid = entry * POOL_GROUP < Lk
            at_entry = key_head * (n_k * ENTRIES) + entry
            mean = tl.load(pooled.k + at_entry[:, None] * BLOCK_D + d[None, :])
            if CODED:
                x = tl.sum(mean.to(tl.int32) * own_q[None, :], 1).to(tl.float32)
                x = x * factor * tl.load(pooled.scale + at_entry)
            else:
                x = (
                    tl.sum(mean.to(tl.float32) * own_q[None, :], 1)
                    * factor
                    * tl.load(keys.k.scale + j)
                )
            size = tl.where(valid, tl.minimum(POOL_GROUP, Lk - entry * POOL_GROUP), 1)
            x = x + tl.math.log2(size.to(tl.float32)) - shift
            opens = is_open(i, j + entry * 0, own, kinds_row, valid, CAUSAL=CAUSAL)
            share = tl.where(opens, tl.math.exp2(x), 0.0)
            means = tl.load(pooled.v + at_entry[:, None] * BLOCK_DV + dv[None, :]).to(tl.float32)
            pooled_part = tl.sum(share[:, None] * means, 0)
            acc += tl.where(takes[:, None], part[None, :], pooled_part[None, :])
            sums += tl.where(takes, mine, tl.sum(share, 0))
        else:
            acc += tl.where(takes[:, None], part[None, :], 0.0)
            sums += tl.where(takes, mine, 0.0)
    out = acc / tl.where(sums == 0.0, 1.0, sums)[:, None]
    at = outs + ((head * n_rows + at_row) * (STEPS + 1) + slot[:, None]) * DV + dv[None, :]
    tl.store(at, out, mask=(slot <= STEPS)[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "offset"])
def take_steps(
    first, step, made, kinds,
    Hq, Lq, Lk, n_q, n_k, offset, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The lists of one query block, into `made`, at the step that its head takes."""
    seq = Sequence(0, Lq, 0, Lk, 0, 0, offset, 0)
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * Hq + h
    row = head * n_q + i
    kinds_row = kinds_of_row(kinds, h, b, i, n_k)
    taken = tl.load(step + head).to(tl.int32)
    n = tl.arange(0, AT_ONCE)
    n_kept = 0
    for start in tl.range(0, n_k, AT_ONCE):
        j = start + n
        own = tl.load(first + row * n_k + j, mask=j < n_k, other=-1)
        may = own >= 0
        kept = may & (own <= taken)
        opens = is_open(i, j, seq, kinds_row, may, CAUSAL=CAUSAL)
        n_kept = append_kept(made, row, j, kept, opens, n_kept, n_k, n_k)
    end_list(made, row, n_kept, n_k)


def select_by_error(call: Call, prepared: Prepared, mass: Tensor, tokens: TokenMask) -> BlockPlan:
    """Measures every step, then writes the lists of the step that each head takes."""
    keep, queries = call.recipe.keep, prepared.queries
    assert isinstance(keep, KeepError)
    assert isinstance(queries, QueriesOnDevice)
    assert queries.deviation is not None
    assert queries.energy is not None
    lists = empty_lists(call, prepared)
    first = _first_steps(call, mass, tokens, lists.allowed)
    surveyed = budget.choose_rows(queries.deviation, queries.energy, keep, call.recipe.sample_rows)
    dropped = _dropped_masses(call, prepared, first, tokens, surveyed.rows)
    survey = budget.summarize(surveyed, dropped)
    rows, weights, of_rows = budget.draw_measured(surveyed, survey)
    measured = budget.Measured(*_step_errors(call, prepared, first, tokens, rows), weights, of_rows)
    decision = budget.decide(survey, measured, keep, call.Hk, may_raise=call.recipe.quantized)
    launch(
        take_steps,
        (call.n_q, call.Hq, call.B),
        {"num_warps": 4},
        first=first,
        step=decision.step.contiguous(),
        made=lists._replace(allowed=None),
        kinds=kinds_under(tokens),
        **_lengths(call, tokens),
    )
    return plan_of(lists, tokens, measured=decision.measured)


def _lengths(call: Call, tokens: TokenMask) -> dict[str, Any]:
    return {
        "Hq": call.Hq,
        "Lq": call.Lq,
        "Lk": call.Lk,
        "n_q": call.n_q,
        "n_k": call.n_k,
        "offset": within(tokens.offset, call.Lq, call.Lk),
        "CAUSAL": is_causal(tokens),
    }


def _scored(call: Call, prepared: Prepared, tokens: TokenMask, rows: Tensor) -> dict[str, Any]:
    """Arguments of kernels that score rows `[B, Hq, n]`."""
    return {
        "q": query_rows(call, prepared.queries),
        "k": key_rows(call, keys_of(prepared)),
        "mask": mask_of(tokens),
        "rows": rows.contiguous(),
        "n_rows": rows.shape[2],
        "group": call.Hq // call.Hk,
        "scale_log2": call.scale * LOG2E,
        "MASK": mask_kind(tokens),
        "TYPES": types_of(call),
        **_lengths(call, tokens),
    }


def _apart(tuples: dict[str, Any]) -> dict[str, Any]:
    """Pointers and strides of `Rows` and `View`s as arguments of their own."""
    found: dict[str, Any] = {}
    for name, x in tuples.items():
        found |= {name: x.data, f"{name.removesuffix('s')}_strides": x.strides}
        if isinstance(x, Rows):
            found[f"{name}_scale"] = x.scale
    return found


def _first_steps(call: Call, mass: Tensor, tokens: TokenMask, allowed: Tensor) -> Tensor:
    """The first step that keeps each block; writes how many are allowed in each row."""
    first = torch.empty(mass.shape, dtype=torch.int32, device=mass.device)
    launch(
        first_steps,
        (call.n_q, call.Hq, call.B),
        {"num_warps": 8},
        mass=mass,
        masses=constant(budget.step_masses(), torch.float64, mass.device),
        first=first,
        allowed=allowed,
        kinds=kinds_under(tokens),
        STEPS=budget.N_STEPS,
        **forced_blocks(call, tokens, mass.device),
        **_lengths(call, tokens),
    )
    return first


def _dropped_masses(
    call: Call, prepared: Prepared, first: Tensor, tokens: TokenMask, rows: Tensor
) -> Tensor:
    dropped = torch.empty((*rows.shape, budget.N_STEPS), dtype=torch.float32, device=rows.device)
    launch(
        survey_rows,
        (-(-rows.shape[2] // 16), call.Hq, call.B),
        # Three TF32 products need more registers, and are not chained on sm_100.
        {"num_warps": 8, "num_stages": 1} if call.recipe.precision == "exact" else _OPTIONS,
        first=first,
        dropped=dropped,
        STEPS=budget.N_STEPS,
        **_scored(call, prepared, tokens, rows),
    )
    return dropped


def _step_errors(
    call: Call, prepared: Prepared, first: Tensor, tokens: TokenMask, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`(skipping, total, whole)` as `Measured` holds them."""
    outs = _outputs(call, prepared, first, tokens, rows).double()
    exact = outs[..., -1:, :]
    if call.rounds:
        recipe = replace(
            call.recipe, precision="exact", skipped="drop", pool_group=Recipe.pool_group
        )
        own = replace(call, recipe=recipe)
        exact = _outputs(own, _own_tensors(prepared), None, tokens, rows).double()
    skipping = (outs[..., :-1, :] - outs[..., -1:, :]).abs().sum(-1)
    return skipping, (outs - exact).abs().sum(-1), exact[..., 0, :].abs().sum(-1)


def _own_tensors(prepared: Prepared) -> Prepared:
    """The caller's own, as they are."""
    query, keys = prepared.queries.own, keys_of(prepared)
    assert query is not None
    assert keys.own_key is not None
    assert keys.own_value is not None
    facts = keys.facts if keys.raised is None else keys.raised.facts
    return Prepared(PreparedQueries(query), KeysOnDevice(keys.own_key, keys.own_value, facts=facts))


def _outputs(
    call: Call, prepared: Prepared, first: Tensor | None, tokens: TokenMask, rows: Tensor
) -> Tensor:
    """Outputs of rows over the blocks of measured steps, then over all, `[B, Hq, m, S + 1, Dv]`;
    over all alone without `first`."""
    assert isinstance(prepared.queries.rows, QTensor) == call.recipe.quantized
    keys, n_steps = keys_of(prepared), 0 if first is None else len(budget.MEASURED_STEPS)
    shape = (*rows.shape, n_steps + 1, call.Dv)
    outs = torch.empty(shape, dtype=torch.float32, device=rows.device)
    values, value_types = value_rows(call, keys)
    scored = _scored(call, prepared, tokens, rows)
    tuples = {"v": values, "kinds": kinds_under(tokens)}
    tuples |= {name: scored.pop(name) for name in ("q", "k", "mask")}
    launch(
        measure_rows,
        (rows.shape[2], call.Hq, call.B),
        _OPTIONS,
        pooled=pooled_entries(call, keys),  # the kernel finds out which blocks are pooled
        first=first,
        steps=constant(budget.MEASURED_STEPS, torch.int32, rows.device),
        outs=outs,
        VALUES=value_types,
        STEPS=n_steps,
        BLOCK_S=STEPS_AT_ONCE if n_steps else 1,
        POOL_GROUP=0 if keys.entries is None else keys.entries.group,
        **_apart(tuples),
        **scored,
    )
    return outs
