"""The mass map: how much of its attention each query block gives each key block.

    predict_means   softmax over the pooled tokens, 16 query blocks x KEYS key blocks at a time
    predict_rows    a few rows of each query block, scored exactly in the precision of the call:
                    once for their maxima and sums, once for the mass of each block; `"blend"`
                    averages that with the softmax over the pooled tokens in the same walk

Scoring twice costs less than keeping the mass of every row and block until its sum is known.
Blocks that nothing may attend get 0; NaN marks what is not known.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values.call import Call
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from .arguments import LOG2E, architecture, block_dim, per_head, sizes_of, types_of
from .blocks import hides, kinds_of_row, kinds_under, mask_kind, mask_of
from .launch import launch
from .operands import key_rows, keys_of, padded, query_rows
from .primitives import BLOCK_K, BLOCK_Q, EXCLUDED, add_scores, causal_stop, held_share, sequence_of
from .tiles import keys_of_head, load_rows, score_rows

ROWS_AT_ONCE, EXACT_ROWS = 64, 16
"""Sampled rows of a program, those of several query blocks: keys are read once for all of them.
Three TF32 products of more than 16 rows take more registers than there are."""


@triton.jit
def first_block_of(tiles, pid, PER_TILE: tl.constexpr):
    """`(sequence, first query block of the sequence)` of a program; tiles never span sequences."""
    seq, first = 0, pid * PER_TILE
    if tiles is not None:
        seq, first = tl.load(tiles + 2 * pid), tl.load(tiles + 2 * pid + 1)
    return seq, first


@triton.jit
def may_attend(i, j, own, kinds_row, CAUSAL: tl.constexpr):
    """Whether any pair of query block i and key block j of a sequence may attend. kinds_row: kinds
    of the blocks under a mask, or None."""
    i = i + j * 0  # the interpreter mixes up flags of different shapes
    may = (j * BLOCK_K < own.Lk) & (i * BLOCK_Q < own.Lq)
    if CAUSAL:
        may = may & (j * BLOCK_K <= tl.minimum((i + 1) * BLOCK_Q, own.Lq) - 1 + own.offset)
    if kinds_row is not None:
        may = may & (tl.load(kinds_row + j, mask=may, other=0) != EXCLUDED)
    return may


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset"])
def predict_means(
    q_pooled, k_pooled, k_similarity, least, kinds, mass, pack, tiles,
    Lq, Lk, n_q, n_k, n_blocks_k, offset, Hq, group, scale_log2,
    BLOCK_D: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Predictor `"mean"`: 16 query blocks of one head, KEYS key blocks at a time. least: of each
    head, the self-similarity below which a key block is not predicted; None judges none."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq, first = first_block_of(tiles, tl.program_id(0), 16)
    own = sequence_of(pack, seq, Lq, Lk, offset)
    i = first + tl.arange(0, 16)
    here = i * BLOCK_Q < own.Lq
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, KEYS)
    head, key_head = b * Hq + h, b * (Hq // group) + h // group
    row = head * n_q + own.q_block0 + i
    # q [16, BLOCK_D]
    q = tl.load(q_pooled + row[:, None] * BLOCK_D + d[None, :], mask=here[:, None], other=0.0)
    best = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    own_n_k = tl.cdiv(own.Lk, BLOCK_K)
    for step in tl.range(0, 2):
        for start in tl.range(0, own_n_k, KEYS):
            j = start + n
            at = (key_head * n_blocks_k + own.k_block0 + j)[None, :] * BLOCK_D + d[:, None]
            k = tl.load(k_pooled + at, mask=(j < own_n_k)[None, :], other=0.0)  # [BLOCK_D, KEYS]
            s = tl.dot(q, k, input_precision="ieee") * scale_log2 + held_share(j, own.Lk)[None, :]
            kinds_row = kinds_of_row(kinds, h, b, i[:, None], n_k)
            may = may_attend(i[:, None], j[None, :], own, kinds_row, CAUSAL=CAUSAL)
            if least is not None:
                alike = tl.load(k_similarity + key_head * n_blocks_k + own.k_block0 + j,
                                mask=j < own_n_k, other=0.0)  # fmt: skip
                may = may & (alike >= tl.load(least + h))[None, :]
            s = tl.where(may, s, float("-inf"))  # [16, KEYS]
            if step == 0:
                best, total = add_scores(s, best, total)
            else:
                shift = tl.where(best == float("-inf"), 0.0, best)
                share = (
                    tl.math.exp2(s - shift[:, None]) / tl.where(total == 0.0, 1.0, total)[:, None]
                )
                tl.store(mass + row[:, None] * n_k + j[None, :], share,
                         mask=here[:, None] & (j < own_n_k)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset"])
def predict_rows(
    q, k, q_pooled, k_pooled, mask, kinds, mass, pack, tiles,
    Lq, Lk, n_q, n_k, n_blocks_k, offset, Hq, group, scale_log2,
    TYPES: tl.constexpr, SAMPLED: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Predictors `"rows"`, and `"blend"` if there are pooled tokens: BLOCKS query blocks, PER_BLOCK
    places in each of which SAMPLED are rows."""
    ROWS: tl.constexpr = BLOCKS * PER_BLOCK
    BLOCK_D: tl.constexpr = TYPES.BLOCK_D
    BLEND: tl.constexpr = q_pooled is not None
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq, first = first_block_of(tiles, tl.program_id(0), BLOCKS)
    own = sequence_of(pack, seq, Lq, Lk, offset)
    h_k = (h // group).to(tl.int64)
    head, key_head = b * Hq + h, b * (Hq // group) + h_k
    place = tl.arange(0, ROWS)
    i = first + place // PER_BLOCK
    n_valid = tl.minimum(own.Lq - i * BLOCK_Q, BLOCK_Q)
    n_rows = tl.maximum(tl.minimum(SAMPLED, n_valid), 1)
    used = (n_valid > 0) & (place % PER_BLOCK < n_rows)
    rows = i * BLOCK_Q + (place % PER_BLOCK + 1) * n_valid // n_rows - 1
    queries = load_rows(q, head * Lq, h, b, own.q_row0, rows, used, scale_log2, TYPES)
    last_key = rows + own.offset
    keys = keys_of_head(k, mask, own, h, h_k, b, key_head * n_blocks_k)

    blocks = first + tl.arange(0, BLOCKS)
    here = blocks * BLOCK_Q < own.Lq
    map_row = head * n_q + own.q_block0 + blocks
    d = tl.arange(0, BLOCK_D)
    kinds_row = kinds_of_row(kinds, h, b, blocks, n_k)
    if BLEND:
        # q_mean [BLOCKS, BLOCK_D]
        q_mean = tl.load(q_pooled + map_row[:, None] * BLOCK_D + d[None, :], mask=here[:, None],
                         other=0.0)  # fmt: skip
    mean_best = tl.full([BLOCKS], float("-inf"), tl.float32)
    mean_total = tl.zeros([BLOCKS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    own_n_k = tl.cdiv(own.Lk, BLOCK_K)
    stop = own_n_k
    if CAUSAL:
        last_row = tl.minimum((first + BLOCKS) * BLOCK_Q, own.Lq) - 1
        stop = causal_stop(last_row, own.offset, own_n_k)
    for j in tl.range(0, stop):
        s = score_rows(queries, last_key, keys, j, TYPES, CAUSAL=CAUSAL, MASK=MASK)
        best, total = add_scores(s, best, total)
        if BLEND:
            k_mean = tl.load(k_pooled + (key_head * n_blocks_k + own.k_block0 + j) * BLOCK_D + d)
            s_mean = tl.sum(q_mean * k_mean[None, :], 1) * scale_log2 + held_share(j, own.Lk)
            may = may_attend(blocks, j, own, kinds_row, CAUSAL=CAUSAL)
            s_mean = tl.where(may, s_mean, float("-inf"))
            mean_best, mean_total = add_scores(s_mean[:, None], mean_best, mean_total)

    shift = tl.where(best == float("-inf"), 0.0, best)
    attends = (total != 0.0).to(tl.float32)  # a NaN row counts, and makes the prediction NaN
    n_attending = tl.sum(tl.reshape(attends, [BLOCKS, PER_BLOCK]), 1)
    share = attends / tl.where(total == 0.0, 1.0, total)
    mean_shift = tl.where(mean_best == float("-inf"), 0.0, mean_best)
    mean_share = 1.0 / tl.where(mean_total == 0.0, 1.0, mean_total)
    for j in tl.range(0, stop):
        s = score_rows(queries, last_key, keys, j, TYPES, CAUSAL=CAUSAL, MASK=MASK)
        mine = tl.sum(tl.math.exp2(s - shift[:, None]), 1) * share
        found = tl.sum(tl.reshape(mine, [BLOCKS, PER_BLOCK]), 1) / tl.maximum(n_attending, 1.0)
        if BLEND:
            k_mean = tl.load(k_pooled + (key_head * n_blocks_k + own.k_block0 + j) * BLOCK_D + d)
            s_mean = tl.sum(q_mean * k_mean[None, :], 1) * scale_log2 + held_share(j, own.Lk)
            may = may_attend(blocks, j, own, kinds_row, CAUSAL=CAUSAL)
            s_mean = tl.where(may, s_mean, float("-inf"))
            found = (found + tl.math.exp2(s_mean - mean_shift) * mean_share) * 0.5
        tl.store(mass + map_row * n_k + j, found, mask=here)
    n = tl.arange(0, BLOCK_K)
    for start in tl.range(stop, own_n_k, BLOCK_K):
        at = mass + map_row[:, None] * n_k + (start + n)[None, :]
        nothing = tl.zeros([BLOCKS, BLOCK_K], tl.float32)
        tl.store(at, nothing, mask=here[:, None] & (start + n < own_n_k)[None, :])


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    """0 where no pair may attend; NaN in a row that is not known."""
    queries, keys = prepared.queries, keys_of(prepared)
    packed = keys.packed
    recipe, device = call.recipe, queries.rows.device
    sizes = sizes_of(call, packed, tokens.offset)
    n_q = sizes.n_q
    mass = torch.empty((call.B, call.Hq, n_q, sizes.n_k), dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "k_pooled": _pooled(keys.pooled, call),
        "q_pooled": _pooled(queries.pooled, call),
        "kinds": kinds_under(tokens),
        "mass": mass,
        "pack": packed.of_queries,
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
            predict_means,
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
        predict_rows,
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
