"""Predict the attention mass of every block.

P̂[i, j] ≈ mass that query block i gives to key block j        [B, Hq, n_q, n_k], fp32
  mean   softmax_j(scale · q̄_i · k̄_j + log(n_j / BLOCK_K)), without the columns of key blocks
         that are not self-similar
  rows   exact mass, averaged over the sampled rows r of the query block:
         mean_r Σ_{k in block j} softmax_k(s[r, k]), in the precision of the run, masked and biased
  blend  the average of both, without the similarity test
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ...support.ordered_sums import LOG2E, dot, exp2, fold_sum, shift_of
from ...values.call import BLOCK_K, BLOCK_Q, Call, block_range, block_sizes, in_blocks, sampled_rows
from ...values.stages import Prepared
from ...values.tokenmask import EXCLUDED, TokenMask
from .scores import HeadScores
from .similarity import untrusted


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    recipe, queries, keys = call.recipe, prepared.queries, prepared.keys
    shape = (call.B, call.Hq, call.n_q, call.n_k)
    may = (tokens.block_kinds(queries.rows.device) != EXCLUDED).expand(shape)
    if recipe.predictor == "rows":
        return predict_rows(call, prepared, tokens)
    assert queries.pooled is not None
    assert keys.pooled is not None
    trusted = may
    if recipe.min_similarity is not None:
        trusted = may & ~untrusted(call, keys.similarity)[..., None, :]
    mean = predict_mean(queries.pooled, keys.pooled, trusted, Lk=call.Lk, scale=call.scale)
    if recipe.predictor == "mean":
        return mean
    return (mean + predict_rows(call, prepared, tokens)) * 0.5


def predict_mean(
    q_pooled: Tensor, k_pooled: Tensor, trusted: Tensor, *, Lk: int, scale: float
) -> Tensor:
    """Softmax of the compressed scores over the trusted blocks; zeros where there are none."""
    B, Hq = q_pooled.shape[:2]
    held = torch.log(block_sizes(Lk, BLOCK_K, q_pooled.device).double() / BLOCK_K).float()
    out = q_pooled.new_empty(trusted.shape)
    for b in range(B):
        for h in range(Hq):
            pooled = k_pooled[b, h * k_pooled.shape[1] // Hq]
            scores = dot(q_pooled[b, h], pooled) * scale + held
            out[b, h] = softmax(scores.masked_fill(~trusted[b, h], -math.inf))
    return out


def predict_rows(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    """`[B, Hq, n_q, n_k]` fp32; zeros where no sampled row attends anything."""
    query, key = prepared.queries.rows, prepared.keys.key
    shape = (call.B, call.Hq, call.n_q, call.n_k)
    out = torch.zeros(shape, dtype=torch.float32, device=query.device)
    for b, h, i_q in itertools.product(range(call.B), range(call.Hq), range(call.n_q)):
        block = block_range(i_q, BLOCK_Q, call.Lq)
        within = sampled_rows(block.stop - block.start, call.recipe.sample_rows)
        rows = block.start + torch.tensor(within).to(out.device)
        weights = HeadScores(call, query, key, tokens, b, h).weights(rows)
        by_block = fold_sum(in_blocks(weights, -1, BLOCK_K), dim=-1)
        row_sum = fold_sum(by_block, dim=-1).unsqueeze(-1)
        attends = row_sum != 0  # a NaN row counts, and makes the whole prediction NaN
        mass = torch.where(attends, by_block / row_sum, 0.0)
        n_attending = int(attends.sum())
        if n_attending:
            out[b, h, i_q] = (fold_sum(mass, dim=0) / n_attending).float()
    return out


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension; a row of -inf gives zeros."""
    weights = exp2((scores - shift_of(scores.amax(-1, keepdim=True))) * LOG2E)
    row_sum = fold_sum(weights, dim=-1).unsqueeze(-1)
    return torch.where(row_sum == 0, 0.0, weights / row_sum)
