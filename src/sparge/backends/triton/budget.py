"""`KeepError` on the device: the rules of rules/error_budget.py around budget_kernel.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...rules import error_budget as budget
from ...support.device_constants import constant
from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.recipe import KeepError, Recipe
from ...values.stages import Prepared, PreparedKeys, PreparedQueries, QTensor
from ...values.tokenmask import TokenMask
from . import budget_kernel
from .arguments import (
    LOG2E,
    forced_blocks,
    is_causal,
    kinds_under,
    mask_kind,
    mask_of,
    plan_of,
    types_of,
    within,
)
from .launch import launch
from .operands import QueriesOnDevice, empty_lists, key_rows, pooled_entries, query_rows, value_rows
from .primitives import BatchSizes, PooledEntries
from .select_kernel import SelectedLists

STEPS_AT_ONCE = 32
_OPTIONS = {"num_warps": 4, "num_stages": 2}


def select_by_error(call: Call, prepared: Prepared, mass: Tensor, tokens: TokenMask) -> BlockPlan:
    """Measures every step, then writes the lists of the step that each head takes."""
    keep = call.recipe.keep
    assert isinstance(keep, KeepError)
    queries, keys = prepared.queries, prepared.keys
    assert isinstance(queries, QueriesOnDevice)
    assert queries.deviation is not None
    assert queries.energy is not None
    lists = empty_lists(call, prepared)
    first = _first_steps(call, mass, tokens, lists.allowed)
    surveyed = budget.choose_rows(queries.deviation, queries.energy, keep, call.recipe.sample_rows)
    dropped = _dropped_masses(call, queries, keys, first, tokens, surveyed.rows)
    survey = budget.summarize(surveyed, dropped)
    rows, weights, of_rows = budget.draw_measured(surveyed, survey)
    sums = _step_errors(call, queries, keys, first, tokens, rows)
    decision = budget.decide(
        survey,
        budget.Measured(*sums, weights, of_rows),
        keep,
        call.Hk,
        may_raise=call.recipe.quantized,
    )
    _take_steps(call, lists, first, decision.step, tokens)
    return plan_of(lists, tokens, measured=decision.measured)


def _common(call: Call, tokens: TokenMask) -> dict[str, Any]:
    offset = within(tokens.offset, call.Lq, call.Lk)
    sizes = BatchSizes(call.Lq, call.Lk, call.n_q, call.n_k, offset)
    return {**sizes._asdict(), "Hq": call.Hq, "CAUSAL": is_causal(tokens)}


def _kind_arguments(tokens: TokenMask) -> dict[str, Any]:
    kinds = kinds_under(tokens)
    return {"kinds": kinds.data, "kind_strides": kinds.strides}


def _scoring_arguments(
    call: Call, queries: PreparedQueries, keys: PreparedKeys, tokens: TokenMask
) -> dict[str, Any]:
    q, k, mask = query_rows(call, queries), key_rows(call, keys), mask_of(tokens)
    return {
        "q": q.data,
        "q_scale": q.scale,
        "q_strides": q.strides,
        "k": k.data,
        "k_scale": k.scale,
        "k_strides": k.strides,
        "mask": mask.data,
        "mask_strides": mask.strides,
        "MASK": mask_kind(tokens),
        "TYPES": types_of(call),
    }


def _first_steps(call: Call, mass: Tensor, tokens: TokenMask, allowed: Tensor) -> Tensor:
    """The first step that keeps each block; writes how many are allowed in each row."""
    first = torch.empty(mass.shape, dtype=torch.int32, device=mass.device)
    launch(
        budget_kernel.first_steps,
        (call.n_q, call.Hq, call.B),
        {"num_warps": 8},
        mass=mass,
        masses=constant(budget.step_masses(), torch.float64, mass.device),
        first=first,
        allowed=allowed,
        STEPS=budget.N_STEPS,
        **forced_blocks(call, tokens, mass.device),
        **_kind_arguments(tokens),
        **_common(call, tokens),
    )
    return first


def _dropped_masses(
    call: Call,
    queries: PreparedQueries,
    keys: PreparedKeys,
    first: Tensor,
    tokens: TokenMask,
    rows: Tensor,
) -> Tensor:
    n = rows.shape[2]
    dropped = torch.empty((*rows.shape, budget.N_STEPS), dtype=torch.float32, device=rows.device)
    launch(
        budget_kernel.survey_rows,
        (-(-n // 16), call.Hq, call.B),
        # Three TF32 products need more registers, and are not chained on sm_100.
        {"num_warps": 8, "num_stages": 1} if call.recipe.precision == "exact" else _OPTIONS,
        **_scoring_arguments(call, queries, keys, tokens),
        first=first,
        rows=rows.contiguous(),
        dropped=dropped,
        group=call.Hq // call.Hk,
        n_rows=n,
        scale_log2=call.scale * LOG2E,
        STEPS=budget.N_STEPS,
        **_common(call, tokens),
    )
    return dropped


def _step_errors(
    call: Call,
    queries: PreparedQueries,
    keys: PreparedKeys,
    first: Tensor,
    tokens: TokenMask,
    rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(skipping, total, whole)` as `Measured` holds them."""
    outs = _outputs(call, queries, keys, first, tokens, rows).double()
    exact = outs[..., -1:, :]
    if call.rounds:
        exact = _exact_outputs(call, queries, keys, tokens, rows).double()
    skipping = (outs[..., :-1, :] - outs[..., -1:, :]).abs().sum(-1)
    return skipping, (outs - exact).abs().sum(-1), exact[..., 0, :].abs().sum(-1)


