"""How far an output is from the truth, and the truth; and what there was to compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..blockplan import BlockPlan
from ..geometry import BLOCK_K, BLOCK_Q, block_sizes, in_blocks


def dense_fp64(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """Dense attention by torch in fp64, on the CPU: what errors are counted against."""
    q, k, v = (x.cpu().double() for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


class Truth:
    """Attention of some query rows in fp64, as many key heads as query heads."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, *, rows: Tensor, is_causal: bool
    ) -> None:
        q, k, self.value = (x.cpu().double() for x in (query[:, :, rows], key, value))
        self.rows = rows
        self.scores = q @ k.mT * query.shape[-1] ** -0.5
        if is_causal:
            later = torch.arange(key.shape[2]) > rows[:, None]
            self.scores.masked_fill_(later, -torch.inf)
        self.dense = self.scores.softmax(-1) @ self.value

    def of_blocks(self, plan: BlockPlan) -> Tensor:
        """The blocks of a plan alone: what is left of an error then is not the plan's."""
        kept = plan.to_mask().cpu()[:, :, self.rows // BLOCK_Q]
        keys = kept.repeat_interleave(BLOCK_K, -1)[..., : self.scores.shape[-1]]
        return self.scores.masked_fill(~keys, -torch.inf).softmax(-1) @ self.value


def relative_l1(out: Tensor, truth: Tensor) -> float:
    """Σ|out - truth| / Σ|truth|, in fp64."""
    out, truth = out.cpu().double(), truth.cpu().double()
    return float((out - truth).abs().sum() / truth.abs().sum())


def cosine_similarity(out: Tensor, truth: Tensor) -> float:
    """Of the two outputs, each as one long vector."""
    return float(F.cosine_similarity(out.double().flatten(), truth.double().flatten(), dim=0))


def score_elements(B: int, Hq: int, L: int, *, is_causal: bool) -> int:
    """Query-key pairs that dense attention computes, the same for every contender."""
    return B * Hq * (L * (L + 1) // 2 if is_causal else L * L)


def kept_score_elements(plan: BlockPlan) -> int:
    """Query-key pairs inside the blocks that a plan keeps; Lq == Lk."""
    sizes = block_sizes(plan.Lk, BLOCK_K)
    if plan.is_causal:
        starts = torch.arange(len(sizes)) * BLOCK_K
        seen = (torch.arange(plan.Lq)[:, None] + 1 - starts).clamp(min=0).minimum(sizes)
    else:
        seen = sizes.expand(plan.Lq, -1)
    pairs = in_blocks(seen, -2, BLOCK_Q).sum(-2)
    return int((plan.to_mask().cpu() * pairs).sum())
