"""VERB plan: which key blocks each query block will read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blockplan import BlockPlan, plan_of
from ..dispatch.choose import Backend
from ..geometry import BLOCK_K, BLOCK_Q, n_blocks
from ..recipe import KeepError, Recipe
from ..tokenmask import TokenMask


def make_plan(
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    *,
    block_mask: Tensor | None,
    scale: float,
    recipe: Recipe,
    backend: Backend,
    value: Tensor | None = None,
) -> BlockPlan:
    """A block mask of the caller's is the plan; otherwise the backend predicts and selects.

    `KeepError` reads the value, to measure what skipping does.
    """
    if block_mask is not None:
        blocks = (n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K))
        return plan_of(block_mask.expand(*query.shape[:2], *blocks), tokens)
    stage = backend.stage("plan")
    facts: dict[str, Any] = {"scale": scale, "recipe": recipe}
    if isinstance(recipe.keep, KeepError):
        facts["value"] = value  # asked of no backend whose recipes do not want it
    return stage.make_plan(query, key, tokens, **facts)
