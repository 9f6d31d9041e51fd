"""The last stage: attention over the blocks of a plan, by attend_kernel.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call, Inputs
from ...values.geometry import BLOCK_K, BLOCK_Q
from ...values.qtensor import QTensor
from ...values.stages import Attended
from ...values.tokenmask import TokenMask
from . import attend_kernel
from .launch import launch
from .masks import is_causal, lists_of, mask_arguments, pools_of
from .one_pass import Prepared
from .operands import key_arguments, n_key_blocks, padded, query_arguments
from .packed import NOT_PACKED, Packed
from .prepare import OnDevice, prepare
from .shapes import LOG2E, block_dim, most_of, per_head, unit_rows, value_dim, within
from .tiles import in_tiles_that_fit, tiles_of

NO_SKIP, ZERO_GROUPS, BRANCH = 0, 1, 2
EVERY_HEAD, NOT_RAISED, RAISED = 0, 1, 2


def attend(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    """Heads that an error budget raised run in the caller's own precision, by a second launch: both
    look at the flags on the device."""
    return in_tiles_that_fit(call, lambda: _attend_all(call, prepared, plan, tokens))


def _attend_all(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    lists = lists_of(plan, tokens, ascending=call.recipe.pv_skip is not None)
    done = _room(call, plan.counts)
    if plan.measured is None or not call.recipe.quantized:
        _attend(call, prepared, plan, tokens, lists, done)
        return _finished(done)
    raised = (plan.measured[2] > 0).any(0).view(call.Hk, -1).any(1).to(torch.uint8)
    _attend(call, prepared, plan, tokens, lists, done, raised, NOT_RAISED)
    own = replace(call, recipe=replace(call.recipe, precision=call.own_precision))
    assert prepared.query is not None
    assert prepared.key is not None
    inputs = Inputs(prepared.query, prepared.key, prepared.value)
    theirs = prepare(own, inputs, to_plan=False, to_attend=True)
    if isinstance(prepared, OnDevice):
        theirs.notes.update(prepared.notes)
    again = replace(_room(own, plan.counts), out=done.out, lse=done.lse)
    _attend(own, theirs, plan, tokens, lists, again, raised, RAISED)
    of_heads = raised.repeat_interleave(call.Hq // call.Hk)[:, None] != 0
    skips = torch.where(of_heads, _finished(again).pv_skips, _finished(done).pv_skips)
    return replace(done, pv_skips=skips)


def _room(call: Call, counts: Tensor) -> Attended:
    """Outputs to be written; skips of the second filter apart for each program of a query block."""
    tiles = tiles_of(call)
    out = counts.new_empty((call.B, call.Hq, call.Lq, call.Dv), dtype=call.dtype)
    lse = counts.new_empty((call.B, call.Hq, call.Lq), dtype=torch.float32)
    return Attended(out, lse, counts.new_empty((*counts.shape, BLOCK_Q // tiles.block_m)))


def _finished(done: Attended) -> Attended:
    skips = done.pv_skips
    skips = skips[..., 0] if skips.shape[-1] == 1 else skips.sum(-1, dtype=torch.int32)
    return Attended(done.out, done.lse, skips)


def _attend(
    call: Call,
    prepared: Prepared,
    plan: BlockPlan,
    tokens: TokenMask,
    lists: dict[str, Any],
    done: Attended,
    raised: Tensor | None = None,
    which: int = EVERY_HEAD,
) -> None:
    attend_lists(
        call, prepared, plan.counts, tokens, lists, _pools(prepared, plan, tokens), done,
        raised=raised, which=which,
    )  # fmt: skip


def attend_lists(
    call: Call,
    prepared: Prepared,
    counts: Tensor,
    tokens: TokenMask,
    lists: dict[str, Any],
    pools: Tensor | None,
    done: Attended,
    *,
    raised: Tensor | None = None,
    which: int = EVERY_HEAD,
) -> None:
    """One launch over the lists of every query block."""
    packed: Packed = getattr(prepared, "packed", NOT_PACKED)
    tiles, recipe = tiles_of(call), call.recipe
    skip, filter_from = NO_SKIP, None
    if recipe.pv_skip is not None:
        skip = BRANCH if tiles.branch else ZERO_GROUPS
        device = counts.device
        filter_from = per_head(recipe.pv_skip, call.Hq, math.inf, LOG2E, torch.float32, device)
    n_q = packed.n_q or call.n_q
    launch(
        attend_kernel.attend_blocks,
        (n_q * (BLOCK_Q // tiles.block_m), call.Hq, call.B),
        tiles.options,
        **query_arguments(call, prepared),
        **key_arguments(call, prepared),
        **_values_by_unit(call, prepared),
        **pooled_arguments(call, prepared, pools),
        out=done.out,
        lse=done.lse,
        lse_shift=prepared.operands.lse_shift,
        counts=counts.contiguous(),
        **lists,
        pv_skips=done.pv_skips,
        pv_skip=filter_from,
        raised=raised,
        **dict(zip(("stride_ob", "stride_oh", "stride_om"), done.out.stride(), strict=False)),
        **mask_arguments(tokens),
        Hq=call.Hq,
        group=call.Hq // call.Hk,
        Lq=call.Lq,
        Lk=call.Lk,
        n_q=n_q,
        n_k=lists["block_lists"].shape[3],
        n_blocks_k=n_key_blocks(call, prepared),
        offset=within(tokens.offset, call.Lq, call.Lk),
        scale_log2=abs(call.scale) * LOG2E,
        BLOCK_M=tiles.block_m,
        ENTRIES=tiles.entries,
        OUT_MOST=most_of(call.dtype),
        NEGATE=call.scale < 0,
        CAUSAL=tokens.is_causal if packed else is_causal(tokens),
        SKIP=skip,
        RAISED=which,
        headroom=_headroom(call, packed),
        **packed.arguments(of="queries"),
    )


def _headroom(call: Call, packed: Packed) -> float:
    """By how many octaves weights are lowered, so that no sum of values overflows fp32; of a pack,
    1 for what its table says of each sequence. Sums of fp16 values cannot overflow."""
    if call.dtype == torch.float16:
        return 0.0
    return 1.0 if packed else float((call.Lk - 1).bit_length())


def _values_by_unit(call: Call, prepared: Prepared) -> dict[str, Any]:
    """8-bit values are summed in units of a power of two: logarithms in place of scales."""
    given = value_arguments(call, prepared)
    p_max = given.pop("P_MAX")
    if given["FAST"]:
        logs = prepared.v_logs if isinstance(prepared, OnDevice) else None
        given["v_scale"] = given["v_scale"].clamp(min=1e-37).log2() if logs is None else logs
    return {**given, "P_LOG": math.log2(p_max)}


def value_arguments(call: Call, prepared: Prepared) -> dict[str, Any]:
    value, BLOCK_DV = prepared.operands.value, value_dim(call.Dv)
    given: dict[str, Any] = {"DV": call.Dv, "BLOCK_DV": BLOCK_DV}
    if isinstance(value, QTensor):
        rows = n_key_blocks(call, prepared) * BLOCK_K
        codes = padded(value.codes.transpose(2, 3), BLOCK_DV, rows)
        strides = [codes.stride(0), codes.stride(1), 1, codes.stride(2)]
        given |= {"v": codes, "v_scale": value.scale.contiguous(), "FAST": True}
        given["P_MAX"] = most_of(codes.dtype)
    else:
        v = unit_rows(value)
        strides = [*v.stride()[:3], 1]
        given |= {"v": v, "v_scale": None, "FAST": False, "P_MAX": 1.0}
    names = ("stride_vb", "stride_vh", "stride_vn", "stride_vd")
    return {**given, **dict(zip(names, strides, strict=True))}


def pooled_arguments(call: Call, prepared: Prepared, pools: Tensor | None) -> dict[str, Any]:
    entries = prepared.pooled
    if entries is None or pools is None:
        names = ("pooled_k", "pooled_v", "pooled_scale", "pools")
        return {**dict.fromkeys(names), "POOL_GROUP": 0}
    n = n_key_blocks(call, prepared) * (BLOCK_K // entries.group)
    assert isinstance(entries.value, Tensor)
    key, scale = entries.key, None
    if isinstance(key, QTensor):
        scale = padded(key.scale.unsqueeze(3), n, 1)
    codes = key.codes if isinstance(key, QTensor) else key
    return {
        "pooled_k": padded(codes, n, block_dim(call.D)),
        "pooled_v": padded(entries.value, n, value_dim(call.Dv)),
        "pooled_scale": scale,
        "pools": pools,
        "POOL_GROUP": entries.group,
    }


def _pools(prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Tensor | None:
    """Which blocks are pooled: as `select` of this call noted, or found from the plan."""
    if prepared.pooled is None:
        return None
    noted = prepared.notes.get("pools") if isinstance(prepared, OnDevice) else None
    if noted is not None and noted[0] is plan.indices:
        return noted[1]
    return pools_of(plan, tokens)
