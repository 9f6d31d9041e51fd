"""A whole call as one native op: all stages in one parallel region (csrc/whole_call.h)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...values.blockplan import plan_from_lists
from ...values.call import Call, Inputs
from ...values.recipe import PRECISIONS, PREDICTORS, KeepError
from ...values.stages import STAGES, Attended, AttendedCall, KeptLimit
from ...values.tokenmask import TokenMask
from . import library
from .attend import pv_skip_of
from .library import min_similarity
from .select import amount_of, forced_of


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
    recipe, query, value = call.recipe, inputs.query, inputs.value
    assert value is not None
    counts = query.new_empty((call.B, call.Hq, call.n_q), dtype=torch.int32)
    lists = counts, counts.new_empty((*counts.shape, call.n_k)), torch.empty_like(counts)
    out = query.new_empty((call.B, call.Hq, call.Lq, call.Dv))
    lse = query.new_empty((call.B, call.Hq, call.Lq), dtype=torch.float32)
    pv_skips = torch.empty_like(counts)
    seconds = query.new_empty(len(STAGES), dtype=torch.float64) if timed else None
    keep, amount, similarity, pv_skip = _numbers_of(call)
    attended = library.ops().attention(
        query,
        inputs.key,
        value,
        inputs.attn_mask,
        call.is_causal,
        call.offset,
        call.scale,
        PRECISIONS.index(recipe.precision),
        keep,
        amount,
        PREDICTORS.index(recipe.predictor),
        recipe.sample_rows,
        similarity,
        forced_of(call, tokens),
        pv_skip,
        recipe.pool_group if recipe.pools else 0,
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
def _numbers_of(call: Call) -> tuple[int, Tensor, Tensor | None, Tensor | None]:
    """`keep, amount, min_similarity, pv_skip`, which no op changes."""
    return (*amount_of(call), min_similarity(call), pv_skip_of(call))
