"""Tensors with the tokens of a grid put into an order, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .orders import HILBERT, ROW, check_grid, check_order, order_of_all


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
    n, L = T * H * W, _tokens_along(x, dim)
    if start < 0 or start + n > L:
        raise ValueError(
            f"grid {T}×{H}×{W} does not match the tokens: it has {n} tokens from {start} on, and "
            f"dimension {dim} of a tensor {list(x.shape)} has {L}"
        )
    if check_order(order) == ROW:
        return x
    index = order_of_all((T, H, W), order, inverse=back, start=start, length=L, device=x.device)
    return x.index_select(dim, index)


def _tokens_along(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of the tensor, got {dim}")
    return x.shape[dim]
