"""The second stage: the mass map, by predict_kernel.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...values.call import Call
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from . import predict_kernel
from .arguments import (
    LOG2E,
    architecture,
    block_dim,
    hides,
    kinds_under,
    mask_kind,
    mask_of,
    per_head,
    sizes_of,
    types_of,
)
from .launch import launch
from .operands import key_rows, packed_of, padded, query_rows

ROWS_AT_ONCE, EXACT_ROWS = 64, 16
"""Sampled rows of a program, those of several query blocks: keys are read once for all of them.
Three TF32 products of more than 16 rows take more registers than there are."""


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    """0 where no pair may attend; NaN in a row that is not known."""
    packed, queries, keys = packed_of(prepared), prepared.queries, prepared.keys
    recipe, device = call.recipe, queries.rows.device
    sizes = sizes_of(call, packed, tokens.offset)
    n_q = sizes.n_q
    mass = torch.empty((call.B, call.Hq, n_q, sizes.n_k), dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "k_pooled": _pooled(keys.pooled, call),
        "q_pooled": _pooled(queries.pooled, call),
        "kinds": kinds_under(tokens),
        "mass": mass,
        "pack": packed.of_queries(),
        **sizes._asdict(),
        "Hq": call.Hq,
        "group": call.Hq // call.Hk,
        "scale_log2": call.scale * LOG2E,
        "CAUSAL": hides(tokens, packed),
    }
    if recipe.predictor == "mean":
        least = recipe.min_similarity
        judged = least is not None
        tiles = packed.tiles(16)
        launch(
            predict_kernel.predict_means,
            (_programs(n_q, 16, tiles), call.Hq, call.B),
            {"num_warps": 4, "num_stages": 2},
            k_similarity=keys.similarity,
            least=per_head(least, call.Hq, -1.0, 1.0, torch.float32, device) if judged else None,
            tiles=tiles,
            BLOCK_D=block_dim(call.D),
            # 64 of 256 channels fill the shared memory of a compute unit.
            KEYS=64 if block_dim(call.D) <= 128 else 32,
            **common,
        )
        return mass
    per_block = int(triton.next_power_of_2(recipe.sample_rows))
    at_once = EXACT_ROWS if recipe.precision == "exact" else ROWS_AT_ONCE
    blocks = max(1, at_once // per_block)
    rows = n_q * min(recipe.sample_rows, 128) * call.Hq * call.B
    tiles = packed.tiles(blocks)
    launch(
        predict_kernel.predict_rows,
        (_programs(n_q, blocks, tiles), call.Hq, call.B),
        architecture(call).row_options(recipe.precision, masked=call.has_mask),
        touched={"q.data": rows * call.D, "q.scale": rows},
        tiles=tiles,
        q=query_rows(call, queries),
        k=key_rows(call, keys),
        mask=mask_of(tokens),
        TYPES=types_of(call),
        SAMPLED=recipe.sample_rows,
        PER_BLOCK=per_block,
        BLOCKS=blocks,
        MASK=mask_kind(tokens),
        **common,
    )
    return mass


def _programs(n_q: int, per_tile: int, tiles: Tensor | None) -> int:
    return -(-n_q // per_tile) if tiles is None else len(tiles)


def _pooled(x: Tensor | None, call: Call) -> Tensor | None:
    return None if x is None else padded(x, x.shape[2], block_dim(call.D))
