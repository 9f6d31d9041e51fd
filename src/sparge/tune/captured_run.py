"""Run a recipe on the kept query blocks of a capture, with the kernels that will run it later.

Each block is planned and attended at its own place in the sequence, against all keys, so the
output is that of the whole call for these rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attend import attend
from ..backends.dense import attend_dense
from ..blockplan import BlockPlan
from ..call import Call, work_dtype
from ..dispatch.choose import AUTO, Backend, choose, get_backend, host
from ..geometry import ROW_GROUP, n_blocks
from ..plan import make_plan
from ..qtensor import Operands, QTensor
from ..quantize import quantize
from ..recipe import Recipe
from ..support.autocast import without_autocast
from .capture import Capture, Placed


@dataclass(frozen=True)
class Measured:
    """Error and counts of a recipe on one capture, one number for each query head, fp64 `[Hq]`."""

    error: Tensor
    kept: Tensor
    allowed: Tensor
    pv_skips: Tensor
    pv_groups: Tensor


def backend_for(capture: Capture, recipe: Recipe, name: str = AUTO) -> Backend:
    """The backend that runs a capture sparse; dense attention has nothing to tune."""
    B, Hq, rows, D = capture.query.shape
    call = Call(
        B=B,
        Hq=Hq,
        Hk=capture.key.shape[1],
        Lq=rows,
        Lk=capture.key.shape[2],
        D=D,
        Dv=capture.value.shape[3],
        dtype=capture.query.dtype,
        device=capture.query.device.type,
        scale=capture.scale,
        recipe=recipe,
        is_causal=capture.is_causal,
        has_mask=capture.attn_mask is not None,
    )
    return get_backend(choose(host(), call, name, dense_ok=False).backend)


def exact_output(capture: Capture) -> Tensor:
    """Dense attention of the kept rows, `[Hq, rows, Dv]`, fp32 (fp64 for fp64)."""
    work = work_dtype(capture.query.dtype)
    query, key, value = (x.to(work) for x in (capture.query, capture.key, capture.value))
    parts = []
    with torch.no_grad(), without_autocast(query.device.type):
        for i in range(len(capture.starts)):
            tokens = capture.tokens(i)
            stop, mask = keys_seen(tokens), tokens.attn_mask
            if mask is not None and mask.shape[3] > 1:
                mask = mask[..., :stop]
            q, k, v = query[:, :, capture.rows(i)], key[:, :, :stop], value[:, :, :stop]
            seen = replace(tokens, Lk=stop, attn_mask=mask)
            parts.append(attend_dense(q, k, v, seen, scale=capture.scale, need_lse=False)[0][0])
    return torch.cat(parts, 1)


def masked(scores: Tensor, tokens: Placed, h: int) -> Tensor:
    """Scores of a block's rows with the first keys, bias added, -inf where not allowed."""
    cols = slice(0, scores.shape[1])
    allowed, bias = tokens.region(0, h, slice(0, tokens.Lq), cols, scores.device)
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    return scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)


def keys_seen(tokens: Placed) -> int:
    """Keys up to the last that the diagonal shows to any row; at least one."""
    if not tokens.is_causal:
        return tokens.Lk
    return max(1, min(tokens.Lk, tokens.offset + tokens.Lq))


def run_captured(
    capture: Capture,
    recipe: Recipe,
    exact: Tensor,
    *,
    backend: Backend,
) -> Measured:
    """Run a recipe on every kept block; errors are relative L1 over all kept rows of a head."""
    Hq, device = capture.Hq, capture.query.device
    sums = torch.zeros((6, Hq), dtype=torch.float64, device=device)
    wrong, right, kept, allowed, pv_skips, pv_groups = sums.unbind()
    with torch.no_grad(), without_autocast(device.type):
        for i, (operands, plan) in enumerate(_planned(capture, recipe, backend)):
            tokens, rows = capture.tokens(i), capture.rows(i)
            done = attend(
                operands,
                plan,
                tokens,
                scale=capture.scale,
                recipe=recipe,
                dtype=capture.query.dtype,
                backend=backend,
            )
            truth = exact[:, rows].double()
            wrong += (done.out[0].double() - truth).abs().sum((1, 2))
            right += truth.abs().sum((1, 2))
            kept += plan.counts[0].sum(-1)
            allowed += plan.allowed[0].sum(-1)
            pv_skips += done.pv_skips[0].sum(-1)
            pv_groups += plan.counts[0].sum(-1) * n_blocks(tokens.Lq, ROW_GROUP)
    error = torch.where(wrong == 0, 0.0, wrong / right)
    return Measured(error, kept, allowed, pv_skips, pv_groups)


def _planned(
    capture: Capture, recipe: Recipe, backend: Backend
) -> Iterator[tuple[Operands, BlockPlan]]:
    tensors = (capture.query, capture.key, capture.value)
    scale, n = capture.scale, len(capture.starts)
    if not backend.shares_statistics:
        for i in range(n):
            query = capture.query[:, :, capture.rows(i)].contiguous()
            yield (
                quantize(
                    query, *tensors[1:], scale=scale, precision=recipe.precision, backend=backend
                ),
                make_plan(
                    query,
                    capture.key,
                    capture.tokens(i),
                    block_mask=None,
                    scale=scale,
                    recipe=recipe,
                    backend=backend,
                ),
            )
        return
    # One pass over the keys serves all blocks; what belongs to a block of queries is cut out.
    operands, statistics = backend.stage("quantize").prepare(*tensors, scale=scale, recipe=recipe)
    for i in range(n):
        rows, shift = capture.rows(i), operands.lse_shift
        lse_shift = None if shift is None else shift[:, :, rows].contiguous()
        own = {
            name: None if x is None else x[:, :, i : i + 1].contiguous()
            for name in ("q_pooled", "q_similarity")
            for x in (getattr(statistics, name),)
        }
        block = replace(operands, query=_query_rows(operands.query, rows), lse_shift=lse_shift)
        plan = backend.stage("plan").plan_from(
            block, replace(statistics, **own), capture.tokens(i), scale=scale, recipe=recipe
        )
        yield block, plan


def _query_rows(x: Tensor | QTensor, rows: slice) -> Tensor | QTensor:
    if not isinstance(x, QTensor):
        return x[:, :, rows].contiguous()
    assert x.rows_per_scale == 1
    return QTensor(x.codes[:, :, rows].contiguous(), x.scale[:, :, rows].contiguous())
