"""Keep the blocks that matter.

    kept = the fewest blocks, largest first, whose mass reaches τ; or a fraction of them; or the τ
           of a head is found by measuring what skipping does (rules/error_budget.py)
         | all of a row or column whose pooled token is not trusted | forced blocks

A row whose prediction is not finite keeps every block it may attend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...rules.error_budget import (
    Decision,
    Measured,
    choose_rows,
    decide,
    draw_measured,
    step_masses,
    summarize,
)
from ...rules.forced_blocks import forced_blocks
from ...support.ordered_sums import prefix_sum
from ...values.blockplan import BlockPlan, plan_from_mask
from ...values.call import Call
from ...values.recipe import KeepAll, KeepError, KeepFraction, KeepMass, heads_of
from ...values.stages import Prepared
from ...values.tokenmask import EXCLUDED, TokenMask
from .budget_rows import deviations, dropped_masses, step_errors
from .similarity import untrusted


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    keep, device = call.recipe.keep, prepared.queries.rows.device
    may = tokens.block_kinds(device) != EXCLUDED
    may = may.expand(call.B, call.Hq, call.n_q, call.n_k)
    if isinstance(keep, KeepAll):
        return plan_from_mask(may, tokens)
    assert mass is not None
    unknown = ~torch.isfinite(mass).all(-1, keepdim=True) | ~(mass > 0).any(-1, True)
    mass = mass.nan_to_num(0.0, 0.0, 0.0)
    forced = unknown | forced_blocks(tokens, call.recipe, device)
    if call.recipe.min_similarity is not None:
        forced = forced | untrusted(call, prepared.queries.similarity)[..., None]
        forced = forced | untrusted(call, prepared.keys.similarity)[..., None, :]
    if not isinstance(keep, KeepError):
        return plan_from_mask(select_blocks(mass, may, keep) | forced, tokens)
    first = first_steps(mass, may).masked_fill(forced, 0).masked_fill(~may, -1)
    decision = _decide(call, keep, prepared, first, tokens)
    kept = first <= decision.step[..., None, None]
    return plan_from_mask(kept, tokens, measured=decision.measured)


def first_steps(mass: Tensor, may: Tensor) -> Tensor:
    """The first step that keeps each block, int64; each step keeps what those before it do."""
    masses = torch.tensor(step_masses(), dtype=torch.float64, device=mass.device)
    return (~keep_masses(mass, may, masses.expand(*mass.shape[:3], -1))).sum(-2)


def _decide(
    call: Call, keep: KeepError, prepared: Prepared, first: Tensor, tokens: TokenMask
) -> Decision:
    assert prepared.queries.own is not None
    surveyed = choose_rows(*deviations(prepared.queries.own), keep, call.recipe.sample_rows)
    dropped = dropped_masses(call, prepared, first, tokens, surveyed.rows)
    survey = summarize(surveyed, dropped)
    rows, weights, of_rows = draw_measured(surveyed, survey)
    measured = Measured(*step_errors(call, prepared, first, tokens, rows), weights, of_rows)
    return decide(survey, measured, keep, call.Hk, may_raise=call.recipe.quantized)


def select_blocks(mass: Tensor, may: Tensor, keep: KeepMass | KeepFraction) -> Tensor:
    """The kept set of every row, largest first, ties to the smaller index."""
    amounts = heads_of(keep.mass if isinstance(keep, KeepMass) else keep.fraction, mass.shape[1])
    amount = torch.tensor(amounts, dtype=torch.float64, device=mass.device)[:, None]
    if isinstance(keep, KeepMass):
        return keep_masses(mass, may, amount[..., None]).squeeze(-2)
    # 0.7 · 10 is a little over 7 in binary; 7 is meant.
    needed = torch.ceil(amount * may.sum(-1).double() - 1e-9).clamp(min=1)
    return (_ranked(mass, may)[1] < needed[..., None]) & may


def keep_masses(mass: Tensor, may: Tensor, masses: Tensor) -> Tensor:
    """The fewest blocks, largest first, whose mass reaches each of `masses` `[..., S]`, as bool
    `[..., S, n_k]` for `mass` and `may` `[..., n_k]`."""
    values, rank = _ranked(mass, may)
    # fp64 adds fp32 masses exactly, or nearly so: where equal masses tie, they tie exactly.
    reached = prefix_sum(values.clamp(min=0.0).double())
    needed = (reached[..., None, :] < (masses * reached[..., -1:])[..., None]).sum(-1) + 1
    # A mass of 1 takes every block, however small the mass of the last ones.
    needed = torch.where(masses >= 1.0, mass.shape[-1], needed)
    return (rank[..., None, :] < needed[..., None]) & may[..., None, :]


def _ranked(mass: Tensor, may: Tensor) -> tuple[Tensor, Tensor]:
    """Masses in descending order, and the rank of every block; blocks that may not be attended
    come last."""
    values, order = torch.where(may, mass, -1.0).sort(dim=-1, descending=True, stable=True)
    return values, order.argsort(-1)
