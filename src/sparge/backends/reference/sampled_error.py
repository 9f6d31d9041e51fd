"""The error of a kept set on the sampled rows of every query block; `sparge.sampled_error`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call, Inputs
from ...values.geometry import BLOCK_K, BLOCK_Q, block_range, sampled_rows
from ...values.qtensor import QTensor
from ...values.tokenmask import TokenMask
from .prepare import quantize_rows, smooth_keys
from .scores import HeadScores


def sampled_error(call: Call, inputs: Inputs, plan: BlockPlan, tokens: TokenMask) -> Tensor:
    """Relative L1 of each head `[B, Hq]`: sampled rows over the kept blocks against all blocks."""
    query: Tensor | QTensor = inputs.query
    key: Tensor | QTensor = inputs.key
    if call.recipe.quantized:
        query, key = quantize_rows(inputs.query.float()), quantize_rows(smooth_keys(inputs.key))
    value = inputs.value
    assert value is not None
    kept, precision = plan.to_mask(), call.recipe.precision
    wrong = torch.zeros((2, call.B, call.Hq), dtype=torch.float64, device=value.device)
    for b, h, i_q in itertools.product(range(call.B), range(call.Hq), range(call.n_q)):
        block = block_range(i_q, BLOCK_Q, call.Lq)
        within = sampled_rows(block.stop - block.start, call.recipe.sample_rows)
        rows = block.start + torch.tensor(within).to(value.device)
        head = HeadScores(query, key, tokens, b, h, scale=call.scale, precision=precision)
        weights, v = head.weights(rows).double(), value[b, head.h_k].double()
        open_keys = kept[b, h, i_q].repeat_interleave(BLOCK_K)[: call.Lk]
        dense, sparse = _average(weights, v), _average(weights * open_keys, v)
        wrong[0, b, h] += (sparse - dense).abs().sum()
        wrong[1, b, h] += dense.abs().sum()
    return torch.where(wrong[0] == 0, 0.0, wrong[0] / wrong[1]).float()


def _average(weights: Tensor, v: Tensor) -> Tensor:
    row_sum = weights.sum(1, keepdim=True)
    return torch.where(row_sum == 0, 0.0, (weights @ v) / row_sum)
