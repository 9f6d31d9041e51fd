"""VERB attend: online softmax over the kept blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..blockplan import BlockPlan
from ..dispatch.choose import Backend
from ..qtensor import Operands
from ..recipe import Recipe
from ..tokenmask import TokenMask


@dataclass(frozen=True)
class Attended:
    """out `[B, Hq, Lq, Dv]`; lse `[B, Hq, Lq]`, natural log over the kept keys;
    pv_skips int32 `[B, Hq, n_q]`, row groups x blocks that the second filter skipped."""

    out: Tensor
    lse: Tensor
    pv_skips: Tensor


def attend(
    operands: Operands,
    plan: BlockPlan,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    dtype: torch.dtype,
    backend: Backend,
) -> Attended:
    stage = backend.stage("attend")
    out, lse, pv_skips = stage.attend(
        operands, plan, tokens, scale=scale, recipe=recipe, dtype=dtype
    )
    return Attended(out, lse, pv_skips)
