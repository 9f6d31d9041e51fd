"""fp64 attention to compare outputs with, and how many query-key pairs there are to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.exact_rows import row_weights
from ..values.blockplan import BlockPlan
from ..values.geometry import BLOCK_K, BLOCK_Q, block_sizes, in_blocks
from ..values.tokenmask import OPEN, TokenMask


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
        each = [
            row_weights(q, k, tokens, b, h, rows, scale=D**-0.5)
            for b in range(B)
            for h in range(Hq)
        ]
        self.rows, self.tokens = rows, tokens
        self.query, self.key = q[:, :, rows], k.repeat_interleave(Hq // k.shape[1], 1)
        self.weights = torch.stack(each).unflatten(0, (B, Hq))
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
        kinds = self.tokens.block_kinds(torch.device("cpu"))[:, :, self.rows // BLOCK_Q]
        pools = (~kept & (kinds == OPEN)).repeat_interleave(BLOCK_K // group, -1)
        return entries.exp() * pools[..., : len(sizes)], v


def relative_l1(out: Tensor, truth: Tensor) -> float:
    """Σ|out - truth| / Σ|truth|, in fp64."""
    out, truth = out.cpu().double(), truth.cpu().double()
    return float((out - truth).abs().sum() / truth.abs().sum())


def dense_pairs(B: int, Hq: int, L: int, *, is_causal: bool) -> int:
    """Query-key pairs that dense attention computes."""
    return B * Hq * (L * (L + 1) // 2 if is_causal else L * L)


def kept_pairs(plan: BlockPlan) -> int:
    """Query-key pairs inside the blocks that a plan keeps; Lq == Lk."""
    sizes = block_sizes(plan.Lk, BLOCK_K)
    if plan.is_causal:
        starts = torch.arange(len(sizes)) * BLOCK_K
        seen = (torch.arange(plan.Lq)[:, None] + 1 - starts).clamp(min=0).minimum(sizes)
    else:
        seen = sizes.expand(plan.Lq, -1)
    pairs = in_blocks(seen, -2, BLOCK_Q).sum(-2)
    return int((plan.to_mask().cpu() * pairs).sum())
