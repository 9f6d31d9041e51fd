"""One pass over K after its mean, one over V, one over Q, by csrc/statistics.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...values.call import BLOCK_K, BLOCK_Q, Call, n_blocks
from ...values.recipe import QUANTIZED
from ...values.stages import Pooled, PreparedKeys, PreparedQueries, QTensor
from . import library


def prepare_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    *,
    mean: Tensor | None = None,
    to_plan: bool,
    to_attend: bool,
) -> PreparedKeys:
    recipe, wanted = call.recipe, results_wanted(call, to_plan=to_plan, to_attend=to_attend)
    if not wanted.anything:
        mean = None
    elif mean is None:
        mean = key.new_empty((*key.shape[:2], key.shape[3]), dtype=torch.float32)
        library.ops().key_mean(key, mean, library.isa_number())
    k = _pass_over_rows(key, BLOCK_K, wanted, scale=call.scale, mean=mean)
    v: Tensor | QTensor = key if value is None else value
    entries = None
    if value is not None and (to_attend or call.measures_error):
        if recipe.precision == "int8-fast":
            v = _code_channels(value)
        if recipe.pools:
            # Blocks of keys are pooled already where prediction needs them.
            known = k.pooled if recipe.pool_group == BLOCK_K and recipe.quantized else None
            group, precision = recipe.pool_group, recipe.precision
            entries = _pool(key, value, group, precision, mean=mean, known=known)
    return PreparedKeys(k.rows, v, key, value, mean, k.pooled, k.similarity, entries)


def prepare_queries(
    call: Call, query: Tensor, *, mean: Tensor | None, to_plan: bool, to_attend: bool
) -> PreparedQueries:
    wanted = results_wanted(call, to_plan=to_plan, to_attend=to_attend)
    key_mean = mean if wanted.codes and to_attend else None
    q = _pass_over_rows(query, BLOCK_Q, wanted, scale=call.scale, key_mean=key_mean)
    return PreparedQueries(q.rows, query, q.lse_shift, q.pooled, q.similarity)


def sum_keys(key: Tensor) -> Tensor:
    """fp32 `[B, Hk, n_k, D]`, of rows scaled by 1 / 128, so that a sum of finite rows is finite."""
    B, Hk, L, D = key.shape
    # A short block is filled up with zeros, which add nothing: sums of 64 rows are pooled tokens
    # times a power of two.
    whole = F.pad(key, (0, 0, 0, -L % BLOCK_K))
    pooled = torch.empty((B, Hk, whole.shape[2] // BLOCK_K, D), dtype=torch.float32)
    nothing = (None, None, None, pooled, None, None, 1.0, None)
    library.ops().statistics(whole, BLOCK_K, *nothing, library.isa_number())
    return pooled * (BLOCK_K / BLOCK_Q)


def mean_of_sums(sums: Tensor, n_keys: int) -> Tensor:
    """Added in order, in fp64, as csrc/ops_prepare.cpp adds them of all keys at once."""
    total = sums.double().cumsum(2)[:, :, -1]
    return (total * BLOCK_Q / n_keys).float()


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
    values = _code_channels(v) if precision == "int8-fast" else v.to(dtype)
    if precision in QUANTIZED:
        k = _group_means(key, group, mean=mean) if known is None else finite(known)
        codes = _pass_over_rows(k, BLOCK_K, Wanted(codes=True), scale=1.0)
        return Pooled(codes.rows, values, group)
    return Pooled(_group_means(key, group).to(dtype), values, group)


def _group_means(x: Tensor, group: int, *, mean: Tensor | None = None) -> Tensor:
    """Mean of each `group` rows, less `mean`, fp32; 0 where it is not finite."""
    pooled = _pass_over_rows(x, group, Wanted(pooled=True), scale=1.0, mean=mean).pooled
    assert pooled is not None
    return finite(pooled)


def finite(means: Tensor) -> Tensor:
    """Their block is known not to be finite by its own keys and values."""
    return means.nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Wanted:
    """Results that a pass over Q or K computes."""

    codes: bool = False
    pooled: bool = False
    similarity: bool = False

    @property
    def anything(self) -> bool:
        return self.codes or self.pooled or self.similarity


def results_wanted(call: Call, *, to_plan: bool, to_attend: bool) -> Wanted:
    """What the later stages of a call need."""
    return Wanted(
        codes=call.recipe.quantized and (to_attend or call.samples_rows),
        pooled=to_plan and call.pools_blocks,
        similarity=to_plan and call.predicts and call.recipe.min_similarity is not None,
    )


@dataclass(frozen=True)
class _RowResults:
    """Results of a pass. rows: codes, or the tensor itself."""

    rows: Tensor | QTensor
    pooled: Tensor | None = None
    similarity: Tensor | None = None
    lse_shift: Tensor | None = None


def _pass_over_rows(
    x: Tensor,
    block: int,
    wanted: Wanted,
    *,
    scale: float,
    mean: Tensor | None = None,
    key_mean: Tensor | None = None,
) -> _RowResults:
    """mean: subtracted from every row. key_mean: of the keys, for the queries' `lse_shift`."""
    if not wanted.anything:
        return _RowResults(x)
    B, H, L, D = x.shape
    n = n_blocks(L, block)

    def empty_if(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return x.new_empty(shape, dtype=dtype) if when else None

    codes = empty_if(wanted.codes, B, H, L, D, dtype=torch.int8)
    row_scale = empty_if(wanted.codes, B, H, L)
    pooled, similarity = empty_if(wanted.pooled, B, H, n, D), empty_if(wanted.similarity, B, H, n)
    lse_shift = empty_if(key_mean is not None, B, H, L)
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
    return _RowResults(coded, pooled, similarity, lse_shift)


def _code_channels(value: Tensor) -> QTensor:
    B, H, L, D = value.shape
    codes = value.new_empty(value.shape, dtype=torch.int8)
    scale = value.new_empty((B, H, n_blocks(L, BLOCK_K), D), dtype=torch.float32)
    library.ops().channels(value, codes, scale, library.isa_number())
    return QTensor(codes, scale, BLOCK_K, per_channel=True)
