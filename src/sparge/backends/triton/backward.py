"""Gradient of the unquantized precisions, composed of torch's own operations.

    p  = softmax(s) over the kept keys, less the skipped row groups; both are constants
    dv = pᵀ · do
    ds = p ∘ (do · vᵀ - delta),  delta = rowsum(do ∘ out) - dlse
    dq = scale · ds · k,  dk = scale · dsᵀ · q

One query block of the heads that share a key head at a time. Scores of all keys are computed and
the skipped blocks masked, so that nothing is read back to the host: it costs as much as dense
attention and needs no more memory than 128 rows of scores of each head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import BLOCK_K, BLOCK_Q, ROW_GROUP, Call, block_range, in_blocks
from ...values.recipe import heads_of
from ...values.stages import Gradients, Saved, working
from ...values.tokenmask import TokenMask


def backward(call: Call, saved: Saved, plan: BlockPlan, tokens: TokenMask) -> Gradients:
    """Derivatives of what the precision computes with: `"half"` rounds q, k and v, and the
    rounding itself is passed straight through."""
    precision, group = call.recipe.precision, call.Hq // call.Hk
    q, k, v = (working(x, precision) for x in (saved.query, saved.key, saved.value))
    do, o = saved.grad_out.float(), saved.out.float()
    delta = (do * o).sum(-1) - saved.grad_lse.float()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kept, pv_skip = plan.to_mask(), heads_of(call.recipe.pv_skip, call.Hq, none=math.inf)
    for b in range(call.B):
        for h_k in range(call.Hk):
            heads = slice(h_k * group, (h_k + 1) * group)
            for i_q in range(call.n_q):
                mine = (b, heads, block_range(i_q, BLOCK_Q, call.Lq))
                scores = _scores(call, q[mine], k[b, h_k], mine, kept[b, heads, i_q], tokens)
                p = _probabilities(scores, pv_skip[heads])
                dv[b, h_k] += torch.einsum("hrk,hrd->kd", p, do[mine])
                dp = do[mine] @ v[b, h_k].T
                ds = p * (dp - delta[mine].unsqueeze(-1)) * call.scale
                dq[mine] = ds @ k[b, h_k]
                dk[b, h_k] += torch.einsum("hrk,hrd->kd", ds, q[mine])
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


def _scores(
    call: Call,
    q: Tensor,
    k: Tensor,
    mine: tuple[int, slice, slice],
    kept: Tensor,
    tokens: TokenMask,
) -> Tensor:
    """Natural-log scores `[heads, rows, Lk]`, -inf where masked or skipped. mine: the batch entry,
    query heads and rows of q."""
    s = q @ k.T * call.scale
    open_keys = kept.repeat_interleave(BLOCK_K, -1)[:, None, : call.Lk]
    b, heads, rows = mine
    for at, h in enumerate(range(heads.start, heads.stop)):
        allowed, bias = tokens.region(b, h, rows, slice(None), s.device)
        if bias is not None:
            s[at] = (s[at] + bias.float()).clamp(min=torch.finfo(torch.float32).min)
        if allowed is not None:
            s[at] = s[at].masked_fill(~allowed, -math.inf)
    return s.masked_fill(~open_keys, -math.inf)


def _probabilities(scores: Tensor, pv_skip: list[float]) -> Tensor:
    """What the forward gave each key; zeros in row groups that the second filter skipped."""
    row_max = scores.amax(-1, keepdim=True)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    p = torch.exp(scores - shift)
    if min(pv_skip) < math.inf:
        block_max = in_blocks(scores, -1, BLOCK_K, fill=-math.inf).amax(-1)
        running = block_max.cummax(-1).values
        before = torch.cat([torch.full_like(running[..., :1], -math.inf), running[..., :-1]], -1)
        least = scores.new_tensor(pv_skip)[:, None, None]
        low = (before - block_max >= least) & (least < math.inf)
        groups = in_blocks(low, -2, ROW_GROUP, fill=True).all(-2)
        dead = groups.repeat_interleave(ROW_GROUP, -2)[:, : scores.shape[1]]
        p = p.masked_fill(dead.repeat_interleave(BLOCK_K, -1)[..., : scores.shape[2]], 0.0)
    row_sum = p.sum(-1, keepdim=True)
    return torch.where(row_sum == 0, 0.0, p / row_sum)
