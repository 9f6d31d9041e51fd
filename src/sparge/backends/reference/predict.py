"""Predict the attention mass of every block.

P̂[i, j] ≈ mass that query block i gives to key block j        [B, Hq, n_q, n_k], fp32
  mean   softmax_j(scale · q̄_i · k̄_j + log(n_j / BLOCK_K)), without the columns of key blocks
         that are not self-similar
  rows   exact mass, averaged over a few rows of the query block (sampled_rows.py)
  blend  the average of both, without the similarity test
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...support.ordered_sums import LOG2E, dot, exp2, fold_sum, shift_of
from ...values.call import Call
from ...values.geometry import BLOCK_K, block_sizes
from ...values.stages import Prepared
from ...values.tokenmask import EXCLUDED, TokenMask
from .sampled_rows import predict_rows
from .similarity import untrusted_keys


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    recipe, found = call.recipe, prepared.statistics
    shape = (call.B, call.Hq, call.n_q, call.n_k)
    may = (tokens.block_kinds(prepared.operands.query.device) != EXCLUDED).expand(shape)
    if recipe.predictor == "rows":
        return predict_rows(call, prepared.operands, tokens)
    assert found.q_pooled is not None
    assert found.k_pooled is not None
    trusted = may
    if recipe.min_similarity is not None:
        trusted = may & ~untrusted_keys(call, found)[..., None, :]
    mean = predict_mean(found.q_pooled, found.k_pooled, trusted, Lk=call.Lk, scale=call.scale)
    if recipe.predictor == "mean":
        return mean
    return (mean + predict_rows(call, prepared.operands, tokens)) * 0.5


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


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension; a row of -inf gives zeros."""
    weights = exp2((scores - shift_of(scores.amax(-1, keepdim=True))) * LOG2E)
    row_sum = fold_sum(weights, dim=-1).unsqueeze(-1)
    return torch.where(row_sum == 0, 0.0, weights / row_sum)
