"""The self-similarity test of `"mean"`: blocks whose pooled token does not represent their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.call import Call
from ...values.recipe import heads_of


def untrusted(call: Call, similarity: Tensor | None) -> Tensor:
    """Blocks of the queries `[B, Hq, n]` or of the keys `[B, Hk, n]` below the `min_similarity` of
    each query head, bool `[B, Hq, n]`."""
    assert similarity is not None
    of_heads = similarity.repeat_interleave(call.Hq // similarity.shape[1], dim=1)
    least = heads_of(call.recipe.min_similarity, call.Hq, none=-1.0)
    # `not >=` rather than `<`: a block that is not finite is never trusted.
    return ~(of_heads >= torch.tensor(least, device=similarity.device)[:, None])
