"""Which tokens of a sequence are visual, and on what grid; the others are text or conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..reorder import check_grid, inverse_order, reorder_tokens, restore_tokens

Ranges = tuple[tuple[int, int], ...]
OpenRanges = tuple[tuple[int, int | None], ...]
"""As a recipe has them: sliced like Python."""
Grid = tuple[int, int, int]
GridOf = Callable[[int], Grid | None]
"""From the number of tokens of an attention call to their grid; None where they have none."""


@dataclass(frozen=True)
class TokenMap:
    """The visual tokens of a sequence, in row-major order, and how many stand around them.

    before, after: other tokens; None is all that remain. A sequence of visual tokens alone is one
    of the same grid.
    """

    grid: Grid
    before: int | None = 0
    after: int | None = 0

    def start(self, L: int) -> int | None:
        """Where the grid begins in a sequence of L tokens; None if they do not match."""
        others = L - prod(self.grid)
        if others == 0:
            return 0
        before = others - (self.after or 0) if self.before is None else self.before
        after = others - before if self.after is None else self.after
        return before if min(before, after) >= 0 and before + after == others else None

    def others(self, L: int) -> Ranges:
        """The ranges of tokens that are not visual."""
        start = self.start(L)
        if start is None:
            return ()
        ranges = ((0, start), (start + prod(self.grid), L))
        return tuple((a, b) for a, b in ranges if a < b)


class Tokens:
    """What the attention of one model (or part of it) knows of its tokens, during a forward pass.

    map: of this pass; None where the tokens are not known. order: of visual tokens in attention.
    permuted: hidden states are in that order already, so attention must not permute them.
    why_own: why this pass must not be sparse, such as text tokens whose place is not known.
    protect_text: keep all tokens that are not visual.
    """

    def __init__(self, order: str, grid: Any = None, *, protect_text: bool = True) -> None:
        self.order, self.grid, self.protect_text = order, check_grid_option(grid), protect_text
        self.map: TokenMap | None = None
        self.permuted = False
        self.why_own = ""

    def why_unknown(self, L: int) -> str:
        """Why L tokens of self-attention must not be sparse: there are some of unknown kind."""
        if self.why_own or self.map is None or prod(self.map.grid) >= L:
            return self.why_own
        more = L - prod(self.map.grid)
        return "" if self.map.start(L) is not None else f"{more} tokens whose place is not known"

    def map_of(self, L: int) -> TokenMap | None:
        """The tokens of an attention call over L of them."""
        if self.map is not None:
            return self.map if self.map.start(L) is not None else None
        given = self.grid(L) if callable(self.grid) else self.grid
        if given is None:
            return None
        T, H, W = grid = check_grid(given)
        if prod(grid) != L:
            raise ValueError(
                f"grid {T}×{H}×{W} has {prod(grid)} tokens, and an attention layer has {L}; give "
                "the grid of each layer: a list of grids, or a function of the number of tokens "
                "that returns None where there is none"
            )
        return TokenMap(grid)

    def place(self, L: int) -> Placed | None:
        """The visual tokens among L of an attention call, in their order; None without any."""
        found = self.map_of(L)
        return None if found is None else Placed(found.grid, found.start(L) or 0, self.order)

    def protected(self, L: int) -> Ranges:
        """The ranges of tokens that are not visual, where they are protected."""
        found = self.map_of(L) if self.protect_text else None
        return () if found is None else found.others(L)


def check_grid_option(grid: Any) -> Grid | GridOf | None:
    """A grid, a function of the number of tokens, or None; a list of grids is such a function."""
    if grid is None or callable(grid):
        return grid
    if isinstance(grid, Sequence) and grid and all(isinstance(g, Sequence) for g in grid):
        return partial(_grid_among, tuple(map(check_grid, grid)))
    return check_grid(grid)


def _grid_among(grids: tuple[Grid, ...], L: int) -> Grid | None:
    return next((grid for grid in grids if prod(grid) == L), None)


@dataclass(frozen=True)
class Placed:
    """The visual tokens of one attention call, to be put in order and back."""

    grid: Grid
    start: int
    order: str

    def reorder(self, x: Tensor, dim: int = -2) -> Tensor:
        return reorder_tokens(x, self.grid, self.order, dim=dim, start=self.start)

    def restore(self, x: Tensor, dim: int = -2) -> Tensor:
        return restore_tokens(x, self.grid, self.order, dim=dim, start=self.start)

    def reorder_mask(self, mask: Tensor | None, Lq: int, Lk: int) -> Tensor | None:
        """A mask of a call whose queries (and keys, where there are as many) were reordered."""
        if mask is None:
            return None
        n = prod(self.grid) + self.start
        if mask.dim() > 1 and mask.shape[-2] > 1 and Lq >= n:
            mask = self.reorder(mask, dim=-2)
        if mask.shape[-1] > 1 and Lk == Lq:
            mask = self.reorder(mask, dim=-1)
        return mask

    @lru_cache(maxsize=256)  # noqa: B019 - kept by value, and small
    def move_ranges(self, ranges: Ranges) -> Ranges:
        """Token ranges where they stand after reordering."""
        n = prod(self.grid)
        places = inverse_order(self.grid, self.order)
        moved: list[tuple[int, int]] = []
        for a, b in ranges:
            moved += [(a, min(b, self.start)), (max(a, self.start + n), b)]
            low, high = max(a - self.start, 0), min(b - self.start, n)
            if low < high:
                moved += ranges_of(places[low:high] + self.start)
        return tuple(sorted((a, b) for a, b in moved if a < b))


def ranges_of(positions: Tensor) -> Ranges:
    """Positions as ranges `(start, stop)`, ascending."""
    at = positions.sort().values
    breaks = (at.diff() != 1).nonzero().flatten() + 1
    pieces = torch.tensor_split(at, breaks.tolist()) if len(at) else ()
    return tuple((int(piece[0]), int(piece[-1]) + 1) for piece in pieces)


def absolute_ranges(ranges: Sequence[tuple[int, int | None]], L: int) -> list[tuple[int, int]]:
    """Ranges sliced like Python, as positions; one that reaches out of the sequence is refused."""
    found = []
    for a, b in ranges:
        start = a + L if a < 0 else a
        stop = L if b is None else b + L if b < 0 else b
        if not 0 <= start < stop <= L:
            raise ValueError(
                f"protect must be ranges within the {L} tokens of this model, got {(a, b)}"
            )
        found.append((start, stop))
    return found
