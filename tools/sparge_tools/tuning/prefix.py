"""Run a model from a later block on: the blocks before it return what they returned before.

A change in one layer leaves everything before it as it was; with the outputs of the blocks at
hand, measuring layer after layer takes half the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class Prefix:
    """The blocks of a model in order, and their outputs on one input.

    block_of: of each attention module, the number of its block; empty where the attention modules
    are not spread over one list of blocks, and nothing can be skipped.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.blocks, self.block_of = _blocks(model, names)
        self._outputs: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what every block returns."""
        found: dict[int, Any] = {}
        hooks = [
            block.register_forward_hook(lambda _m, _a, out, i=i: found.__setitem__(i, out))
            for i, block in enumerate(self.blocks)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._outputs = (
            [found[i] for i in range(len(found))]
            if set(found) == {*range(len(self.blocks))}
            else []
        )

    @contextmanager
    def before(self, name: str) -> Iterator[None]:
        """Skip the blocks before that of an attention module, where their outputs are known."""
        n = self.block_of.get(name, 0) if self._outputs else 0
        skipped = list(zip(self.blocks[:n], self._outputs, strict=False))
        had = [vars(block).get("forward") for block, _ in skipped]
        for block, output in skipped:
            block.forward = lambda *_a, _output=output, **_k: _output
        try:
            yield
        finally:
            for (block, _), forward in zip(skipped, had, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    def forget(self) -> None:
        self._outputs = []


def _blocks(model: nn.Module, names: Sequence[str]) -> tuple[list[nn.Module], dict[str, int]]:
    """The list of blocks that holds every attention module, and the block of each."""
    there = dict(model.named_modules())
    lists: set[str] = set()
    numbers: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        places = [
            (".".join(parts[:i]), int(parts[i]))
            for i in range(len(parts))
            if parts[i].isdigit() and isinstance(there.get(".".join(parts[:i])), nn.ModuleList)
        ]
        if not places:
            return [], {}
        where, numbers[name] = places[0]
        lists.add(where)
    if len(lists) != 1:
        return [], {}
    return list(there[lists.pop()].children()), numbers
