"""What `KeepError` measures, row by row, for the rules of rules/error_budget.py: distances of
queries from the mean of their block, the mass that each step drops from a row, the error of each
step.

    dropped[r, s]   = mass of the blocks that step s drops / mass of all blocks
    skipping[r, s]  = |out over the kept blocks - out over all|, both as computed, at measured steps
    total[r, s]     = |out over the kept blocks, as computed - out over all, exactly|

As computed: scores of the call's precision, and P and V rounded as `attend` rounds them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...rules.error_budget import MEASURED_STEPS, N_STEPS
from ...support.ordered_sums import LOG2E, exp2, fold_sum, mean_over_rows
from ...values.call import BLOCK_K, BLOCK_Q, Call, block_sizes, half_dtype, in_blocks
from ...values.stages import Prepared, PreparedKeys, PreparedQueries, QTensor, working
from ...values.tokenmask import OPEN, TokenMask
from .scores import HeadScores

Shares = tuple[Tensor, Tensor]
"""Of each row and block: weights · V `[rows, n_k, Dv]`, and weights `[rows, n_k]`."""


def deviations(query: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance of each query from the mean of its block `[B, Hq, Lq]`, and the sum of the
    squares of each block's queries `[B, Hq, n_q]`; fp32."""
    x = query.float()
    blocks = in_blocks(x, -2, BLOCK_Q)
    sizes = in_blocks(torch.ones(x.shape[2], device=x.device), -1, BLOCK_Q).sum(-1)
    mean = mean_over_rows(blocks, sizes)
    off = fold_sum((blocks - mean.unsqueeze(-2)).square(), dim=-1)
    energy = fold_sum(fold_sum(blocks.square(), dim=-1), dim=-1)
    return off.flatten(2)[:, :, : x.shape[2]], energy


