"""`KeepError` on the device: the rules of backends/budget.py around budget_kernel.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...rules import error_budget as budget
from ...support.device_constants import constant
from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import Call
from ...values.qtensor import QTensor
from ...values.recipe import KeepError, Recipe
from ...values.tokenmask import TokenMask
from . import budget_kernel
from .attend import pooled_arguments, value_arguments
from .launch import launch
from .masks import forced_arguments, is_causal, kind_arguments, mask_arguments
from .one_pass import Operands, Prepared
from .operands import key_arguments, query_arguments
from .prepare import OnDevice
from .shapes import LOG2E, within

STEPS_AT_ONCE = 32
_OPTIONS = {"num_warps": 4, "num_stages": 2}


def select_by_error(call: Call, prepared: Prepared, mass: Tensor, tokens: TokenMask) -> BlockPlan:
    """Measures every step, then writes the lists of the step that each head takes."""
    keep = call.recipe.keep
    assert isinstance(keep, KeepError)
    assert isinstance(prepared, OnDevice)
    assert prepared.deviation is not None
    assert prepared.energy is not None
    first, allowed = _first_steps(call, mass, tokens)
    surveyed = budget.choose_rows(
        prepared.deviation, prepared.energy, keep, call.recipe.sample_rows
    )
    dropped = _dropped_masses(call, prepared, first, tokens, surveyed.rows)
    survey = budget.summarize(surveyed, dropped)
    rows, weights, of_rows = budget.draw_measured(surveyed, survey)
    sums = _step_errors(call, prepared, first, tokens, rows)
    decision = budget.decide(
        survey,
        budget.Measured(*sums, weights, of_rows),
        keep,
        call.Hk,
        may_raise=call.recipe.quantized,
    )
    counts, indices = _take_steps(call, prepared, first, decision.step, tokens)
    return plan_from_lists(counts, indices, allowed, tokens, measured=decision.measured)


def _common(call: Call, tokens: TokenMask) -> dict[str, Any]:
    return {
        "Hq": call.Hq,
        "Lq": call.Lq,
        "Lk": call.Lk,
        "n_q": call.n_q,
        "n_k": call.n_k,
        "offset": within(tokens.offset, call.Lq, call.Lk),
        "CAUSAL": is_causal(tokens),
    }


def _first_steps(call: Call, mass: Tensor, tokens: TokenMask) -> tuple[Tensor, Tensor]:
    first = torch.empty(mass.shape, dtype=torch.int32, device=mass.device)
    allowed = torch.empty(mass.shape[:3], dtype=torch.int32, device=mass.device)
    launch(
        budget_kernel.first_steps,
        (call.n_q, call.Hq, call.B),
        {"num_warps": 8},
        mass=mass,
        masses=constant(budget.step_masses(), torch.float64, mass.device),
        first=first,
        allowed=allowed,
        **kind_arguments(tokens),
        **forced_arguments(call, tokens, mass.device),
        MASK=mask_arguments(tokens)["MASK"],
        STEPS=budget.N_STEPS,
        **_common(call, tokens),
    )
    return first, allowed


def _dropped_masses(
    call: Call, prepared: Prepared, first: Tensor, tokens: TokenMask, rows: Tensor
) -> Tensor:
    n = rows.shape[2]
    dropped = torch.empty((*rows.shape, budget.N_STEPS), dtype=torch.float32, device=rows.device)
    launch(
        budget_kernel.survey_rows,
        (-(-n // 16), call.Hq, call.B),
        # Three TF32 products need more registers, and are not chained on sm_100.
        {"num_warps": 8, "num_stages": 1} if call.recipe.precision == "exact" else _OPTIONS,
        **query_arguments(call, prepared),
        **key_arguments(call, prepared),
        **mask_arguments(tokens),
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
    call: Call, prepared: OnDevice, first: Tensor, tokens: TokenMask, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`(skipping, total, whole)` as `Measured` holds them."""
    outs = _outputs(call, prepared, first, tokens, rows).double()
    exact = outs[..., -1:, :]
    if call.rounds:
        exact = _exact_outputs(call, prepared, tokens, rows).double()
    skipping = (outs[..., :-1, :] - outs[..., -1:, :]).abs().sum(-1)
    return skipping, (outs - exact).abs().sum(-1), exact[..., 0, :].abs().sum(-1)


def _exact_outputs(call: Call, prepared: OnDevice, tokens: TokenMask, rows: Tensor) -> Tensor:
    recipe = replace(call.recipe, precision="exact", skipped="drop", pool_group=Recipe.pool_group)
    own = replace(call, recipe=recipe)
    assert prepared.query is not None
    assert prepared.key is not None
    assert prepared.value is not None
    plain = Prepared(Operands(prepared.query, prepared.key, prepared.value))
    return _outputs(own, plain, None, tokens, rows)


def _outputs(
    call: Call, prepared: Prepared, first: Tensor | None, tokens: TokenMask, rows: Tensor
) -> Tensor:
    """Outputs of rows over the blocks of measured steps, then over all, `[B, Hq, m, S + 1, Dv]`."""
    n_steps = 0 if first is None else len(budget.MEASURED_STEPS)
    shape = (*rows.shape, n_steps + 1, call.Dv)
    outs = torch.empty(shape, dtype=torch.float32, device=rows.device)
    steps = constant(budget.MEASURED_STEPS, torch.int32, rows.device)
    coded = isinstance(prepared.operands.query, QTensor)
    # Which entries of a block count is found in the kernel.
    pooled = pooled_arguments(call, prepared, outs if first is not None else None)
    del pooled["pools"]
    launch(
        budget_kernel.measure_rows,
        (rows.shape[2], call.Hq, call.B),
        _OPTIONS,
        **query_arguments(call, prepared),
        **key_arguments(call, prepared),
        **value_arguments(call, prepared),
        **pooled,
        **mask_arguments(tokens),
        **kind_arguments(tokens),
        first=first,
        steps=steps,
        rows=rows.contiguous(),
        outs=outs,
        group=call.Hq // call.Hk,
        n_rows=rows.shape[2],
        scale_log2=call.scale * LOG2E,
        STEPS=n_steps,
        BLOCK_S=STEPS_AT_ONCE if n_steps else 1,
        **_common(call, tokens),
    )
    assert coded == call.recipe.quantized
    return outs


def _take_steps(
    call: Call, prepared: OnDevice, first: Tensor, step: Tensor, tokens: TokenMask
) -> tuple[Tensor, Tensor]:
    counts = torch.empty(first.shape[:3], dtype=torch.int32, device=first.device)
    indices, pools = torch.empty_like(first), None
    if call.recipe.pools:
        pools = torch.empty(first.shape, dtype=torch.uint8, device=first.device)
        prepared.notes["pools"] = (indices, pools)
    launch(
        budget_kernel.take_steps,
        (call.n_q, call.Hq, call.B),
        {"num_warps": 4},
        first=first,
        step=step.contiguous(),
        counts=counts,
        indices=indices,
        pools=pools,
        **kind_arguments(tokens),
        MASK=mask_arguments(tokens)["MASK"],
        POOL=pools is not None,
        **_common(call, tokens),
    )
    return counts, indices
