"""Whether the Triton backend is faster than dense attention on a card.

By numbers that `sparge doctor --calibrate` measured on it and stored, else by a roofline estimate
(roofline.py). Nothing is ever measured inside a user's call: compiling every kernel for every
precision takes a minute. No number of a tensor is read either.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...backend import Estimate
from ...blockplan import BlockPlan
from ...call import Call
from .. import cost_file
from ..crossover import Crossover, decided_without_numbers
from .packages import triton_version
from .roofline import Card, card_of, roofline

UNREAD_DENSITY = 0.75
"""What `KeepMass` is expected to keep of a long row. More than on the CPU (`MASS_DENSITY`), where a
plan that keeps more goes dense after all: here the plan stays on the device, unread."""

Where = tuple[str, int]
"""Type and index of a device."""


class GpuCost:
    """One object for the process; numbers are kept by device."""

    def __init__(self) -> None:
        self._crossovers: dict[Where, Crossover | str] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        return self._generation

    def before(self, call: Call) -> Estimate:
        if call.device == "cpu" and not call.needs_grad:
            return Estimate(False, "Triton's interpreter runs it on the cpu: for tests only")
        if (decided := decided_without_numbers(call)) is not None:
            return decided
        found = self.crossover(*call.where)
        if isinstance(found, str):
            return Estimate(False, f"{found}; `sparge doctor --calibrate` measures it")
        if not found.knows(call):
            what = f"{call.recipe.precision} of {str(call.dtype).removeprefix('torch.')}"
            return Estimate(False, f"{what} was not measured on this card")
        # Settled: no call improves these numbers, so none is asked to.
        return replace(found.estimate(call, mass_density=UNREAD_DENSITY), settled=True)

    def after(self, call: Call, plan: BlockPlan) -> Estimate | None:
        return None

    def calibrate(self, call: Call) -> bool:
        return False

    def crossover(self, kind: str, index: int) -> Crossover | str:
        """The numbers in force on a device: measured or estimated; or why there are none."""
        where = (kind, index)
        found = self._crossovers.get(where)
        if found is None:
            card = card_of(*where)
            read, _ = cost_file.read(key_of(card), complete=False)
            found = self._crossovers[where] = read or roofline(card)
        return found

    def adopt(self, crossover: Crossover, kind: str, index: int) -> str:
        """Use numbers measured on a device from now on and store them; returns why they are not
        stored, or ""."""
        self._crossovers[kind, index] = crossover
        self._generation += 1
        return cost_file.write(crossover)


def key_of(card: Card) -> dict[str, str]:
    """What a measurement depends on; with another key it is another measurement."""
    return {
        "device": card.name,
        "architecture": card.architecture,
        "torch": torch.__version__,
        "triton": triton_version() or "none",
        "sparge": cost_file.sparge_version(),
    }


COST = GpuCost()
