"""The true attention of a few heads, block by block, and what a plan keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..accuracy import output_error
from ..api import attention, make_plan
from ..geometry import BLOCK_K, BLOCK_Q, block_range, diagonal_offset, in_blocks, n_blocks
from ..recipe import Recipe
from ..report.showcase import HeadView
from ..tokenmask import TokenMask

SHOWN = 6
"""Heads that are drawn, from the sparsest to the densest."""


@dataclass(frozen=True)
class LayerCall:
    """One call of `attention`, as a layer made it; facts: its other arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    facts: dict[str, Any]


def error_of(call: LayerCall, recipe: Recipe) -> list[float]:
    """Relative L1 of each head's output, computed once more, on sampled rows."""
    inputs = (call.query, call.key, call.value)
    out = attention(*inputs, recipe=recipe, **call.facts)
    assert isinstance(out, Tensor)
    errors: list[float] = output_error(*inputs, out, **call.facts)[0].tolist()
    return errors


def look(
    calls: Mapping[int, LayerCall], errors: Mapping[int, list[float]], recipe: Recipe
) -> tuple[HeadView, ...]:
    """Some heads of these layers, evenly spread from the sparsest to the densest."""
    plans = {
        i: make_plan(c.query, c.key, value=c.value, recipe=recipe, **c.facts)
        for i, c in calls.items()
    }
    heads = sorted(
        (density, i, h)
        for i, plan in plans.items()
        for h, density in enumerate(plan.head_density()[0].tolist())
    )
    n = min(SHOWN, len(heads))
    chosen = [heads[j * (len(heads) - 1) // max(n - 1, 1)] for j in range(n)]
    views = []
    for density, i, h in chosen:
        mass, kept = block_mass(calls[i], h), plans[i].to_mask()[0, h].cpu()
        views.append(
            HeadView(
                layer=i,
                head=h,
                density=density,
                mass_kept=float((mass * kept).sum() / mass.sum()),
                error=errors[i][h],
                mass=mass,
                kept=kept,
            )
        )
    return tuple(views)


def block_mass(call: LayerCall, h: int) -> Tensor:
    """`[n_q, n_k]` fp32: the share of attention that each key block gets, mean over the rows."""
    Hq, Lq, Lk = call.query.shape[1], call.query.shape[2], call.key.shape[2]
    facts = call.facts
    tokens = TokenMask(
        Lq,
        Lk,
        facts["is_causal"],
        diagonal_offset(Lq, Lk, facts["causal_align"]),
        facts["attn_mask"],
    )
    scale = call.query.shape[3] ** -0.5 if facts["scale"] is None else facts["scale"]
    key = call.key[0, h * call.key.shape[1] // Hq].float()
    mass = torch.empty(n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K))
    for i_q in range(len(mass)):
        rows = block_range(i_q, BLOCK_Q, Lq)
        scores = call.query[0, h, rows].float() @ key.mT * scale
        allowed, bias = tokens.region(0, h, rows, slice(None), key.device)
        scores = scores if bias is None else scores + bias
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        mass[i_q] = in_blocks(scores.softmax(-1), -1, BLOCK_K).sum(-1).mean(0)
    return mass
