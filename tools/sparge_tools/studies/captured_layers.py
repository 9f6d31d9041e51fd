"""Queries, keys and values of the zoo's plain modules, captured while they do their task."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor

from sparge import accelerate
from sparge.routing import DENSE

from .. import zoo

Captured = tuple[str, Tensor, Tensor, Tensor, tuple[int, int, int]]
"""Model, query, key, value and grid."""
LEAST_TOKENS = 2048


def capture_layers(name: str, inputs: int) -> Iterator[Captured]:
    """Every layer with at least 2048 tokens on a grid, for some inputs of the model's task."""
    loaded = zoo.load_module(name)
    seen: list[tuple[Tensor, ...]] = []

    def keep(query: Tensor, key: Tensor, value: Tensor, facts: Any) -> None:
        seen.append(tuple(x.detach().float().clone() for x in (query, key, value)))

    for given in loaded.task.inputs(inputs):
        seen.clear()
        with accelerate(loaded.model, backend=DENSE) as handle:
            for layer in handle.report().layers:
                handle.tap(layer.name, keep)
            loaded.task.run(loaded.model, given)
        for query, key, value in seen:
            grid = loaded.grids(query.shape[2])
            if grid is not None and prod(grid) >= LEAST_TOKENS:
                yield name, query, key, value, grid
