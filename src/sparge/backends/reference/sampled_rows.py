"""The `"rows"` half of prediction: a few rows of each query block are scored exactly.

    P̂[i, j] = mean over the sampled rows r of block i of  Σ_{k in block j} softmax_k(s[r, k])

in the run's own precision, with the token mask and its bias.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...support.ordered_sums import fold_sum
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


def _each_block(call: Call) -> list[tuple[int, int, int]]:
    return list(itertools.product(range(call.B), range(call.Hq), range(call.n_q)))


def _sample(i_q: int, call: Call, device: torch.device) -> Tensor:
    rows = block_range(i_q, BLOCK_Q, call.Lq)
    within = sampled_rows(rows.stop - rows.start, call.recipe.sample_rows)
    return rows.start + torch.tensor(within).to(device)
