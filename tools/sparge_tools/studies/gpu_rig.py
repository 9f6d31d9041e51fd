"""One card, as the measurements of gpu_estimates.py use it: timed calls, launches one by one.

A dry rig runs everything and times nothing: its seconds are None, and what is made of them is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge import DEFAULT, Recipe, attention
from sparge.backends.triton import NAME
from sparge.backends.triton.launch import Launch, watch_launches
from sparge.backends.triton.rates import Card
from sparge.routing.crossover import Crossover
from sparge.support.turns import timer

REPEAT = 10


@dataclass(frozen=True)
class Rig:
    """device: such as "cuda:0". length, heads: of the calls. measured: the calibrated costs.
    estimated: what would be assumed without them. suite: the result of the conformance suite.
    bench: the rows of `sparge bench`. dry: nothing is timed."""

    device: str
    card: Card
    length: int
    heads: int
    measured: Crossover | None
    estimated: Crossover | None
    suite: dict[str, Any]
    bench: list[dict[str, Any]]
    dry: bool = False

    @property
    def clocks(self) -> float:
        """Of all multiprocessors in a second."""
        return self.card.processors * self.card.clock

    def inputs(self, length: int, D: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        drawn = (torch.randn(1, self.heads, length, D, dtype=dtype) for _ in range(3))
        return [x.to(self.device) for x in drawn]

    def seconds(self, work: Callable[[], Any]) -> float | None:
        """Median of some runs, waiting for the card; after one that may compile."""
        work()
        if self.dry:
            return None
        timed = timer(self.device)
        return statistics.median(timed(work)[0] for _ in range(REPEAT))

    def launches(self, D: int = 128, recipe: Recipe = DEFAULT, **options: Any) -> list[Launch]:
        """Those of one call, which runs."""
        given = {"is_causal": True, "recipe": recipe, "backend": NAME, **options}
        with watch_launches() as launches:
            attention(*self.inputs(self.length, D), **given)
        return launches

    def seconds_of(self, launch: Launch) -> float | None:
        """Of one launch again, on the tensors that it had."""
        run = launch.kernel[launch.grid]
        return self.seconds(lambda: run(**launch.arguments, **launch.options))

    def machine_code(self, launch: Launch) -> dict[str, Any]:
        """What the driver tells of a kernel that it has loaded."""
        kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
        kernel.run  # noqa: B018  loads it
        facts = {"registers": kernel.n_regs, "spilled": kernel.n_spills}
        return {**facts, "shared_bytes": kernel.metadata.shared}


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
