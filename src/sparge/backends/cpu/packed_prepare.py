"""The passes of prepare.py over packed sequences, by csrc/ops_packed_prepare.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...values.call import Call, Inputs
from ...values.geometry import BLOCK_K, BLOCK_Q
from ...values.recipe import QUANTIZED
from . import library
from .prepare import Asked, asked_of, finite


@dataclass(frozen=True)
class Passed:
    """What a pass gave; x: codes, or the caller's tensor itself, which has no scale."""

    x: Tensor
    scale: Tensor | None = None
    pooled: Tensor | None = None
    similarity: Tensor | None = None
    lse_shift: Tensor | None = None


@dataclass(frozen=True)
class PreparedPack:
    """What the later ops read of queries, keys and values. entries: pooled ones, as
    `pooled_key, pooled_value, pooled_k_scale, pooled_v_scale, pool_group`."""

    q: Passed
    k: Passed
    v: Passed
    entries: tuple[Any, ...] = (None, None, None, None, 1)

    def scored(self) -> tuple[Tensor | None, ...]:
        """`query, key, q_scale, k_scale`."""
        return self.q.x, self.k.x, self.q.scale, self.k.scale

    def attended(self) -> tuple[Any, ...]:
        """`query, key, value`, their scales, the pooled entries, `lse_shift`."""
        scales = (self.q.scale, self.k.scale, self.v.scale)
        return self.q.x, self.k.x, self.v.x, *scales, *self.entries, self.q.lse_shift


def prepare(call: Call, inputs: Inputs, q_rows: Tensor, k_rows: Tensor) -> PreparedPack:
    """As `prepare.prepare`, to plan and to attend."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    asked, mean = asked_of(call, to_plan=True, to_attend=True), None
    if asked.anything:
        mean = torch.empty((len(k_rows), call.Hk, call.D))
        library.ops().packed_key_mean(key, k_rows, mean, library.isa_number())
    key_mean = mean if asked.codes else None
    q = _pass(query, q_rows, BLOCK_Q, asked, scale=call.scale, key_mean=key_mean)
    k = _pass(key, k_rows, BLOCK_K, asked, scale=call.scale, mean=mean)
    fast = call.recipe.precision == "int8-fast"
    v = _channels(value, k_rows) if fast else Passed(value)
    if not call.recipe.pools:
        return PreparedPack(q, k, v)
    return PreparedPack(q, k, v, _pool(call, key, value, k_rows, mean=mean, k=k))


def _pool(
    call: Call, key: Tensor, value: Tensor, rows: Tensor, *, mean: Tensor | None, k: Passed
) -> tuple[Any, ...]:
    """Means over groups of keys and values, as the precision holds keys and values."""
    group, precision = call.recipe.pool_group, call.recipe.precision
    dtype = torch.float32 if precision == "exact" else key.dtype
    entries = _blocks(rows, group)
    v = _group_means(value, rows, group)
    values = _channels(v, entries) if precision == "int8-fast" else Passed(v.to(dtype))
    if precision in QUANTIZED:
        # Blocks of keys are pooled already where prediction needs them.
        known = k.pooled if group == BLOCK_K else None
        means = _group_means(key, rows, group, mean=mean) if known is None else finite(known)
        keys = _pass(means, entries, BLOCK_K, Asked(codes=True), scale=1.0)
    else:
        keys = Passed(_group_means(key, rows, group).to(dtype))
    return keys.x, values.x, keys.scale, values.scale, group


def _group_means(x: Tensor, rows: Tensor, group: int, *, mean: Tensor | None = None) -> Tensor:
    """Mean of each `group` rows of a sequence, less `mean`, fp32; 0 where it is not finite."""
    pooled = _pass(x, rows, group, Asked(pooled=True), scale=1.0, mean=mean).pooled
    assert pooled is not None
    return finite(pooled)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Rows of the sequences once each `block` of them is one."""
    numbers = -(rows[:, 1] // -block)
    return torch.stack([numbers.cumsum(0) - numbers, numbers], 1)


def _pass(
    x: Tensor,
    rows: Tensor,
    block: int,
    asked: Asked,
    *,
    scale: float,
    mean: Tensor | None = None,
    key_mean: Tensor | None = None,
) -> Passed:
    """x: `[1, H, T, D]`, or in the order of the pack. mean: subtracted from every row of a
    sequence. key_mean: of the keys, for the queries' `lse_shift`."""
    if not asked.anything:
        return Passed(x)
    H, D = x.shape[1], x.shape[-1]
    L, n = int(rows[:, 1].sum()), int((-(rows[:, 1] // -block)).sum())

    def room(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return x.new_empty(shape, dtype=dtype) if when else None

    codes, row_scale = room(asked.codes, L, H, D, dtype=torch.int8), room(asked.codes, L, H)
    pooled, similarity = room(asked.pooled, n, H, D), room(asked.similarity, n, H)
    lse_shift = room(key_mean is not None, L, H)
    library.ops().packed_statistics(
        x,
        rows,
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
    return Passed(x if codes is None else codes, row_scale, pooled, similarity, lse_shift)


def _channels(value: Tensor, rows: Tensor) -> Passed:
    H, D = value.shape[1], value.shape[-1]
    L, n = int(rows[:, 1].sum()), int((-(rows[:, 1] // -BLOCK_K)).sum())
    codes, scale = torch.empty((L, H, D), dtype=torch.int8), torch.empty((n, H, D))
    library.ops().packed_channels(value, rows, codes, scale, library.isa_number())
    return Passed(codes, scale)
