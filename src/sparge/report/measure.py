"""How far an output is from the truth, and the truth."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dense_fp64(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """Dense attention by torch in fp64, on the CPU: what errors are counted against."""
    q, k, v = (x.cpu().double() for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


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
