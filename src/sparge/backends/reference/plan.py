"""Predict the attention mass of every block, then keep what matters; said plainly.

    P̂[i, j] ≈ mass that query block i gives to key block j        [B, Hq, n_q, n_k], fp32
      mean   softmax_j(scale · q̄_i · k̄_j + log(n_j / BLOCK_K)), without the columns that the
             similarity judge distrusts
      rows   exact mass, averaged over a few rows of the query block
      blend  the average of both (no judge)
    kept  = the fewest blocks, largest first, whose mass reaches τ; or a fraction of them; or the
            τ of a head is found by measuring what skipping does (budget.py)
          | all of a row or column whose pooled token says nothing | forced blocks

A row whose prediction is not finite keeps every block it may attend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...blockplan import BlockPlan, plan_of
from ...geometry import BLOCK_K, BLOCK_Q, block_sizes, in_blocks
from ...recipe import KeepAll, KeepError, KeepFraction, KeepMass, Recipe, heads_of
from ...support.ordered_sums import LOG2E, dot, exp2, fold_sum, mean_over_rows, prefix_sum, shift_of
from ...tokenmask import EXCLUDED, TokenMask
from ..budget import masses_of, take_step
from ..forced import forced_blocks
from .prepare import smooth_keys
from .sampled_rows import predict_rows, step_errors


@dataclass(frozen=True)
class BlockStatistics:
    """pooled: fp32 mean of the valid rows `[B, H, n, D]`; similarity `[B, H, n]` in [0, 1]."""

    pooled: Tensor
    similarity: Tensor


def make_plan(
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    value: Tensor | None = None,
) -> BlockPlan:
    B, Hq = query.shape[:2]
    may = tokens.block_kinds(query.device) != EXCLUDED
    may = may.expand(B, Hq, *may.shape[2:])
    if isinstance(recipe.keep, KeepAll):
        return plan_of(may, tokens)
    predicted, distrusted = predict(query, key, tokens, may, scale=scale, recipe=recipe)
    unknown = ~torch.isfinite(predicted).all(-1, keepdim=True) | ~(predicted > 0).any(-1, True)
    predicted = predicted.nan_to_num(0.0, 0.0, 0.0)
    forced = unknown | distrusted | forced_blocks(tokens, recipe, query.device)
    if not isinstance(recipe.keep, KeepError):
        return plan_of(select(predicted, may, recipe.keep) | forced, tokens)
    assert value is not None
    first = first_steps(predicted, may, recipe.keep).masked_fill(forced, 0)
    sums = step_errors(query, key, value, first, may, tokens, scale=scale, recipe=recipe)
    step, error = take_step(*sums, recipe.keep)
    return plan_of(first <= step[..., None, None], tokens, error=error)


def predict(
    query: Tensor, key: Tensor, tokens: TokenMask, may: Tensor, *, scale: float, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """`(P̂, blocks that the similarity judge forces on)`, both `[B, Hq, n_q, n_k]`."""
    distrusted = torch.zeros_like(may)
    if recipe.predictor == "rows":
        return predict_rows(query, key, tokens, may, scale=scale, recipe=recipe), distrusted
    smooth, _ = smooth_keys(key)
    of_q, of_k = block_statistics(query, BLOCK_Q), block_statistics(smooth, BLOCK_K)
    trusted = may
    if recipe.min_similarity is not None:
        least = torch.tensor(
            heads_of(recipe.min_similarity, query.shape[1], none=-1.0), device=query.device
        )[:, None]
        group = query.shape[1] // key.shape[1]
        # `not >=` rather than `<`: a block that is not finite is never trusted.
        odd_rows = ~(of_q.similarity >= least)
        odd_columns = ~(of_k.similarity.repeat_interleave(group, dim=1) >= least)
        distrusted = odd_rows[..., :, None] | odd_columns[..., None, :]
        trusted = may & ~odd_columns[..., None, :]
    mean = predict_mean(of_q.pooled, of_k.pooled, trusted, Lk=tokens.Lk, scale=scale)
    if recipe.predictor == "mean":
        return mean, distrusted
    rows = predict_rows(query, key, tokens, may, scale=scale, recipe=recipe)
    return (mean + rows) * 0.5, distrusted


def block_statistics(x: Tensor, block: int) -> BlockStatistics:
    """Statistics of `x [B, H, L, D]`; the self-similarity is the mean of all pairwise cosines."""
    x = x.float()
    sizes = block_sizes(x.shape[2], block, x.device)
    largest = x.abs().amax(-1, keepdim=True)
    # Divided by its largest entry first, so that squares neither overflow nor vanish.
    unit = torch.where(largest == 0, 0.0, x / largest)
    norm = fold_sum(unit * unit, dim=-1).sqrt().unsqueeze(-1)
    unit = torch.where(largest == 0, 0.0, unit / norm)
    mean = mean_over_rows(in_blocks(x, -2, block), sizes)
    mean_unit = mean_over_rows(in_blocks(unit, -2, block), sizes)
    return BlockStatistics(mean, fold_sum(mean_unit * mean_unit, dim=-1))


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


def first_steps(predicted: Tensor, may: Tensor, keep: KeepError) -> Tensor:
    """The first step that keeps a block, int64; each step keeps what those before it do."""
    masses = masses_of(keep, predicted.shape[1])
    kept = [select(predicted, may, KeepMass(step)) for step in zip(*masses, strict=True)]
    return (~torch.stack(kept)).sum(0)


def select(predicted: Tensor, may: Tensor, keep: KeepMass | KeepFraction) -> Tensor:
    """The kept set of every row, largest first, ties to the smaller index."""
    Hq, n_k = predicted.shape[1], predicted.shape[-1]
    # Blocks that may not be attended sort behind every block that may.
    ranked = torch.where(may, predicted, -1.0).sort(dim=-1, descending=True, stable=True)
    if isinstance(keep, KeepFraction):
        fraction = _column(heads_of(keep.fraction, Hq, none=1.0), predicted.device)
        # 0.7 · 10 is a little over 7 in binary; a person means 7.
        needed = torch.ceil(fraction * may.sum(-1).double() - 1e-9)
    else:
        mass = _column(heads_of(keep.mass, Hq, none=1.0), predicted.device)
        # fp64 adds fp32 masses exactly, or nearly so: where equal masses tie, they tie exactly.
        reached = prefix_sum(ranked.values.clamp(min=0.0).double())
        needed = (reached < (mass * reached[..., -1]).unsqueeze(-1)).sum(-1) + 1
        # No mass is nothing, however small: the whole of it takes every block.
        needed = torch.where(mass >= 1.0, n_k, needed)
    rank = torch.arange(n_k, device=predicted.device)
    chosen = rank < needed.unsqueeze(-1)
    return torch.zeros_like(may).scatter(-1, ranked.indices, chosen) & may


def _column(heads: list[float], device: torch.device) -> Tensor:
    return torch.tensor(heads, dtype=torch.float64, device=device)[:, None]
