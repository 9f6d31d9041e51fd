"""One pass over K after its mean, one over Q, one over V, by csrc/statistics.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...values.call import Call, Inputs
from ...values.geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...values.qtensor import Operands, Pooled, QTensor
from ...values.recipe import QUANTIZED
from ...values.stages import Prepared, Statistics
from . import library


def prepare(call: Call, inputs: Inputs, *, to_plan: bool, to_attend: bool) -> Prepared:
    query, key, value = inputs.query, inputs.key, inputs.value
    asked = asked_of(call, to_plan=to_plan, to_attend=to_attend)
    mean = inputs.key_mean if asked.anything else None
    if asked.anything and mean is None:
        mean = key.new_empty((*key.shape[:2], key.shape[3]), dtype=torch.float32)
        library.ops().key_mean(key, mean, library.isa_number())
    shifts = asked.codes and to_attend
    q = _pass(query, BLOCK_Q, asked, scale=call.scale, key_mean=mean if shifts else None)
    k = _pass(key, BLOCK_K, asked, scale=call.scale, mean=mean)
    v: Tensor | QTensor = key if value is None else value
    reads_v = to_attend or call.measures_error
    if reads_v and value is not None and call.recipe.precision == "int8-fast":
        v = _channels(value)
    statistics = Statistics(q.pooled, k.pooled, q.similarity, k.similarity)
    pooled = None
    if reads_v and value is not None and call.recipe.pools:
        group, precision = call.recipe.pool_group, call.recipe.precision
        # Blocks of keys are pooled already where prediction needs them.
        known = k.pooled if group == BLOCK_K and call.recipe.quantized else None
        pooled = _pool(key, value, group, precision, mean=mean, known=known)
    operands = Operands(q.x, k.x, v, q.lse_shift)
    return Prepared(operands, statistics, query, key, value, pooled, mean)


def _pool(
    key: Tensor,
    value: Tensor,
    group: int,
    precision: str,
    *,
    mean: Tensor | None,
    known: Tensor | None,
) -> Pooled:
    """Means over groups of keys and values, as the precision holds keys and values."""
    dtype = torch.float32 if precision == "exact" else key.dtype
    v = _group_means(value, group)
    values = _channels(v) if precision == "int8-fast" else v.to(dtype)
    if precision in QUANTIZED:
        k = _group_means(key, group, mean=mean) if known is None else finite(known)
        codes = _pass(k, BLOCK_K, Asked(codes=True), scale=1.0)
        return Pooled(codes.x, values, group)
    return Pooled(_group_means(key, group).to(dtype), values, group)


def _group_means(x: Tensor, group: int, *, mean: Tensor | None = None) -> Tensor:
    """Mean of each `group` rows, less `mean`, fp32; 0 where it is not finite."""
    pooled = _pass(x, group, Asked(pooled=True), scale=1.0, mean=mean).pooled
    assert pooled is not None
    return finite(pooled)


def finite(means: Tensor) -> Tensor:
    """Their block is known not to be finite by its own keys and values."""
    return means.nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Asked:
    """Which results a pass over Q or K shall give."""

    codes: bool = False
    pooled: bool = False
    similarity: bool = False

    @property
    def anything(self) -> bool:
        return self.codes or self.pooled or self.similarity


def asked_of(call: Call, *, to_plan: bool, to_attend: bool) -> Asked:
    """What the later stages of a call need."""
    return Asked(
        codes=call.recipe.quantized and (to_attend or call.samples_rows),
        pooled=to_plan and call.pools_blocks,
        similarity=to_plan and call.predicts and call.recipe.min_similarity is not None,
    )


@dataclass(frozen=True)
class _Passed:
    """What a pass gave; x: codes, or the tensor itself."""

    x: Tensor | QTensor
    pooled: Tensor | None = None
    similarity: Tensor | None = None
    lse_shift: Tensor | None = None


def _pass(
    x: Tensor,
    block: int,
    asked: Asked,
    *,
    scale: float,
    mean: Tensor | None = None,
    key_mean: Tensor | None = None,
) -> _Passed:
    """mean: subtracted from every row. key_mean: of the keys, for the queries' `lse_shift`."""
    if not asked.anything:
        return _Passed(x)
    B, H, L, D = x.shape
    n = n_blocks(L, block)

    def room(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return x.new_empty(shape, dtype=dtype) if when else None

    codes = room(asked.codes, B, H, L, D, dtype=torch.int8)
    row_scale = room(asked.codes, B, H, L)
    pooled, similarity = room(asked.pooled, B, H, n, D), room(asked.similarity, B, H, n)
    lse_shift = room(key_mean is not None, B, H, L)
    library.ops().statistics(
        x,
        block,
        mean,
        codes,
        row_scale,
        pooled,
        similarity,
        key_mean,
        scale,
        lse_shift,
        library.isa_number(),
    )
    coded = x if codes is None or row_scale is None else QTensor(codes, row_scale)
    return _Passed(coded, pooled, similarity, lse_shift)


def _channels(value: Tensor) -> QTensor:
    B, H, L, D = value.shape
    codes = value.new_empty(value.shape, dtype=torch.int8)
    scale = value.new_empty((B, H, n_blocks(L, BLOCK_K), D), dtype=torch.float32)
    library.ops().channels(value, codes, scale, library.isa_number())
    return QTensor(codes, scale, BLOCK_K, per_channel=True)
