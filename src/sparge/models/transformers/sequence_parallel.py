"""transformers models whose sequence is split over processes by DeepSpeed (`UlyssesSPAttentionHF`).

DeepSpeed collects the whole sequence and some heads before it calls the attention that it wraps. It
drops every mask, and gives the positions of all tokens instead. Where positions do not go on by
one, another document begins; padding that restarts or repeats them is such a place, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...support.errors import Unsupported
from ..ulysses import HeadShare, share_heads

_GROUPS = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def ulysses_share(module: nn.Module, query: Tensor) -> HeadShare | None:
    """The heads of this call, where DeepSpeed gives this process a part of them."""
    rank, world = _rank_and_world()
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if world < 2 or heads != query.shape[1] * world:
        return None  # all heads: not wrapped, or not for this module
    return share_heads(heads, rank, world)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rank_and_world() -> tuple[int, int]:
    groups: Any = sys.modules.get(_GROUPS)
    if groups is None or groups._SEQUENCE_PARALLEL_GROUP is None:
        return 0, 1
    return groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()


def check_window(window: int | None, tokens: int) -> None:
    """Refuse a sliding window, which is in the mask that DeepSpeed drops."""
    if window is not None and window < tokens:
        raise Unsupported(
            f"a sliding window of {window} over {tokens} tokens:",
            {"sparge": "DeepSpeed's Ulysses drops the mask that has the window in it"},
            "run this model in one process, or with a core attention that takes windows itself",
        )


def documents(positions: Tensor | None, query: Tensor) -> list[list[tuple[int, int]]] | None:
    """The ranges of documents in each sequence; None if every sequence is one."""
    L = query.shape[2]
    if positions is None or positions.dim() != 2 or positions.shape[1] != L:
        return None
    breaks = positions.diff(dim=1) != 1
    if not bool(breaks.any()):
        return None
    rows = breaks.expand(query.shape[0], L - 1).cpu()
    found = []
    for row in rows:
        starts = [0, *(row.nonzero().flatten() + 1).tolist()]
        found.append(list(zip(starts, [*starts[1:], L], strict=True)))
    return found


def attend_documents(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: list[list[tuple[int, int]]],
    *,
    alone: bool,
) -> Tensor:
    """Each document by itself. alone: the output of a document of one token is its value."""
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    for i, row in enumerate(found):
        for a, b in row:
            if b - a > 1 or not alone:
                q, k, v = (x[i : i + 1, :, a:b] for x in (query, key, value))
                out[i : i + 1, :, a:b] = attend(q, k, v)
    return out


def document_mask(found: list[list[tuple[int, int]]], query: Tensor, *, is_causal: bool) -> Tensor:
    """bool `[B, 1, L, L]`: the documents as a mask, for the model's own attention."""
    B, L = query.shape[0], query.shape[2]
    numbers = torch.zeros((B, L), dtype=torch.long)
    for i, row in enumerate(found):
        for a, _ in row[1:]:
            numbers[i, a:] += 1
    numbers = numbers.to(query.device)
    mask = numbers[:, None, :, None] == numbers[:, None, None, :]
    return mask.tril() if is_causal else mask
