"""One pass over K after its mean, one over Q, one over V, in the native core (csrc/statistics.h).

The same pass makes what planning reads, so `attention` runs it once: `prepare` gives both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...qtensor import Operands, QTensor
from ...recipe import QUANTIZED, KeepAll, Recipe
from . import library as native


@dataclass(frozen=True)
class Statistics:
    """What planning reads of q and k: pooled tokens `[B, H, n, D]`, self-similarities `[B, H, n]`;
    None where the recipe does not ask for them."""

    q_pooled: Tensor | None = None
    k_pooled: Tensor | None = None
    q_similarity: Tensor | None = None
    k_similarity: Tensor | None = None


def quantize(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, precision: str
) -> Operands:
    """Operands of `"int8"` and `"int8-fast"`, one scale per token."""
    return _pass(query, key, value, scale=scale, precision=precision)[0]


def prepare(
    query: Tensor, key: Tensor, value: Tensor | None, *, scale: float, recipe: Recipe
) -> tuple[Operands, Statistics]:
    """Operands and statistics together; without a value, those of planning alone."""
    predicts = not isinstance(recipe.keep, KeepAll)
    return _pass(
        query,
        key,
        value,
        scale=scale,
        precision=recipe.precision,
        pools=predicts and recipe.predictor != "rows",
        judges=predicts and recipe.min_similarity is not None,
        codes=value is not None or (predicts and recipe.predictor != "mean"),
    )


def _pass(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    scale: float,
    precision: str,
    pools: bool = False,
    judges: bool = False,
    codes: bool = True,
) -> tuple[Operands, Statistics]:
    codes = codes and precision in QUANTIZED
    mean = None
    if codes or pools or judges:
        mean = key.new_empty((*key.shape[:2], key.shape[3]), dtype=torch.float32)
        native.ops().key_mean(key, mean, native.isa_number())
    q, q_pooled, q_similarity, lse_shift = _over(
        query,
        BLOCK_Q,
        None,
        mean if codes and value is not None else None,
        scale,
        codes,
        pools,
        judges,
    )
    k, k_pooled, k_similarity, _ = _over(key, BLOCK_K, mean, None, scale, codes, pools, judges)
    v: Tensor | QTensor = key if value is None else value
    if value is not None and precision == "int8-fast":
        v = _channels(value)
    operands = Operands(q, k, v, lse_shift)
    return operands, Statistics(q_pooled, k_pooled, q_similarity, k_similarity)


def _over(
    x: Tensor,
    block: int,
    mean: Tensor | None,
    key_mean: Tensor | None,
    scale: float,
    codes: bool,
    pools: bool,
    judges: bool,
) -> tuple[Tensor | QTensor, Tensor | None, Tensor | None, Tensor | None]:
    """One pass over x: `(codes or x, pooled, similarity, lse_shift)`."""
    if not (codes or pools or judges):
        return x, None, None, None
    B, H, L, D = x.shape
    n = n_blocks(L, block)

    def room(*shape: int, when: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return x.new_empty(shape, dtype=dtype) if when else None

    code = room(B, H, L, D, when=codes, dtype=torch.int8)
    row_scale = room(B, H, L, when=codes)
    pooled, similarity = room(B, H, n, D, when=pools), room(B, H, n, when=judges)
    lse_shift = room(B, H, L, when=key_mean is not None)
    native.ops().statistics(
        x,
        block,
        mean,
        code,
        row_scale,
        pooled,
        similarity,
        key_mean,
        scale,
        lse_shift,
        native.isa_number(),
    )
    q = x if code is None or row_scale is None else QTensor(code, row_scale)
    return q, pooled, similarity, lse_shift


def _channels(value: Tensor) -> QTensor:
    B, H, L, D = value.shape
    codes = value.new_empty(value.shape, dtype=torch.int8)
    scale = value.new_empty((B, H, n_blocks(L, BLOCK_K), D), dtype=torch.float32)
    native.ops().channels(value, codes, scale, native.isa_number())
    return QTensor(codes, scale, BLOCK_K, per_channel=True)
