"""Blocks that are kept whatever is predicted: diagonal, sink, local window, protected tokens.

All of it follows from lengths and the recipe, never from the numbers, and is the same for every
backend. Query row `i` stands at key position `i + offset`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..values.call import BLOCK_K, BLOCK_Q, n_blocks
from ..values.recipe import Recipe
from ..values.tokenmask import TokenMask


def forced_blocks(tokens: TokenMask, recipe: Recipe, device: torch.device) -> Tensor:
    """Bool `[n_q, n_k]`; blocks that nothing may attend are left for the caller to exclude."""
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    forced = torch.zeros((n_q, n_k), dtype=torch.bool, device=device)
    forced[:, : min(recipe.sink_blocks, n_k)] = True
    window = recipe.window(tokens.is_causal)
    if tokens.is_causal or window:
        # A reach beyond all blocks is all of them, and must not run over.
        reach = min(window, n_q * BLOCK_Q + n_k)
        forced |= _near_diagonal(tokens, reach, device)
    for start, stop in recipe.protect:
        first, last, _ = slice(start, stop).indices(tokens.Lk)
        forced[:, _blocks_of(first, last, BLOCK_K)] = True
        first_row, last_row = max(first - tokens.offset, 0), min(last - tokens.offset, tokens.Lq)
        forced[_blocks_of(first_row, last_row, BLOCK_Q)] = True
    return forced


def _near_diagonal(tokens: TokenMask, reach: int, device: torch.device) -> Tensor:
    """Key blocks that hold the query block's own positions, and `reach` more to each side."""
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    first = torch.arange(n_q, device=device)[:, None] * BLOCK_Q
    last = (first + BLOCK_Q).clamp(max=tokens.Lq) - 1 + tokens.offset
    first = first + tokens.offset
    # A block whose rows all stand before or behind the keys has no diagonal.
    exists = (last >= 0) & (first < tokens.Lk)
    low = first.clamp(min=0) // BLOCK_K - reach
    high = last.clamp(max=tokens.Lk - 1) // BLOCK_K + reach
    i_k = torch.arange(n_k, device=device)
    return exists & (i_k >= low) & (i_k <= high)


def _blocks_of(start: int, stop: int, block: int) -> slice:
    """The blocks that hold any of the tokens start … stop-1."""
    return slice(start // block, n_blocks(stop, block)) if start < stop else slice(0, 0)
