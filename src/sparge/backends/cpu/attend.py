"""Attention over the kept blocks in the native core (csrc/attend.h), and its gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.recipe import PRECISIONS, Recipe, heads_of
from ...values.stages import Attended, Gradients, Prepared, Saved, working
from ...values.tokenmask import TokenMask
from . import library
from .library import parts_of, pooled_parts, scored_parts, token_parts


def attend(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    queries, keys = prepared.queries, prepared.keys
    q, k, *scales = scored_parts(prepared)
    v, v_scale = parts_of(keys.value)
    out = q.new_empty((call.B, call.Hq, call.Lq, call.Dv), dtype=call.dtype)
    lse = q.new_empty((call.B, call.Hq, call.Lq), dtype=torch.float32)
    pv_skips = torch.empty_like(plan.counts)
    library.ops().attend(
        q,
        k,
        v,
        *scales,
        v_scale,
        *pooled_parts(keys.entries),
        queries.lse_shift,
        pv_skip_of(call.recipe, call.Hq),
        plan.counts.contiguous(),
        plan.indices.contiguous(),
        *token_parts(tokens),
        PRECISIONS.index(call.recipe.precision),
        call.scale,
        out,
        lse,
        pv_skips,
        library.isa_number(),
    )
    return Attended(out, lse, pv_skips)


def backward(call: Call, saved: Saved, plan: BlockPlan, tokens: TokenMask) -> Gradients:
    """Summed in fp32, returned in the caller's dtypes."""
    inputs = [saved.query, saved.key, saved.value]
    if call.recipe.precision == "half" and call.dtype == torch.float32:
        inputs = [working(x, "half") for x in inputs]
    delta = (saved.grad_out.float() * saved.out.float()).sum(-1) - saved.grad_lse.float()
    grads = [torch.empty(x.shape, dtype=torch.float32) for x in inputs]
    library.ops().backward(
        *inputs,
        saved.grad_out,
        delta.contiguous(),
        pv_skip_of(call.recipe, call.Hq),
        plan.counts.contiguous(),
        plan.indices.contiguous(),
        *token_parts(tokens),
        call.scale,
        *grads,
        library.isa_number(),
    )
    dq, dk, dv = (grad.to(call.dtype) for grad in grads)
    return dq, dk, dv


def pv_skip_of(recipe: Recipe, Hq: int) -> Tensor | None:
    if recipe.pv_skip is None:
        return None
    return torch.tensor(heads_of(recipe.pv_skip, Hq, none=math.inf), dtype=torch.float32)
