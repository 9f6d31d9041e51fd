"""Gradient of the unquantized precisions; the plan and the skipped row groups are constants.

p  = softmax(s) over the kept keys, less the skipped groups
dv = pᵀ · do
ds = p ∘ (do · vᵀ - delta),  delta = rowsum(do ∘ out) - dlse
dq = scale · ds · k,  dk = scale · dsᵀ · q
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...support.ordered_sums import exp2, shift_of
from ...values.blockplan import BlockPlan
from ...values.call import Call, work_dtype
from ...values.geometry import BLOCK_Q, block_range
from ...values.qtensor import Operands, working
from ...values.recipe import heads_of
from ...values.stages import Gradients, Saved
from ...values.tokenmask import Index, TokenMask
from .attend import Tile, kept_blocks, walk
from .scores import HeadScores


def backward(call: Call, saved: Saved, plan: BlockPlan, tokens: TokenMask) -> Gradients:
    """Derivatives of what the precision computes with: `"half"` rounds q, k and v, and the
    rounding itself is passed straight through."""
    work, precision = work_dtype(call.dtype), call.recipe.precision
    operands = Operands(saved.query, saved.key, saved.value)
    q, k, v = (working(x, precision).to(work) for x in (saved.query, saved.key, saved.value))
    do, o = saved.grad_out.to(work), saved.out.to(work)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (do * o).sum(-1) - saved.grad_lse.to(work)
    pv_skip = heads_of(call.recipe.pv_skip, call.Hq, none=math.inf)
    for b, h, i_q, kept in kept_blocks(plan):
        rows = block_range(i_q, BLOCK_Q, tokens.Lq)
        head = HeadScores(operands, tokens, b, h, scale=call.scale, precision=precision)
        h_k = head.h_k
        for cols, p in _probabilities(list(walk(head, rows, kept, pv_skip[h])), work):
            dv[b, h_k, cols] += p.T @ do[b, h, rows]
            dp = do[b, h, rows] @ v[b, h_k, cols].T
            ds = p * (dp - delta[b, h, rows, None]) * call.scale
            dq[b, h, rows] += ds @ k[b, h_k, cols]
            dk[b, h_k, cols] += ds.T @ q[b, h, rows]
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


def _probabilities(tiles: list[Tile], work: torch.dtype) -> Iterator[tuple[Index, Tensor]]:
    """What the forward gave each block. Made anew from the scores: an LSE under a bias as low as
    finfo.min has lost the digits that tell a row's keys apart."""
    if not tiles:
        return
    shift = shift_of(tiles[-1].row_max)[:, None]
    weights = [
        exp2(tile.scores - shift).masked_fill(tile.skip[:, None], 0.0).to(work) for tile in tiles
    ]
    row_sum = torch.stack([w.sum(1) for w in weights]).sum(0)[:, None]
    for tile, weight in zip(tiles, weights, strict=True):
        yield tile.cols, torch.where(row_sum == 0, 0.0, weight / row_sum)