def dropped_masses(
    call: Call, prepared: Prepared, first: Tensor, tokens: TokenMask, rows: Tensor
) -> Tensor:
    """`[B, Hq, n, steps]` fp32 of rows `[B, Hq, n]`, 0 for those that are -1. `first [B, Hq, n_q,
    n_k]` is the first step that keeps each block; -1 where no pair may attend."""
    out = torch.zeros((*rows.shape, N_STEPS), dtype=torch.float32, device=rows.device)
    for b, h, some in _heads(rows):
        query, key = prepared.queries.rows, prepared.keys.key
        weights = HeadScores(call, query, key, tokens, b, h).weights(rows[b, h, some])
        by_block = fold_sum(in_blocks(weights, -1, BLOCK_K), dim=-1)
        row_sum = fold_sum(by_block, dim=-1).unsqueeze(-1)
        steps = first[b, h, rows[b, h, some] // BLOCK_Q]
        missing = [
            fold_sum(torch.where(steps > step, by_block, 0.0), dim=-1) for step in range(N_STEPS)
        ]
        out[b, h, some] = torch.where(row_sum == 0, 0.0, torch.stack(missing, -1) / row_sum)
    return out


def step_errors(
    call: Call, prepared: Prepared, first: Tensor, tokens: TokenMask, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`(skipping [B, Hq, m, measured steps], total [B, Hq, m, the same + 1], whole [B, Hq, m])` of
    rows `[B, Hq, m]`, fp64."""
    shape, device = rows.shape, rows.device
    skipping = torch.zeros((*shape, len(MEASURED_STEPS)), dtype=torch.float64, device=device)
    total = torch.zeros((*shape, len(MEASURED_STEPS) + 1), dtype=torch.float64, device=device)
    whole = torch.zeros(shape, dtype=torch.float64, device=device)
    query, key, value = prepared.queries.own, prepared.keys.own_key, prepared.keys.own_value
    assert query is not None
    assert key is not None
    assert value is not None
    own = Prepared(PreparedQueries(query), PreparedKeys(key, value))
    exactly = replace(call, recipe=replace(call.recipe, precision="exact"))
    for b, h, some in _heads(rows):
        at = rows[b, h, some]
        steps = first[b, h, at // BLOCK_Q]
        outs = _outputs(call, prepared, tokens, b, h, at, steps)
        exact = outs[-1]
        if call.rounds:
            exact = _outputs(exactly, own, tokens, b, h, at, None)[-1]
        skipping[b, h] = (outs[:-1] - outs[-1]).abs().sum(-1).T
        total[b, h] = (outs - exact).abs().sum(-1).T
        whole[b, h] = exact.abs().sum(-1)
    return skipping, total, whole


def _outputs(
    call: Call,
    prepared: Prepared,
    tokens: TokenMask,
    b: int,
    h: int,
    rows: Tensor,
    steps: Tensor | None,
) -> Tensor:
    """Outputs over the blocks of measured steps, `[steps + 1, rows, Dv]` fp64, everything last; of
    everything alone without `steps`, the first steps of the blocks of each row."""
    head = HeadScores(call, prepared.queries.rows, prepared.keys.key, tokens, b, h)
    scores, shift = head.over_all_keys(rows)
    shares = _pooled_shares(call, prepared, tokens, b, h, rows, shift)
    p, h_k, value = exp2(scores - shift), head.h_k, prepared.keys.value
    sums = fold_sum(in_blocks(p, -1, BLOCK_K), dim=-1).double()
    if isinstance(value, QTensor):
        v = value.dequantize()[b, h_k].double()
        blocks = in_blocks(p, -1, BLOCK_K)
        scale = blocks.amax(-1, keepdim=True) / 255
        p = (torch.where(scale > 0, blocks / scale, 0.0).round() * scale).flatten(1)[:, : call.Lk]
    else:
        v = value[b, h_k]
        if call.recipe.precision != "exact":
            p, v = p.to(half_dtype(call.dtype)).float(), working(v, "half")
        v = v.double()
    parts = fold_sum(in_blocks(p.double().unsqueeze(-1) * v, -2, BLOCK_K), dim=-2)
    outs = []
    if steps is not None:
        for step in MEASURED_STEPS:
            kept = (steps >= 0) & (steps <= step)
            outs.append(_over_blocks(parts, sums, kept, shares))
    outs.append(_over_blocks(parts, sums, torch.ones_like(sums, dtype=torch.bool)))
    return torch.stack(outs)


def _over_blocks(parts: Tensor, sums: Tensor, kept: Tensor, shares: Shares | None = None) -> Tensor:
    """Outputs of rows over some blocks, from each block's sum of weights · V and of weights; of the
    others, what their pooled entries contribute."""
    pooled_parts, pooled_sums = shares or (parts.new_zeros(()), sums.new_zeros(()))
    row_sum = fold_sum(torch.where(kept, sums, pooled_sums), dim=1).unsqueeze(-1)
    out = fold_sum(torch.where(kept.unsqueeze(-1), parts, pooled_parts), dim=1)
    return torch.where(row_sum == 0, 0.0, out / row_sum)


def _pooled_shares(
    call: Call,
    prepared: Prepared,
    tokens: TokenMask,
    b: int,
    h: int,
    rows: Tensor,
    shift: Tensor,
) -> Shares | None:
    """What each block contributes to each row if it is skipped, fp64; None for nothing. Scores are
    lowered by `shift [r, 1]`, as those of the keys."""
    pooled = prepared.keys.entries
    if pooled is None:
        return None
    device = rows.device
    head = HeadScores(call, prepared.queries.rows, pooled.key, tokens, b, h)
    n = pooled.key.shape[2]
    sizes = block_sizes(call.Lk, pooled.group, device).double()
    scores = head.products(rows, slice(0, n)) * (call.scale * LOG2E)
    # A mean is never far above the largest of its scores: log2(64) at most.
    p = torch.exp2((scores + torch.log2(sizes).to(scores.dtype) - shift).double())
    is_open = (tokens.block_kinds(device) == OPEN).expand(call.B, call.Hq, call.n_q, call.n_k)
    per_block = BLOCK_K // pooled.group
    opens = is_open[b, h, rows // BLOCK_Q]
    v = pooled.value.dequantize() if isinstance(pooled.value, QTensor) else pooled.value
    v = v[b, head.h_k].double()
    parts = fold_sum(in_blocks(p.unsqueeze(-1) * v, -2, per_block), dim=-2)
    sums = fold_sum(in_blocks(p, -1, per_block), dim=-1)
    return torch.where(opens.unsqueeze(-1), parts, 0.0), torch.where(opens, sums, 0.0)


def _heads(rows: Tensor) -> list[tuple[int, int, Tensor]]:
    """Each head with the places of its rows."""
    B, Hq = rows.shape[:2]
    return [(b, h, (rows[b, h] >= 0).nonzero()[:, 0]) for b in range(B) for h in range(Hq)]
