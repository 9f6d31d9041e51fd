"""Orders of the tokens of a T×H×W grid, and tensors put into an order and back.

Attention is skipped in blocks of consecutive tokens. Models lay the tokens of a picture or a video
out row by row, so a block is a thin strip of it; along a Hilbert curve a block is a compact patch,
whose tokens are more alike. Orders are permutations, kept per shape, by name:

row            as models lay tokens out: t, then h, then w fastest
column         t, then w, then h fastest
time           h, then w, then t fastest
hilbert        along a Hilbert curve through the box
tiles:4x4x4    boxes of T×H×W tokens, row by row, and row by row within each; tiles:8x8 is H×W
random         shuffled, always alike: the worst case, to compare with
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

Sizes = tuple[int, int, int]
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
    n = math.prod(grid)
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
    return torch.arange(math.prod(grid)).view(grid)


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
    own = torch.Generator().manual_seed(SHUFFLE_SEED)
    return torch.randperm(math.prod(grid), generator=own)


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


_LIBRARY.impl("token_order", _order_in_graph, "CompositeExplicitAutograd")
torch.library.register_fake(
    "sparge::token_order",
    lambda *asked: torch.empty(asked[-2], dtype=torch.int64, device=asked[-1]),
    lib=_LIBRARY,
)


def reorder_tokens(
    x: Tensor, grid: Sequence[int], order: str = HILBERT, *, dim: int = -2, start: int = 0
) -> Tensor:
    """x with the grid's tokens, `[start, start + T·H·W)` along `dim`, taken from row-major order to
    `order`. Other tokens keep their place. Returns x itself if `order` is "row".

    Raises ValueError for a grid that does not match the tokens. Differentiable; a compiled graph
    holds the permutation as a constant.
    """
    return _taken(x, grid, order, dim=dim, start=start, back=False)


def restore_tokens(
    x: Tensor, grid: Sequence[int], order: str = HILBERT, *, dim: int = -2, start: int = 0
) -> Tensor:
    """The inverse of `reorder_tokens`: the grid's tokens taken from `order` to row-major order."""
    return _taken(x, grid, order, dim=dim, start=start, back=True)


def _taken(
    x: Tensor, grid: Sequence[int], order: str, *, dim: int, start: int, back: bool
) -> Tensor:
    T, H, W = check_grid(grid)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of the tensor, got {dim}")
    n, L = T * H * W, x.shape[dim]
    if start < 0 or start + n > L:
        raise ValueError(
            f"grid {T}×{H}×{W} does not match the tokens: it has {n} tokens from {start} on, and "
            f"dimension {dim} of a tensor {list(x.shape)} has {L}"
        )
    if check_order(order) == ROW:
        return x
    index = order_of_all((T, H, W), order, inverse=back, start=start, length=L, device=x.device)
    return x.index_select(dim, index)


# --- the curve --------------------------------------------------------------------------------
# A Hilbert curve through a box of any size.
#
# Every walk starts in a corner of its box and ends in the corner at the far end of the box's first
# side. A walk is joined from walks of parts, in one of three ways; b ≥ c are the other two sides:
#
#     along    a is long        two parts, one after the other
#     arch     c is short       up on the left, across the top, down on the right; c is not split
#     folds    a, b, c alike    the eight octants of the classical curve, as five parts
#
# A walk in unit steps alternates between cells of even and odd coordinate sum, so one of a × b × c
# cells between these corners exists only if a·(b·c - 1) is even. Sides are split near the middle,
# and so that all parts have such a walk where the box has one; otherwise one part takes one
# diagonal step. A size that recurs is walked once: a curve costs a few hundred tensor operations.

IMPOSSIBLE = 1000
"""Cost of a box that cannot be walked at all: one cell along the first side, more along others."""
NEAR_THE_MIDDLE = 2
ODD = 0.05
"""What a factor of two of a part's size is worth, in shares of the side. Chosen by how compact 64
tokens in a row are, over 13 grids of pictures and videos: mean squared distance from their centre
1.38 times that of a cube or square, 1.46 without."""
EVEN_ENOUGH = 2 / 3
"""An even side is walked along instead of a longer odd one if it is at least this much of it."""


@dataclass(frozen=True)
class Part:
    """A box within a box. sizes: of its own sides, the first is walked along. sides: side of the
    outer box that each lies on. start: cell of the outer box where the walk starts. signs:
    direction of each own side, seen from there."""

    sizes: Sizes
    sides: Sizes
    start: Sizes
    signs: Sizes


def hilbert_curve(sizes: Sizes) -> Tensor:
    """Coordinates `[n, 3]` of all cells of a box, in the order of the curve.

    Neighbours on the curve are neighbours in the box. Exactly one step is diagonal if the longest
    side is odd, another is even, and every even side is shorter than two thirds of the longest.
    """
    longest = max(sizes)
    even = [n for n in sizes if n % 2 == 0 and n >= EVEN_ENOUGH * longest]
    first = sizes.index(max(even, default=longest))
    others = [side for side in range(3) if side != first]
    sides = [first, *others]
    walked = _walk(sizes[first], sizes[others[0]], sizes[others[1]], {})
    curve = torch.empty_like(walked)
    curve[:, sides] = walked
    return curve


