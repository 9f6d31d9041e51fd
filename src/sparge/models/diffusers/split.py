"""What diffusers' context parallelism splits over processes: the streams of a model, and masks."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from ..sdpa import Route
from ..tokens import TokenMap
from ..ulysses import HeadShare, Shards

UNKNOWN_SPLIT = "tokens that are split over the processes in a way that is not known"


def split_of(route: Route, L: int, world: int) -> Shards | None:
    """How the L tokens of self-attention are split over the ranks; None where nothing is known."""
    found = None if route.tokens is None else route.tokens.map_of(L)
    return None if found is None else Shards(_streams(found, L), world)


def _streams(found: TokenMap, L: int) -> tuple[int, ...]:
    """What a model splits apart: text, and the visual tokens with what stands behind them."""
    start = found.start(L)
    assert start is not None, "a map is found by its number of tokens"
    return (start, L - start) if start else (prod(found.grid), L - prod(found.grid))


def mask_of_heads(mask: Tensor | None, share: HeadShare, Lq: int, Lk: int) -> Tensor | None:
    """The mask of these heads; one that is not of all queries and keys is refused."""
    if mask is None:
        return None
    rows = mask.shape[-2] if mask.dim() > 1 else 1
    if mask.shape[-1] not in (1, Lk) or rows not in (1, Lq):
        raise ValueError(
            f"attn_mask must be of keys alone, [B, 1, 1, keys of this process], or of all {Lq} "
            f"queries and {Lk} keys under context parallelism; got {list(mask.shape)}"
        )
    if mask.dim() == 4 and mask.shape[1] == share.heads > 1:
        mask = mask[:, share.start : share.stop]
    return mask


def rows_of(result: Any, index: Tensor) -> Any:
    """Some rows, in this order, of an output `[B, H, L, D]`, or of `(out, lse)`."""
    if isinstance(result, tuple):
        return tuple(x.index_select(2, index) for x in result)
    return result.index_select(2, index)


def heads_last(result: Any) -> Any:
    """An output as `[B, L, H, D]`, as diffusers has it; or with its LSE, fp32 `[B, L, H]`."""
    if isinstance(result, tuple):
        out, lse = result
        return out.permute(0, 2, 1, 3), lse.permute(0, 2, 1).float()
    return result.permute(0, 2, 1, 3)
