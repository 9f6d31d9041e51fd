"""What tuning keeps of one attention call: all keys and values, some query blocks.

Query blocks are kept whole, because prediction reads statistics of whole blocks; all keys are
kept, because smoothing and prediction read them. So a kept block, planned and attended at its own
place in the sequence (`tokens`) by the kernels that will run it later, gives the rows of the whole
call, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_Q, Backend, Recipe, __version__
from sparge.backends.dense import attend_dense
from sparge.engine.check import check_call
from sparge.routing import AUTO, choose, get_backend
from sparge.support.autocast import without_autocast
from sparge.support.cpuinfo import cpu_name
from sparge.values.call import (
    Call,
    Inputs,
    block_range,
    diagonal_offset,
    n_blocks,
    sampled_rows,
    work_dtype,
)
from sparge.values.stages import Prepared, prepare
from sparge.values.tokenmask import TokenMask, as_4d

BLOCKS = 8
"""Query blocks kept of each call, evenly spread, the last one included."""


@dataclass(frozen=True)
class Capture:
    """One call of one sequence.

    query `[1, Hq, rows, D]`: the kept blocks one behind another; key, value `[1, Hk, Lk, …]`.
    starts: the first row of each kept block in the whole call, ascending.
    offset: query row i of the whole call stands at key position `i + offset`.
    attn_mask: `[1, 1|Hq, 1|rows, 1|Lk]`, the rows of the kept blocks; None without one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    starts: tuple[int, ...]
    scale: float
    is_causal: bool = False
    offset: int = 0
    attn_mask: Tensor | None = None

    @property
    def Hq(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    def rows(self, i: int) -> slice:
        """Where block i lies in `query`; only the last may be shorter than the others."""
        return block_range(i, BLOCK_Q, self.query.shape[2])

    def tokens(self, i: int) -> TokenMask:
        """What block i may attend, at its place in the whole call."""
        rows = self.rows(i)
        mask = self.attn_mask
        mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows].contiguous()
        Lq, offset = rows.stop - rows.start, self.starts[i] + self.offset
        return TokenMask(Lq, self.key.shape[2], self.is_causal, offset, mask)

    def head(self, h: int) -> Capture:
        """One query head alone."""
        kv = h // self.group
        query = self.query[:, h : h + 1].contiguous()
        key, value = (x[:, kv : kv + 1].contiguous() for x in (self.key, self.value))
        mask = self.attn_mask
        mask = mask[:, h : h + 1] if mask is not None and mask.shape[1] > 1 else mask
        return replace(self, query=query, key=key, value=value, attn_mask=mask)


def captures_of(
    query: Tensor, key: Tensor, value: Tensor, facts: Mapping[str, Any], *, blocks: int = BLOCKS
) -> list[Capture]:
    """One capture for each sequence of the batch.

    facts: the other arguments of `attention`, such as is_causal and scale. Tensors are copied.
    """
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ValueError(f"blocks must be a whole number of at least 1, got {blocks!r}")
    Lq, Lk, scale = query.shape[2], key.shape[2], facts.get("scale")
    offset = diagonal_offset(Lq, Lk, facts.get("causal_align", "top_left"))
    chosen = [block_range(i, BLOCK_Q, Lq) for i in sampled_rows(n_blocks(Lq, BLOCK_Q), blocks)]
    at = torch.cat([torch.arange(rows.start, rows.stop) for rows in chosen]).to(query.device)
    mask = as_4d(facts.get("attn_mask"))
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, at]
    tensors = {"query": query[:, :, at], "key": key, "value": value, "attn_mask": mask}
    given: dict[str, Any] = {name: x for name, x in tensors.items() if x is not None}
    return [
        Capture(
            **{name: x[b % len(x)][None].detach().clone() for name, x in given.items()},
            starts=tuple(rows.start for rows in chosen),
            scale=float(query.shape[3] ** -0.5 if scale is None else scale),
            is_causal=bool(facts.get("is_causal", False)),
            offset=offset,
        )
        for b in range(len(query))
    ]


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
    return get_backend(choose(call_of(capture, recipe), name, dense_ok=False).backend)


def call_of(capture: Capture, recipe: Recipe, i: int | None = None) -> Call:
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
    inputs = Inputs(capture.query, capture.key, capture.value)
    call = call_of(capture, recipe)
    return prepare(backend.stages(), call, inputs, to_plan=True, to_attend=True)


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
            prepared = replace(whole, queries=whole.queries.blocks(i, i + 1))
            call = call_of(capture, recipe, i)
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


def stamp() -> dict[str, Any]:
    """When, where and with which version a profile was made."""
    return {
        "version": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
