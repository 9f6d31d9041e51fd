"""What a record counts of a plan: summed where the plan is, in few launches; read on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..values.blockplan import BlockPlan, raised_heads
from ..values.call import Call
from ..values.geometry import BLOCK_Q, block_range, n_blocks
from ..values.stages import by_key_head


def count_blocks(plan: BlockPlan, pv_skips: Tensor | None) -> dict[str, Tensor]:
    """blocks int64 `[2, 2 or 3, Hq]`: kept, allowed and, if given, skipped of each head over the
    batch; and those of the last query block alone, which may be shorter. measured: the plan's."""
    each = torch.stack([x for x in (plan.counts, plan.allowed, pv_skips) if x is not None])
    found = {"blocks": torch.stack((each.sum((1, 3)), each[..., -1:].sum((1, 3))))}
    return found if plan.measured is None else found | {"measured": plan.measured}


def numbers_of(call: Call, found: Mapping[str, Tensor], *, row_group: int) -> dict[str, Any]:
    """The numbers of a `Run` by what `count_blocks` found; the same as the plan's own methods."""
    (kept, allowed, *skips), (last_kept, _, *last_skips) = found["blocks"].tolist()
    n_kept, n_allowed, n_last = sum(kept), sum(allowed), sum(last_kept)
    n_skips, n_last_skips = (sum(x[0]) if x else 0 for x in (skips, last_skips))
    per_block, in_last = (-(-rows // row_group) for rows in (BLOCK_Q, _last_rows(call.Lq)))
    inside = (n_skips - n_last_skips) / per_block + n_last_skips / in_last
    skipped = 2 * (n_allowed - n_kept) + inside
    return {
        "sparsity": skipped / (2 * n_allowed) if n_allowed else 0.0,
        "kept": n_kept,
        "allowed": n_allowed,
        "pv_skips": n_skips,
        "pv_groups": per_block * (n_kept - n_last) + in_last * n_last,
        "kept_by_head": tuple(kept),
        "allowed_by_head": tuple(allowed),
        "pv_skips_by_head": tuple(skips[0]) if skips else (),
        **_measured(call, found.get("measured")),
    }


def _last_rows(Lq: int) -> int:
    last = block_range(n_blocks(Lq, BLOCK_Q) - 1, BLOCK_Q, Lq)
    return last.stop - last.start


def _measured(call: Call, measured: Tensor | None) -> dict[str, Any]:
    """What `KeepError` found, the worst of the batch for each head, and the heads it raised."""
    if measured is None:
        return {}
    errors, bounds = (tuple(x.tolist()) for x in measured[:2].amax(1))
    return {
        "error_by_head": errors,
        "bound_by_head": bounds,
        "precision_by_head": _precisions(call, by_key_head(raised_heads(measured), call.Hk)),
    }


def _precisions(call: Call, raised: list[bool]) -> tuple[str, ...] | None:
    if not any(raised) or not call.recipe.quantized:
        return None
    group, names = call.Hq // call.Hk, (call.recipe.precision, call.own_precision)
    return tuple(names[x] for x in raised for _ in range(group))
