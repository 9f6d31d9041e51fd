"""Keep the blocks that matter.

    kept = the fewest blocks, largest first, whose mass reaches τ; or a fraction of them; or the τ
           of a head is found by measuring what skipping does (budget.py)
         | all of a row or column whose pooled token is not trusted | forced blocks

A row whose prediction is not finite keeps every block it may attend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...blockplan import BlockPlan, plan_from_mask
from ...call import Call
from ...recipe import KeepAll, KeepError, KeepFraction, KeepMass, heads_of
from ...stages import Prepared
from ...support.ordered_sums import prefix_sum
from ...tokenmask import EXCLUDED, TokenMask
from ..budget import masses_of, take_step
from ..forced import forced_blocks
from .sampled_rows import step_errors
from .similarity import untrusted_keys, untrusted_queries


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    keep, device = call.recipe.keep, prepared.operands.query.device
    may = tokens.block_kinds(device) != EXCLUDED
    may = may.expand(call.B, call.Hq, call.n_q, call.n_k)
    if isinstance(keep, KeepAll):
        return plan_from_mask(may, tokens)
    assert mass is not None
    unknown = ~torch.isfinite(mass).all(-1, keepdim=True) | ~(mass > 0).any(-1, True)
    mass = mass.nan_to_num(0.0, 0.0, 0.0)
    forced = unknown | forced_blocks(tokens, call.recipe, device)
    if call.recipe.min_similarity is not None:
        found = prepared.statistics
        forced = forced | untrusted_queries(call, found)[..., None]
        forced = forced | untrusted_keys(call, found)[..., None, :]
    if not isinstance(keep, KeepError):
        return plan_from_mask(select_blocks(mass, may, keep) | forced, tokens)
    first = first_steps(mass, may, keep).masked_fill(forced, 0)
    step, error = take_step(*step_errors(call, prepared, first, may, tokens), keep)
    return plan_from_mask(first <= step[..., None, None], tokens, error=error)


def first_steps(mass: Tensor, may: Tensor, keep: KeepError) -> Tensor:
    """The first step that keeps each block, int64; each step keeps what those before it do."""
    masses = masses_of(keep, mass.shape[1])
    kept = [select_blocks(mass, may, KeepMass(step)) for step in zip(*masses, strict=True)]
    return (~torch.stack(kept)).sum(0)


def select_blocks(mass: Tensor, may: Tensor, keep: KeepMass | KeepFraction) -> Tensor:
    """The kept set of every row, largest first, ties to the smaller index."""
    Hq, n_k = mass.shape[1], mass.shape[-1]
    # Blocks that may not be attended sort behind every block that may.
    ranked = torch.where(may, mass, -1.0).sort(dim=-1, descending=True, stable=True)
    if isinstance(keep, KeepFraction):
        fraction = _column(heads_of(keep.fraction, Hq, none=1.0), mass.device)
        # 0.7 · 10 is a little over 7 in binary; a person means 7.
        needed = torch.ceil(fraction * may.sum(-1).double() - 1e-9).clamp(min=1)
    else:
        share = _column(heads_of(keep.mass, Hq, none=1.0), mass.device)
        # fp64 adds fp32 masses exactly, or nearly so: where equal masses tie, they tie exactly.
        reached = prefix_sum(ranked.values.clamp(min=0.0).double())
        needed = (reached < (share * reached[..., -1]).unsqueeze(-1)).sum(-1) + 1
        # No mass is nothing, however small: the whole of it takes every block.
        needed = torch.where(share >= 1.0, n_k, needed)
    rank = torch.arange(n_k, device=mass.device)
    chosen = rank < needed.unsqueeze(-1)
    return torch.zeros_like(may).scatter(-1, ranked.indices, chosen) & may


def _column(heads: list[float], device: torch.device) -> Tensor:
    return torch.tensor(heads, dtype=torch.float64, device=device)[:, None]
