"""A Hilbert curve through a box of any size.

Every walk starts in a corner of its box and ends in the corner at the far end of the box's first
side. A walk is joined from walks of parts, in one of three ways; b ≥ c are the other two sides:

    along    a is long        two parts, one after the other
    arch     c is short       up on the left, across the top, down on the right; c is not split
    folds    a, b, c alike    the eight octants of the classical curve, as five parts

A walk in unit steps alternates between cells of even and odd coordinate sum, so one of a × b × c
cells between these corners exists only if a·(b·c - 1) is even. Sides are split near the middle,
and so that all parts have such a walk where the box has one; otherwise one part takes one diagonal
step. A size that recurs is walked once, so a curve costs a few hundred tensor operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

Sizes = tuple[int, int, int]
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
