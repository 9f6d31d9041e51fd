"""The exact attention of a few heads, block by block, and what a plan keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_K, BLOCK_Q, Recipe, attention, make_plan, output_error
from sparge.api.accuracy import exact_weights
from sparge.values.geometry import diagonal_offset, in_blocks
from sparge.values.tokenmask import TokenMask

from .result import AttentionMap

SHOWN = 6  # heads that are drawn, from the sparsest to the densest


@dataclass(frozen=True)
class LayerCall:
    """One call of `attention` by a layer. options: its arguments besides the tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]


def head_errors(call: LayerCall, recipe: Recipe) -> list[float]:
    """Relative L1 of each head's output on sampled rows; the call is computed again."""
    inputs = (call.query, call.key, call.value)
    out = attention(*inputs, recipe=recipe, **call.options)
    assert isinstance(out, Tensor)
    errors: list[float] = output_error(*inputs, out, **call.options)[0].tolist()
    return errors


def attention_maps(
    calls: Mapping[int, LayerCall], errors: Mapping[int, list[float]], recipe: Recipe
) -> tuple[AttentionMap, ...]:
    """Maps of SHOWN heads of these layers, evenly spread from the sparsest to the densest."""
    plans = {
        i: make_plan(c.query, c.key, value=c.value, recipe=recipe, **c.options)
        for i, c in calls.items()
    }
    heads = sorted(
        (density, i, h)
        for i, plan in plans.items()
        for h, density in enumerate(plan.head_density()[0].tolist())
    )
    n = min(SHOWN, len(heads))
    maps = []
    for density, i, h in (heads[j * (len(heads) - 1) // max(n - 1, 1)] for j in range(n)):
        mass, kept = block_mass(calls[i], h), plans[i].to_mask()[0, h].cpu()
        mass_kept = float((mass * kept).sum() / mass.sum())
        maps.append(AttentionMap(i, h, density, mass_kept, errors[i][h], mass, kept))
    return tuple(maps)


def block_mass(call: LayerCall, h: int) -> Tensor:
    """`[n_q, n_k]` fp32: the share of attention that each key block gets, mean over the rows."""
    Lq, Lk, options = call.query.shape[2], call.key.shape[2], call.options
    offset = diagonal_offset(Lq, Lk, options["causal_align"])
    tokens = TokenMask(Lq, Lk, options["is_causal"], offset, options["attn_mask"])
    scale = call.query.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    mass = []
    for rows in torch.arange(Lq, device=call.query.device).split(BLOCK_Q):
        weights = exact_weights(call.query, call.key, tokens, 0, h, rows, scale=scale)
        mass.append(in_blocks(weights, -1, BLOCK_K).sum(-1).mean(0))
    return torch.stack(mass).float().cpu()
