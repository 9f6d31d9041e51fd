"""The second stage: the mass map, by predict_kernel.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...values.call import Call
from ...values.tokenmask import TokenMask
from . import predict_kernel
from .architectures import Architecture, architecture_of
from .launch import launch
from .masks import is_causal, kind_arguments, mask_arguments
from .one_pass import Prepared
from .operands import key_arguments, padded, query_arguments
from .packed import NOT_PACKED, Packed
from .shapes import LOG2E, block_dim, per_head, within

ROWS_AT_ONCE, EXACT_ROWS = 64, 16
"""Sampled rows of a program, those of several query blocks: keys are read once for all of them.
Three TF32 products of more than 16 rows take more registers than there are."""


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    """0 where no pair may attend; NaN in a row that is not known."""
    packed: Packed = getattr(prepared, "packed", NOT_PACKED)
    recipe, found, query = call.recipe, prepared.statistics, prepared.operands.query
    n_q, n_k = packed.n_q or call.n_q, packed.most_k or call.n_k
    device = query.device
    mass = torch.empty((call.B, call.Hq, n_q, n_k), dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "k_pooled": _pooled(found.k_pooled, call),
        "q_pooled": _pooled(found.q_pooled, call),
        "mass": mass,
        **kind_arguments(tokens),
        "Hq": call.Hq,
        "group": call.Hq // call.Hk,
        "Lq": call.Lq,
        "Lk": call.Lk,
        "n_q": n_q,
        "n_k": n_k,
        "n_blocks_k": packed.n_k or call.n_k,
        "offset": within(tokens.offset, call.Lq, call.Lk),
        "CAUSAL": tokens.is_causal if packed else is_causal(tokens),
        **packed.arguments(),
    }
    if recipe.predictor == "mean":
        least = recipe.min_similarity
        judged = least is not None
        tiles = packed.tiles(16)
        launch(
            predict_kernel.predict_means,
            (_programs(n_q, 16, tiles), call.Hq, call.B),
            {"num_warps": 4, "num_stages": 2},
            k_similarity=found.k_similarity,
            least=per_head(least, call.Hq, -1.0, 1.0, torch.float32, device) if judged else None,
            tiles=tiles,
            scale_log2=call.scale * LOG2E,
            BLOCK_D=block_dim(call.D),
            # 64 of 256 channels fill the shared memory of a compute unit.
            KEYS=64 if block_dim(call.D) <= 128 else 32,
            MASK=mask_arguments(tokens)["MASK"],
            JUDGE=judged,
            **common,
        )
        return mass
    architecture = architecture_of(*call.where)
    assert isinstance(architecture, Architecture)
    per_block = int(triton.next_power_of_2(recipe.sample_rows))
    at_once = EXACT_ROWS if recipe.precision == "exact" else ROWS_AT_ONCE
    blocks = max(1, at_once // per_block)
    rows = n_q * min(recipe.sample_rows, 128) * call.Hq * call.B
    tiles = packed.tiles(blocks)
    launch(
        predict_kernel.predict_rows,
        (_programs(n_q, blocks, tiles), call.Hq, call.B),
        architecture.row_options(recipe.precision, masked=call.has_mask),
        touched={"q": rows * call.D, "q_scale": rows},
        tiles=tiles,
        **query_arguments(call, prepared),
        **key_arguments(call, prepared),
        **mask_arguments(tokens),
        scale_log2=call.scale * LOG2E,
        SAMPLED=recipe.sample_rows,
        PER_BLOCK=per_block,
        BLOCKS=blocks,
        BLEND=recipe.predictor == "blend",
        **common,
    )
    return mass


def _programs(n_q: int, per_tile: int, tiles: Tensor | None) -> int:
    return -(-n_q // per_tile) if tiles is None else len(tiles)


def _pooled(x: Tensor | None, call: Call) -> Tensor | None:
    return None if x is None else padded(x, x.shape[2], block_dim(call.D))