def _walk(a: int, b: int, c: int, known: dict[Sizes, Tensor]) -> Tensor:
    """Coordinates `[a·b·c, 3]` of a walk from (0, 0, 0) to (a - 1, 0, 0)."""
    if (a, b, c) not in known:
        if b < c:
            walk = _walk(a, c, b, known)[:, [0, 2, 1]]
        elif b == 1:
            walk = torch.zeros(a, 3, dtype=torch.int64)
            walk[:, 0] = torch.arange(a)
        elif b == 2 and (c == 1 or a % 2):
            walk = _layers(a, c)
        else:
            parts = _split(a, b, c)
            walk = torch.cat([_placed(_walk(*part.sizes, known), part) for part in parts])
        known[a, b, c] = walk
    return known[a, b, c]


def _placed(walk: Tensor, part: Part) -> Tensor:
    out = torch.empty_like(walk)
    out[:, list(part.sides)] = walk * walk.new_tensor(part.signs)
    return out.add_(out.new_tensor(part.start))


def _layers(a: int, c: int) -> Tensor:
    """Layers of 2 × c cells, c ≤ 2, there and back in turn. If a is odd, the second goes the way of
    the first, which is one diagonal step."""
    there = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)] if c == 2 else [(0, 0, 0), (0, 1, 0)]
    layer, x = torch.tensor(there), torch.arange(a)
    forward = (x == 0) | ((x + a) % 2 == 0)
    walk = torch.where(forward[:, None, None], layer, layer.flip(0))
    walk[..., 0] = x[:, None]
    return walk.flatten(0, 1)


def _split(a: int, b: int, c: int) -> tuple[Part, ...]:
    """Parts of a box, b ≥ c: of the fewest diagonal steps, in the way that suits the box's shape,
    nearest to the middle."""
    ways = {"along": _along, "arch": _arch, "folds": _folds}
    suited = "along" if 2 * a > 3 * b else "arch" if 3 * b > 4 * c else "folds"
    least = _diagonals((a, b, c))
    best, best_rank = None, (IMPOSSIBLE, 0.0)
    for way in sorted(ways, key=lambda name: name != suited):
        for off, parts in ways[way](a, b, c):
            rank = (sum(_diagonals(part.sizes) for part in parts), off)
            if rank < best_rank:
                best, best_rank = parts, rank
        if best is not None and best_rank[0] == least:
            break
    assert best is not None, (a, b, c)
    return best


def _diagonals(sizes: Sizes) -> int:
    a, b, c = sizes
    if a == 1 and b * c > 1:
        return IMPOSSIBLE
    return a * (b * c - 1) % 2


def _along(a: int, b: int, c: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    """Ways to split a, with their distance from the middle."""
    for a1 in _middles(a):
        yield (
            _off(a, a1),
            (
                Part((a1, b, c), (0, 1, 2), (0, 0, 0), (1, 1, 1)),
                Part((a - a1, b, c), (0, 1, 2), (a1, 0, 0), (1, 1, 1)),
            ),
        )


def _arch(a: int, b: int, c: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    for a1, b1 in product(_middles(a), _middles(b)):
        yield (
            _off(a, a1) + _off(b, b1),
            (
                Part((b1, a1, c), (1, 0, 2), (0, 0, 0), (1, 1, 1)),
                Part((a, b - b1, c), (0, 1, 2), (0, b1, 0), (1, 1, 1)),
                Part((b1, a - a1, c), (1, 0, 2), (a - 1, b1 - 1, 0), (-1, -1, 1)),
            ),
        )


def _folds(a: int, b: int, c: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    """The curve of eight octants is not symmetric in b and c: both ways are offered."""
    for (y, b_), (z, c_) in (((1, b), (2, c)), ((2, c), (1, b))):
        for a1, b1, c1 in product(_middles(a), _middles(b_), _middles(c_)):
            yield (
                _off(a, a1) + _off(b_, b1) + _off(c_, c1),
                tuple(
                    Part(sizes, sides, _cell(y, start), signs)
                    for sizes, sides, start, signs in (
                        ((b1, c1, a1), (y, z, 0), (0, 0, 0), (1, 1, 1)),
                        ((c_, a1, b_ - b1), (z, 0, y), (0, b1, 0), (1, 1, 1)),
                        ((a, b1, c_ - c1), (0, y, z), (0, b1 - 1, c_ - 1), (1, -1, -1)),
                        ((c_, a - a1, b_ - b1), (z, 0, y), (a - 1, b1, c_ - 1), (-1, -1, 1)),
                        ((b1, c1, a - a1), (y, z, 0), (a - 1, b1 - 1, 0), (-1, 1, -1)),
                    )
                ),
            )


def _cell(y: int, start: Sizes) -> Sizes:
    """A cell given as (a, folded side, other side), in the order of the box's sides."""
    return start if y == 1 else (start[0], start[2], start[1])


def _middles(n: int) -> range:
    """Sizes of the first part of n, at least 1 and less than n."""
    return range(max(1, n // 2 - NEAR_THE_MIDDLE), min(n, n // 2 + NEAR_THE_MIDDLE + 1))


def _off(n: int, part: int) -> float:
    """Distance of a split from the best one: in the middle, at a multiple of four or at least of
    two, whose parts can be split in the middle again."""
    odd = 0 if n <= 4 or part % 4 == 0 else 2 - (part % 2 == 0)
    return abs(part / n - 0.5) + ODD * odd
