"""The `"rows"` half of prediction: a few rows of each query block are scored exactly.

    P̂[i, j] = mean over the sampled rows r of block i of  Σ_{k in block j} softmax_k(s[r, k])

in the run's own precision, with the token mask and its bias. The same rows, finished with V,
measure the error of a kept set; other rows do for `KeepError` (budget.py).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...blockplan import BlockPlan
from ...call import Call
from ...geometry import BLOCK_K, BLOCK_Q, block_range, in_blocks, sampled_rows, slices_of
from ...qtensor import Operands
from ...stages import Prepared
from ...support.ordered_sums import exp2, fold_sum, shift_of
from ...tokenmask import TokenMask
from ..budget import FACTORS, checked_rows
from .scores import HeadScores

KEYS_AT_ONCE = 4096


def predict_rows(call: Call, operands: Operands, tokens: TokenMask) -> Tensor:
    """`[B, Hq, n_q, n_k]` fp32; zeros where no sampled row attends anything."""
    shape = (call.B, call.Hq, call.n_q, call.n_k)
    out = torch.zeros(shape, dtype=torch.float32, device=operands.query.device)
    for b, h, i_q in _each_block(call):
        rows = _sample(i_q, call, out.device)
        weights = _row_weights(call, operands, tokens, b, h, rows)
        by_block = fold_sum(in_blocks(weights, -1, BLOCK_K), dim=-1)
        row_sum = fold_sum(by_block, dim=-1).unsqueeze(-1)
        attends = row_sum != 0  # a NaN row counts, and makes the whole prediction NaN
        mass = torch.where(attends, by_block / row_sum, 0.0)
        n_attending = int(attends.sum())
        if n_attending:
            out[b, h, i_q] = (fold_sum(mass, dim=0) / n_attending).float()
    return out


def sampled_error(
    call: Call, operands: Operands, value: Tensor, plan: BlockPlan, tokens: TokenMask
) -> Tensor:
    """Relative L1 of each head `[B, Hq]`: sampled rows over the kept blocks against all blocks."""
    kept = plan.to_mask()
    wrong = torch.zeros((2, call.B, call.Hq), dtype=torch.float64, device=value.device)
    for b, h, i_q in _each_block(call):
        rows = _sample(i_q, call, value.device)
        weights = _row_weights(call, operands, tokens, b, h, rows).double()
        v = value[b, h * call.Hk // call.Hq].double()
        open_keys = kept[b, h, i_q].repeat_interleave(BLOCK_K)[: call.Lk]
        dense, sparse = _average(weights, v), _average(weights * open_keys, v)
        wrong[0, b, h] += (sparse - dense).abs().sum()
        wrong[1, b, h] += dense.abs().sum()
    return torch.where(wrong[0] == 0, 0.0, wrong[0] / wrong[1]).float()


def step_errors(
    call: Call, prepared: Prepared, first: Tensor, may: Tensor, tokens: TokenMask
) -> tuple[Tensor, Tensor]:
    """Sums over the checked rows of |kept - all| `[B, Hq, steps]` and of |all| `[B, Hq]`, fp64.

    `first [B, Hq, n_q, n_k]` is the first step that keeps each block.
    """
    value = prepared.value
    assert value is not None
    B, Hq, device = call.B, call.Hq, value.device
    wrong = torch.zeros((B, Hq, len(FACTORS)), dtype=torch.float64, device=device)
    whole = torch.zeros((B, Hq), dtype=torch.float64, device=device)
    rows = checked_rows(call.Lq, call.recipe.sample_rows)
    for b, h, row in ((b, h, row) for b in range(B) for h in range(Hq) for row in rows):
        at, i_q = torch.tensor([row], device=device), row // BLOCK_Q
        weights = _row_weights(call, prepared.operands, tokens, b, h, at)[0].double()
        v = value[b, h * call.Hk // Hq].double()
        parts = fold_sum(in_blocks(weights.unsqueeze(-1) * v, -2, BLOCK_K), dim=-2)
        sums = fold_sum(in_blocks(weights, -1, BLOCK_K), dim=-1)
        every = _over_blocks(parts, sums, may[b, h, i_q])
        for step in range(len(FACTORS)):
            kept = may[b, h, i_q] & (first[b, h, i_q] <= step)
            wrong[b, h, step] += fold_sum((_over_blocks(parts, sums, kept) - every).abs(), dim=0)
        whole[b, h] += fold_sum(every.abs(), dim=0)
    return wrong, whole


def _over_blocks(parts: Tensor, sums: Tensor, kept: Tensor) -> Tensor:
    """Output of a row over some blocks, from each block's sum of weights · V and of weights."""
    row_sum = fold_sum(torch.where(kept, sums, 0.0), dim=0)
    out = fold_sum(torch.where(kept[:, None], parts, 0.0), dim=0)
    return torch.where(row_sum == 0, 0.0, out / row_sum)


def _each_block(call: Call) -> list[tuple[int, int, int]]:
    return list(itertools.product(range(call.B), range(call.Hq), range(call.n_q)))


def _sample(i_q: int, call: Call, device: torch.device) -> Tensor:
    rows = block_range(i_q, BLOCK_Q, call.Lq)
    within = sampled_rows(rows.stop - rows.start, call.recipe.sample_rows)
    return rows.start + torch.tensor(within).to(device)


def _row_weights(
    call: Call, operands: Operands, tokens: TokenMask, b: int, h: int, rows: Tensor
) -> Tensor:
    """exp(score - row_max) of some rows over all keys `[r, Lk]`; zeros where masked."""
    head = HeadScores(operands, tokens, b, h, scale=call.scale, precision=call.recipe.precision)
    parts = [head.scores(rows, cols) for cols in slices_of(tokens.Lk, KEYS_AT_ONCE)]
    scores = torch.cat(parts, dim=1)
    return exp2(scores - shift_of(scores.amax(1, keepdim=True)))


def _average(weights: Tensor, v: Tensor) -> Tensor:
    row_sum = weights.sum(1, keepdim=True)
    return torch.where(row_sum == 0, 0.0, (weights @ v) / row_sum)
