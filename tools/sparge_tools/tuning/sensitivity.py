"""How far each layer's attention error moves the model's output, measured one layer at a time.

A dense run of one input, then each layer alone sparse at a few levels. A change in one layer leaves
everything before it as it was, so the blocks before it return what they returned in the dense run:
that takes half the time. Every result goes to the state as soon as it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

from torch import nn

from sparge import accelerate

from .levels import Level, Option, ScoredLayer, TunedModel, settings_of
from .tracing import Inputs, inputs_digest


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
        whole = len(found) == len(self.blocks)
        self._outputs = [found[i] for i in range(len(found))] if whole else []

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


ANCHORS = (0.0, 0.1, 0.35)
"""Errors of a layer's attention at which the model's output is measured; the change between them
is taken as proportional to the squared error. At 0 everything is kept: that is the precision."""
SAME = 1e-9
"""Changes below this are those of no change at all."""


@dataclass(frozen=True)
class Sensitivity:
    """The change of the model's output at some errors of one layer, ascending from 0."""

    errors: tuple[float, ...]
    changes: tuple[float, ...]

    def change_at(self, error: float) -> float:
        """Beyond what everything kept changes; linear in the squared error."""
        x = [e * e for e in self.errors]
        y = list(accumulate((max(c - self.changes[0], 0.0) for c in self.changes), max))
        at, last = error * error, len(x) - 1
        for i in range(1, len(x)):
            if at <= x[i] or i == last:
                low, rise = y[i - 1], (y[i] - y[i - 1]) / (x[i] - x[i - 1])
                return low + rise * (at - x[i - 1])
        return 0.0


def anchor_levels(levels: Sequence[Level]) -> list[Level]:
    """The levels that are measured: everything kept, and those nearest to the other anchors."""
    chosen, wrong = [levels[0]], [level for level in levels if level.error > 0.0]
    for anchor in ANCHORS[1:]:
        near = min(wrong, key=lambda each: abs(math.log(each.error / anchor)), default=None)
        if near is not None and near.error > chosen[-1].error:
            chosen.append(near)
    return chosen


def measure_sensitivity(
    tuned: TunedModel, given: Inputs, layers: Mapping[str, ScoredLayer]
) -> dict[str, Sensitivity]:
    """Every layer alone at its anchor levels, on one input.

    One text has thousands of positions, and an allocation depends little on an error of some per
    cent in the sensitivities; the scores are of all inputs.
    """
    digest, prefix = inputs_digest(given)[:12], Prefix(tuned.model, tuned.names)
    dense = cache(partial(_dense_run, tuned, prefix, given))
    found = {}
    for name, layer in layers.items():
        changes = []
        few = anchor_levels(layer.levels)
        for level in few:
            measure = partial(_change_of, tuned, prefix, given, dense, name, layer, level)
            changes.append(tuned.state.once(f"change {digest} {name} {level.error:.6f}", measure))
        found[name] = Sensitivity(tuple(level.error for level in few), tuple(changes))
        tuned.step(f"measured {name} on input {digest}")
    return found


def _dense_run(tuned: TunedModel, prefix: Prefix, given: Inputs) -> Any:
    """The dense output; the outputs of the blocks too, if the model can go on from them."""
    with prefix.recording():
        dense = tuned.measure.run(given)
    last = max(prefix.block_of, key=prefix.block_of.__getitem__, default=None)
    if last is not None:
        try:
            with prefix.before(last):
                again = tuned.measure.change(dense, tuned.measure.run(given), given)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
            again = math.inf  # a block that needs more of those before it than their output
        if not again < SAME:
            prefix.block_of = {}
    return dense


def _change_of(
    tuned: TunedModel,
    prefix: Prefix,
    given: Inputs,
    dense: Callable[[], Any],
    name: str,
    layer: ScoredLayer,
    level: Level,
) -> float:
    whole = dense()
    settings = settings_of(tuned.recipe, level.masses, is_causal=layer.is_causal)
    recipe = settings.recipe_with(settings.heads)
    with (
        accelerate(tuned.model, recipe, layers=lambda each: each == name, backend=layer.backend),
        prefix.before(name),
    ):
        change = tuned.measure.change(whole, tuned.measure.run(given), given)
    if not math.isfinite(change):
        raise ValueError(f"the output must be finite to be compared; with {name} sparse it is not")
    return change


def layer_options(
    layers: Mapping[str, ScoredLayer], sensitivities: Mapping[str, Sensitivity]
) -> dict[str, list[Option]]:
    """The options of every layer: its own dense attention, then its levels.

    The precision's change counts in a layer that is not dense, beyond the least that any layer
    shows: rounding in the layers behind moves the output by that much once, however many change.
    """
    rounding = min((each.changes[0] for each in sensitivities.values()), default=0.0)
    options = {}
    for name, layer in layers.items():
        allowed, of = sum(layer.curves.allowed), sensitivities[name]
        fixed = max(of.changes[0] - rounding, 0.0)
        options[name] = [Option(allowed, 0.0)] + [
            Option(level.density * allowed, fixed + of.change_at(level.error))
            for level in layer.levels
        ]
    return options