def _exact_outputs(
    call: Call, queries: PreparedQueries, keys: PreparedKeys, tokens: TokenMask, rows: Tensor
) -> Tensor:
    """Of the caller's own tensors."""
    recipe = replace(call.recipe, precision="exact", skipped="drop", pool_group=Recipe.pool_group)
    own = replace(call, recipe=recipe)
    assert queries.own is not None
    assert keys.own_key is not None
    assert keys.own_value is not None
    plain = PreparedKeys(keys.own_key, keys.own_value)
    return _outputs(own, PreparedQueries(queries.own), plain, None, tokens, rows)


def _outputs(
    call: Call,
    queries: PreparedQueries,
    keys: PreparedKeys,
    first: Tensor | None,
    tokens: TokenMask,
    rows: Tensor,
) -> Tensor:
    """Outputs of rows over the blocks of measured steps, then over all, `[B, Hq, m, S + 1, Dv]`."""
    assert isinstance(queries.rows, QTensor) == call.recipe.quantized
    n_steps = 0 if first is None else len(budget.MEASURED_STEPS)
    shape = (*rows.shape, n_steps + 1, call.Dv)
    outs = torch.empty(shape, dtype=torch.float32, device=rows.device)
    # Which blocks are pooled is found in the kernel.
    pooled = PooledEntries() if first is None else pooled_entries(call, keys)
    values, value_types = value_rows(call, keys)
    launch(
        budget_kernel.measure_rows,
        (rows.shape[2], call.Hq, call.B),
        _OPTIONS,
        **_scoring_arguments(call, queries, keys, tokens),
        **_kind_arguments(tokens),
        v=values.data,
        v_scale=values.scale,
        v_strides=values.strides,
        pooled=pooled,
        first=first,
        steps=constant(budget.MEASURED_STEPS, torch.int32, rows.device),
        rows=rows.contiguous(),
        outs=outs,
        group=call.Hq // call.Hk,
        n_rows=rows.shape[2],
        scale_log2=call.scale * LOG2E,
        VALUES=value_types,
        STEPS=n_steps,
        BLOCK_S=STEPS_AT_ONCE if n_steps else 1,
        POOL_GROUP=0 if pooled.k is None or keys.entries is None else keys.entries.group,
        **_common(call, tokens),
    )
    return outs


def _take_steps(
    call: Call, lists: SelectedLists, first: Tensor, step: Tensor, tokens: TokenMask
) -> None:
    launch(
        budget_kernel.take_steps,
        (call.n_q, call.Hq, call.B),
        {"num_warps": 4},
        first=first,
        step=step.contiguous(),
        **_kind_arguments(tokens),
        counts=lists.counts,
        indices=lists.indices,
        pools=lists.pools,
        **_common(call, tokens),
    )
