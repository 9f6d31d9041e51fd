"""What a benchmark compares with: attention in fp64, over all keys or over the kept blocks; and its
self-check of sparse recipes. A benchmark prints no numbers if a check fails."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparge import (
    BLOCK_K,
    BLOCK_Q,
    DEFAULT,
    BlockPlan,
    KeepFraction,
    Recipe,
    attention,
    make_plan,
)
from sparge.api.accuracy import exact_weights
from sparge.cli.self_check import check_backends, relative_l1
from sparge.synthetic import structured_qkv
from sparge.values.call import block_sizes, in_blocks
from sparge.values.tokenmask import TokenMask

from .contender import Inputs

SPARSE = {
    "40 % by mean": Recipe(keep=KeepFraction(0.4), predictor="mean"),
    "40 % by mean, fast": Recipe(keep=KeepFraction(0.4), predictor="mean", precision="int8-fast"),
    "default": DEFAULT,
}
SPARSE_LENGTH = 1000
OTHER_BLOCKS = 0.02
"""Share of the blocks that may differ from the reference's: rounding decides between blocks of
nearly equal mass."""


class Truth:
    """Attention of some query rows in fp64, on the CPU; Lq == Lk.

    dense: `[B, Hq, rows, Dv]`, over all keys that each row may attend.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, *, rows: Tensor, is_causal: bool
    ) -> None:
        q, k, v = (x.cpu().double() for x in (query, key, value))
        B, Hq, L, D = q.shape
        tokens = TokenMask(L, L, is_causal)
        weights = [
            exact_weights(q, k, tokens, b, h, rows, scale=D**-0.5)
            for b in range(B)
            for h in range(Hq)
        ]
        self.rows, self.tokens = rows, tokens
        self.query, self.key = q[:, :, rows], k.repeat_interleave(Hq // k.shape[1], 1)
        self.weights = torch.stack(weights).unflatten(0, (B, Hq))
        self.value = v.repeat_interleave(Hq // k.shape[1], 1)
        self.dense = self.weights @ self.value

    def of_blocks(self, plan: BlockPlan, pool_group: int | None = None) -> Tensor:
        """Attention over the kept blocks, and over pooled entries of the others if they are pooled.
        Comparing with it leaves out the sparsity error."""
        kept = plan.to_mask().cpu()[:, :, self.rows // BLOCK_Q]
        keys = kept.repeat_interleave(BLOCK_K, -1)[..., : self.weights.shape[-1]]
        weights, value = self.weights * keys, self.value
        if pool_group is not None:
            entries, means = self._entries(kept, pool_group)
            weights, value = torch.cat([weights, entries], -1), torch.cat([value, means], -2)
        return weights @ value / weights.sum(-1, keepdim=True)

    def _entries(self, kept: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Weights of pooled entries, in units of the dense weights, and their values."""
        scale = self.query.shape[-1] ** -0.5
        L = self.key.shape[2]
        sizes = block_sizes(L, group).double()
        k, v = (in_blocks(x, -2, group).sum(-2) / sizes[:, None] for x in (self.key, self.value))
        scores = self.query @ self.key.mT * scale
        if self.tokens.is_causal:
            scores = scores.masked_fill(torch.arange(L) > self.rows[:, None], -torch.inf)
        entries = self.query @ k.mT * scale + sizes.log() - scores.logsumexp(-1, keepdim=True)
        # A block is pooled if every row of its query block may attend all of its keys.
        last_key = block_sizes(L, BLOCK_K).cumsum(0) - 1
        is_open = last_key <= self.rows[:, None] // BLOCK_Q * BLOCK_Q
        is_open |= not self.tokens.is_causal
        pools = (~kept & is_open).repeat_interleave(BLOCK_K // group, -1)
        return entries.exp() * pools[..., : len(sizes)], v


class WrongBlocksError(Exception):
    """The backend keeps other blocks than the reference."""


def check_sparse(names: Iterable[str], device: str = "cpu") -> list[Any]:
    """Recipes like those of a benchmark, in bf16, with as many key heads as queries."""
    inputs = structured_qkv(Hk=4, L=SPARSE_LENGTH, dtype=torch.bfloat16, device=device)
    rows = torch.arange(SPARSE_LENGTH)
    truths = [Truth(*inputs, rows=rows, is_causal=causal) for causal in (True, False)]
    wanted = [(name, title, SPARSE[title]) for name in names for title in SPARSE]
    return check_backends(device, wanted, partial(_error, inputs, truths))


def _error(inputs: Inputs, truths: Iterable[Truth], name: str, recipe: Recipe) -> float:
    """The largest error against fp64 over the same blocks, which must be those that the reference
    chooses."""
    errors = []
    for truth in truths:
        is_causal = truth.tokens.is_causal
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True, "recipe": recipe}
        plan, meant = (
            make_plan(*inputs[:2], backend=backend, value=inputs[2], **options)
            for backend in (name, "reference")
        )
        others = int((plan.to_mask() ^ meant.to_mask()).sum()) / int(meant.counts.sum())
        if others > OTHER_BLOCKS:
            raise WrongBlocksError(f"{others:.0%} of its blocks are not the reference's")
        expected = truth.of_blocks(plan, recipe.pool_group if recipe.pools else None)
        errors.append(relative_l1(attention(*inputs, backend=name, **options), expected))
    return max(errors)
