"""A whole call as one native op: all stages in one parallel region (csrc/whole_call.h)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...values.blockplan import plan_from_lists
from ...values.call import Call, Inputs
from ...values.recipe import PRECISIONS, PREDICTORS, KeepError, Recipe
from ...values.stages import STAGES, Attended, AttendedCall, KeptLimit
from ...values.tokenmask import TokenMask
from . import library
from .attend import pv_skip_of
from .library import min_similarity
from .select import amount_of

FAR = 2**36
"""Larger than any length: a number of blocks or a place of a token beyond it says the same."""


def why_in_stages(call: Call) -> str | None:
    if isinstance(call.recipe.keep, KeepError):
        return "an error budget looks at what it measured between its steps"
    return None


def attend_call(
    call: Call,
    inputs: Inputs,
    tokens: TokenMask,
    *,
    limit: KeptLimit | None = None,
    timed: bool = False,
) -> AttendedCall:
    query, value = inputs.query, inputs.value
    assert value is not None
    counts = query.new_empty((call.B, call.Hq, call.n_q), dtype=torch.int32)
    lists = counts, counts.new_empty((*counts.shape, call.n_k)), torch.empty_like(counts)
    out = query.new_empty((call.B, call.Hq, call.Lq, call.Dv))
    lse = query.new_empty((call.B, call.Hq, call.Lq), dtype=torch.float32)
    pv_skips = torch.empty_like(counts)
    seconds = query.new_zeros(len(STAGES), dtype=torch.float64) if timed else None
    attended = library.ops().attention(
        query,
        inputs.key,
        value,
        inputs.attn_mask,
        call.is_causal,
        call.offset,
        call.scale,
        *recipe_numbers(call.recipe, call.Hq, call.is_causal),
        -1.0 if limit is None else limit.most_kept,
        0.0 if limit is None else limit.pooled_cost,
        *lists,
        out,
        lse,
        pv_skips,
        seconds,
        0,
        library.isa_number(),
    )
    return AttendedCall(
        plan_from_lists(*lists, tokens),
        Attended(out, lse, pv_skips) if attended else None,
        {} if seconds is None else dict(zip(STAGES, seconds.tolist(), strict=True)),
    )


@lru_cache(maxsize=256)
def recipe_numbers(recipe: Recipe, Hq: int, is_causal: bool) -> tuple[Any, ...]:
    """What the op reads of a recipe, in its order; no op changes the tensors."""
    keep, amount = amount_of(recipe, Hq)
    ranges = [
        [max(-FAR, min(x, FAR)) for x in (start, FAR if stop is None else stop)]
        for start, stop in recipe.protect
    ]
    return (
        PRECISIONS.index(recipe.precision),
        keep,
        amount,
        PREDICTORS.index(recipe.predictor),
        recipe.sample_rows,
        min_similarity(recipe, Hq),
        min(recipe.sink_blocks, FAR),
        min(recipe.window(is_causal), FAR),
        torch.tensor(ranges) if ranges else None,
        pv_skip_of(recipe, Hq),
        recipe.pool_group if recipe.pools else 0,
    )
