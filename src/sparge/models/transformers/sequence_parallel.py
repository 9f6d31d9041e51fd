"""transformers models whose sequence is split over processes by DeepSpeed (`UlyssesSPAttentionHF`).

DeepSpeed collects the whole sequence and some heads before it calls the attention that it wraps. It
drops every mask, and gives the positions of all tokens instead. Where positions do not go on by
one, another document begins; padding that restarts or repeats them is such a place, too.
"""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...support.errors import Unsupported
from ...values.recipe import Recipe
from ..site import Site
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


def documents(positions: Tensor | None, query: Tensor) -> list[list[int]] | None:
    """The lengths of the documents in each sequence; None if every sequence is one."""
    L = query.shape[2]
    if positions is None or positions.dim() != 2 or positions.shape[1] != L:
        return None
    breaks = positions.diff(dim=1) != 1
    if not bool(breaks.any()):
        return None
    found = []
    for row in breaks.expand(query.shape[0], L - 1).cpu():
        cuts = torch.tensor([0, *(row.nonzero().flatten() + 1).tolist(), L])
        found.append(cuts.diff().tolist())
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_documents(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: list[list[int]],
    *,
    recipe: Recipe | None,
    return_lse: bool,
    **arguments: Any,
) -> Any:
    """Each document by itself, all in one pack: the output, or with its LSE `[B, Hq, L]`.

    Without an LSE, a document of one token needs no attention: its output is its value. Padding may
    be a document for each of its tokens.
    """
    B, Hq, L = query.shape[:3]
    lengths = [n for row in found for n in row]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if return_lse:
        cuts = list(accumulate(lengths, initial=0))
        out, lse = site.attend_packed(q, k, v, cuts, recipe=recipe, return_lse=True, **arguments)
        assert lse is not None
        return out.unflatten(0, (B, L)).transpose(1, 2), lse.unflatten(1, (B, L)).transpose(0, 1)
    out = v.repeat_interleave(Hq // value.shape[1], dim=1)
    if several := [n for n in lengths if n > 1]:
        rows = torch.tensor(lengths).gt(1).repeat_interleave(torch.tensor(lengths)).nonzero()[:, 0]
        rows = rows.to(query.device)
        cuts = list(accumulate(several, initial=0))
        q, k, v = (x.index_select(0, rows) for x in (q, k, v))
        made, _ = site.attend_packed(q, k, v, cuts, recipe=recipe, **arguments)
        out = out.index_copy(0, rows, made)
    return out.unflatten(0, (B, L)).transpose(1, 2)


def document_mask(found: list[list[int]], query: Tensor, *, is_causal: bool) -> Tensor:
    """bool `[B, 1, L, L]`: the documents as a mask, for the model's own attention."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in found]
    numbers = torch.stack(rows).to(query.device)
    mask = numbers[:, None, :, None] == numbers[:, None, None, :]
    return mask.tril() if is_causal else mask
