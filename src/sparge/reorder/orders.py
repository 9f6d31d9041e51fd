"""Orders of the tokens of a T×H×W grid, by name, as permutations that are kept per shape.

row            as models lay tokens out: t, then h, then w fastest
column         t, then w, then h fastest
time           h, then w, then t fastest
hilbert        along a Hilbert curve through the box
tiles:4x4x4    boxes of T×H×W tokens, row by row, and row by row within each; tiles:8x8 is H×W
random         shuffled, always alike: the worst case, to compare with
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .hilbert import Sizes, hilbert_curve

HILBERT, ROW = "hilbert", "row"
ORDERS = (HILBERT, ROW, "column", "time", "random")
"""Names of orders; tiles, such as "tiles:4x4x4" or "tiles:8x8", are orders, too."""
SHUFFLE_SEED = 0
KEPT = 128
"""Permutations kept: one of 75,600 tokens takes 0.6 MB."""
TILES = re.compile(r"tiles:(?:([1-9]\d{0,5})x)?([1-9]\d{0,5})x([1-9]\d{0,5})")


def check_grid(grid: Sequence[int]) -> Sizes:
    """(T, H, W) of a grid given as (T, H, W) or as (H, W). Raises TypeError for what is no sequence
    of whole numbers, ValueError for another length or a size below 1."""
    if not isinstance(grid, Sequence):
        raise TypeError(f"grid must be (T, H, W) or (H, W), got {grid!r}")
    sizes = tuple(grid)
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
            raise TypeError(f"grid must be of whole numbers, got {grid!r}")
    if len(sizes) not in (2, 3):
        raise ValueError(f"grid must have two or three sizes, (H, W) or (T, H, W), got {grid!r}")
    T, H, W = sizes if len(sizes) == 3 else (1, *sizes)
    if min(T, H, W) < 1:
        raise ValueError(f"grid must have sizes of at least 1, got {grid!r}")
    return T, H, W


def check_order(order: str) -> str:
    """The name of an order, as it came. Raises ValueError for a name that is not known."""
    if not isinstance(order, str):
        raise TypeError(f"order must be a name, got {order!r}")
    if order not in ORDERS and not TILES.fullmatch(order):
        known = ", ".join(repr(name) for name in ORDERS)
        raise ValueError(
            f"order must be one of {known}, or tiles such as 'tiles:4x4x4' (T, H, W) or "
            f"'tiles:8x8' (H, W), got {order!r}"
        )
    return order


def token_order(
    grid: Sequence[int], order: str = HILBERT, *, device: torch.device | str | None = None
) -> Tensor:
    """int64 `[T·H·W]`: element i is the row-major index of the token at place i.

    The tensor is kept and returned again: never write to it.
    """
    return order_of_all(check_grid(grid), order, inverse=False, device=device)


def inverse_order(
    grid: Sequence[int], order: str = HILBERT, *, device: torch.device | str | None = None
) -> Tensor:
    """int64 `[T·H·W]`: element j is the place of the token with row-major index j.

    The tensor is kept and returned again: never write to it.
    """
    return order_of_all(check_grid(grid), order, inverse=True, device=device)


def order_of_all(
    grid: Sizes,
    order: str,
    *,
    inverse: bool,
    start: int = 0,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """int64 `[length]`: the order of the grid's tokens, which begin at `start`, or its inverse;
    other tokens stay. length: None is that of the grid."""
    T, H, W = grid
    L = T * H * W if length is None else length
    device = torch.device("cpu" if device is None else device)
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        # A graph asks when it runs: it holds no permutation, and traces none being made. Nor may
        # tensors without numbers (FakeTensorMode) be kept.
        asked = (T, H, W, check_order(order), inverse, start, L, device)
        made: Tensor = torch.ops.sparge.token_order(*asked)
        return made
    return _permutation((T, H, W), check_order(order), inverse, start, L, str(device))


@lru_cache(maxsize=KEPT)
def _permutation(
    grid: Sizes, order: str, inverse: bool, start: int, length: int, device: str
) -> Tensor:
    if device != "cpu":
        return _permutation(grid, order, inverse, start, length, "cpu").to(device)
    n = grid[0] * grid[1] * grid[2]
    # Kept tensors serve training, too, whatever mode the first caller is in.
    with torch.inference_mode(False), torch.device("cpu"):
        if n != length:
            index = torch.arange(length)
            own = _permutation(grid, order, inverse, 0, n, "cpu")
            index[start : start + n] = start + own
            return index
        if inverse:
            places = _permutation(grid, order, False, 0, n, "cpu")
            return torch.empty_like(places).index_copy_(0, places, torch.arange(n))
        return WAYS[order.split(":")[0]](grid, order).contiguous()


def _rows(grid: Sizes) -> Tensor:
    """Row-major indices, `[T, H, W]`."""
    T, H, W = grid
    return torch.arange(T * H * W).view(T, H, W)


def _hilbert(grid: Sizes, order: str) -> Tensor:
    t, h, w = hilbert_curve(grid).unbind(1)
    return (t * grid[1] + h) * grid[2] + w


def _tiles(grid: Sizes, order: str) -> Tensor:
    found = TILES.fullmatch(order)
    assert found is not None
    tile = [int(n or 1) for n in found.groups()]
    rows = _rows(grid)
    of = [torch.arange(n) // size for n, size in zip(grid, tile, strict=True)]
    counts = [int(numbers[-1]) + 1 for numbers in of]
    number = (of[0][:, None, None] * counts[1] + of[1][:, None]) * counts[2] + of[2]
    return rows.flatten()[number.flatten().argsort(stable=True)]


def _shuffled(grid: Sizes, order: str) -> Tensor:
    T, H, W = grid
    return torch.randperm(T * H * W, generator=torch.Generator().manual_seed(SHUFFLE_SEED))


WAYS: dict[str, Callable[[Sizes, str], Tensor]] = {
    HILBERT: _hilbert,
    ROW: lambda grid, order: _rows(grid).flatten(),
    "column": lambda grid, order: _rows(grid).transpose(1, 2).flatten(),
    "time": lambda grid, order: _rows(grid).permute(1, 2, 0).flatten(),
    "random": _shuffled,
    "tiles": _tiles,
}

_LIBRARY = torch.library.Library("sparge", "FRAGMENT")
_LIBRARY.define(
    "token_order(SymInt T, SymInt H, SymInt W, str order, bool inverse, SymInt start,"
    " SymInt length, Device device) -> Tensor"
)


def _order_in_graph(
    T: int, H: int, W: int, order: str, inverse: bool, start: int, length: int, device: torch.device
) -> Tensor:
    """A copy: a graph may write over the tensors that it has got."""
    return _permutation((T, H, W), order, inverse, start, length, str(device)).clone()


def _order_on_paper(
    T: int, H: int, W: int, order: str, inverse: bool, start: int, length: int, device: torch.device
) -> Tensor:
    return torch.empty(length, dtype=torch.int64, device=device)


_LIBRARY.impl("token_order", _order_in_graph, "CompositeExplicitAutograd")
torch.library.register_fake("sparge::token_order", _order_on_paper, lib=_LIBRARY)
