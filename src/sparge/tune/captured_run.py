"""Run a recipe on the kept query blocks of a capture, with the kernels that will run it later.

Each block is planned and attended at its own place in the sequence, against all keys, so the
output is that of the whole call for these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends.dense import attend_dense
from ..call import Call, work_dtype
from ..check import check_call
from ..dispatch import AUTO, Backend, choose, get_backend
from ..geometry import n_blocks
from ..recipe import Recipe
from ..stages import Prepared
from ..support.autocast import without_autocast
from ..tokenmask import TokenMask
from .capture import Capture


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
    return get_backend(choose(_call_of(capture, recipe), name, dense_ok=False).backend)


def _call_of(capture: Capture, recipe: Recipe, i: int | None = None) -> Call:
    """The call of all kept blocks, or of one at its place in the sequence."""
    tokens = capture.tokens(0 if i is None else i)
    rows = slice(None) if i is None else capture.rows(i)
    return check_call(
        capture.query[:, :, rows],
        capture.key,
        capture.value,
        is_causal=capture.is_causal,
        offset=tokens.offset,
        scale=capture.scale,
        enable_gqa=True,
        recipe=recipe,
    )


def prepare_capture(capture: Capture, recipe: Recipe, backend: Backend) -> Prepared:
    """One pass over the keys for all kept blocks."""
    tensors = (capture.query, capture.key, capture.value)
    call = _call_of(capture, recipe)
    return backend.stages().prepare(call, *tensors, to_plan=True, to_attend=True)


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


def masked(scores: Tensor, tokens: TokenMask, h: int) -> Tensor:
    """Scores of a block's rows with the first keys, bias added, -inf where not allowed."""
    cols = slice(0, scores.shape[1])
    allowed, bias = tokens.region(0, h, slice(0, tokens.Lq), cols, scores.device)
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    return scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)


def keys_seen(tokens: TokenMask) -> int:
    """Keys up to the last that the diagonal shows to any row; at least one."""
    if not tokens.is_causal:
        return tokens.Lk
    return max(1, min(tokens.Lk, tokens.offset + tokens.Lq))


def run_captured(capture: Capture, recipe: Recipe, exact: Tensor, *, backend: Backend) -> Measured:
    """Run a recipe on every kept block; errors are relative L1 over all kept rows of a head."""
    Hq, device = capture.Hq, capture.query.device
    sums = torch.zeros((6, Hq), dtype=torch.float64, device=device)
    wrong, right, kept, allowed, pv_skips, pv_groups = sums.unbind()
    with torch.no_grad(), without_autocast(device.type):
        stages, whole = backend.stages(), prepare_capture(capture, recipe, backend)
        for i in range(len(capture.starts)):
            tokens, rows = capture.tokens(i), capture.rows(i)
            prepared, call = whole.query_blocks(i, i + 1), _call_of(capture, recipe, i)
            mass = stages.predict(call, prepared, tokens) if call.predicts else None
            plan = stages.select(call, prepared, mass, tokens)
            done = stages.attend(call, prepared, plan, tokens)
            truth = exact[:, rows].double()
            wrong += (done.out[0].double() - truth).abs().sum((1, 2))
            right += truth.abs().sum((1, 2))
            kept += plan.counts[0].sum(-1)
            allowed += plan.allowed[0].sum(-1)
            pv_skips += done.pv_skips[0].sum(-1)
            pv_groups += plan.counts[0].sum(-1) * n_blocks(tokens.Lq, backend.row_group)
    error = torch.where(wrong == 0, 0.0, wrong / right)
    return Measured(error, kept, allowed, pv_skips, pv_groups)
