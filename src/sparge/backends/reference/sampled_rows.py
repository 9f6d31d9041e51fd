"""The `"rows"` half of prediction: a few rows of each query block are scored exactly.

    P̂[i, j] = mean over the sampled rows r of block i of  Σ_{k in block j} softmax_k(s[r, k])

in the run's own precision, with the token mask and its bias. The same rows, finished with V,
measure the error of a kept set; other rows do for `KeepError` (budget.py).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...support.ordered_sums import fold_sum
from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.geometry import BLOCK_K, BLOCK_Q, block_range, in_blocks, sampled_rows
from ...values.qtensor import Operands
from ...values.tokenmask import TokenMask
from .checked_rows import row_weights


def predict_rows(call: Call, operands: Operands, tokens: TokenMask) -> Tensor:
    """`[B, Hq, n_q, n_k]` fp32; zeros where no sampled row attends anything."""
    shape = (call.B, call.Hq, call.n_q, call.n_k)
    out = torch.zeros(shape, dtype=torch.float32, device=operands.query.device)
    for b, h, i_q in _each_block(call):
        rows = _sample(i_q, call, out.device)
        weights = row_weights(call, operands, tokens, b, h, rows)
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
        weights = row_weights(call, operands, tokens, b, h, rows).double()
        v = value[b, h * call.Hk // call.Hq].double()
        open_keys = kept[b, h, i_q].repeat_interleave(BLOCK_K)[: call.Lk]
        dense, sparse = _average(weights, v), _average(weights * open_keys, v)
        wrong[0, b, h] += (sparse - dense).abs().sum()
        wrong[1, b, h] += dense.abs().sum()
    return torch.where(wrong[0] == 0, 0.0, wrong[0] / wrong[1]).float()


def _each_block(call: Call) -> list[tuple[int, int, int]]:
    return list(itertools.product(range(call.B), range(call.Hq), range(call.n_q)))


def _sample(i_q: int, call: Call, device: torch.device) -> Tensor:
    rows = block_range(i_q, BLOCK_Q, call.Lq)
    within = sampled_rows(rows.stop - rows.start, call.recipe.sample_rows)
    return rows.start + torch.tensor(within).to(device)


def _average(weights: Tensor, v: Tensor) -> Tensor:
    row_sum = weights.sum(1, keepdim=True)
    return torch.where(row_sum == 0, 0.0, (weights @ v) / row_sum)
