"""The first stage: codes, scales, block statistics and pooled entries, by operands.py."""

from __future__ import annotations

from torch import Tensor

from ...values.call import Call
from .arguments import NOT_PACKED, Packed, unit_rows
from .operands import KeysOnDevice, QueriesOnDevice, make_keys, make_queries, mean_key


def prepare_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    *,
    mean: Tensor | None = None,
    to_plan: bool,
    to_attend: bool,
    packed: Packed = NOT_PACKED,
) -> KeysOnDevice:
    """mean: defaults to the mean of `key`. A caller that holds part of the sequence passes the mean
    over all of it."""
    coded, pooled, similar = _wanted(call, to_plan=to_plan, to_attend=to_attend)
    if not (coded or pooled or similar):
        mean = None
    elif mean is None:
        mean = mean_key(call, unit_rows(key), packed)
    return make_keys(
        call,
        key,
        value,
        mean,
        coded=coded,
        reads_values=to_attend or call.measures_error,
        pooled=pooled,
        similar=similar,
        packed=packed,
    )


def prepare_queries(
    call: Call,
    query: Tensor,
    *,
    mean: Tensor | None,
    to_plan: bool,
    to_attend: bool,
    packed: Packed = NOT_PACKED,
) -> QueriesOnDevice:
    """mean: `PreparedKeys.mean`, for lse_shift."""
    coded, pooled, similar = _wanted(call, to_plan=to_plan, to_attend=to_attend)
    return make_queries(
        call,
        query,
        mean,
        coded=coded,
        pooled=pooled,
        similar=similar,
        deviates=to_plan and call.measures_error,
        shifts=coded and to_attend,
        packed=packed,
    )


def _wanted(call: Call, *, to_plan: bool, to_attend: bool) -> tuple[bool, bool, bool]:
    """Whether codes, pooled tokens and self-similarities are needed."""
    coded = call.recipe.quantized and (to_attend or call.samples_rows)
    similar = to_plan and call.predicts and call.recipe.min_similarity is not None
    return coded, to_plan and call.pools_blocks, similar
