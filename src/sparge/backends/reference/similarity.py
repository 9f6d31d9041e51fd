"""The self-similarity test of `"mean"`: blocks whose pooled token does not represent their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.call import Call
from ...values.recipe import heads_of


def untrusted_queries(call: Call, similarity: Tensor | None) -> Tensor:
    """Query blocks below `min_similarity`, bool `[B, Hq, n_q]`."""
    assert similarity is not None
    # `not >=` rather than `<`: a block that is not finite is never trusted.
    return ~(similarity >= _least(call, similarity.device))


def untrusted_keys(call: Call, similarity: Tensor | None) -> Tensor:
    """Key blocks below `min_similarity`, for each query head, bool `[B, Hq, n_k]`."""
    assert similarity is not None
    of_heads = similarity.repeat_interleave(call.Hq // call.Hk, dim=1)
    return ~(of_heads >= _least(call, of_heads.device))


def _least(call: Call, device: torch.device) -> Tensor:
    least = heads_of(call.recipe.min_similarity, call.Hq, none=-1.0)
    return torch.tensor(least, device=device)[:, None]
