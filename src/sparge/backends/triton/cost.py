"""Whether the Triton backend is faster than dense attention on a card.

By numbers that were measured on it, else by a roofline estimate (roofline.py). The first call that
might profit measures what its kind needs (dtype, precision, head dim): seconds, mostly compilation,
kept in a file for later processes. `sparge doctor --calibrate` measures everything.
`SPARGE_CALIBRATE=0` turns measuring inside a user's call off. No call waits for a number of a
tensor: what layers keep is learnt afterwards (densities.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ...routing import cost_file
from ...routing.crossover import Crossover, costs_of, decided_without_numbers
from ...routing.densities import Arrived, Densities, counts_later
from ...routing.measure_apart import calibration_allowed, measure_apart
from ...support.accelerator import capturing
from ...values.backend import Estimate
from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.recipe import KeepAll
from .packages import triton_version
from .roofline import Card, card_of, roofline

LONG_CALL = 1e-3
"""Seconds of dense attention, as estimated, from which a call is worth measuring for. Launches of
ours take a third of it."""
LONG_PAIRS = 1 << 30
"""The same where nothing is estimated: 8192 tokens of 16 heads."""
IN_REACH = 2.0
"""An estimate may be off by this much. Beyond, measuring would not change the choice."""
WAY_OUT = '`sparge doctor --calibrate` measures it; backend="triton" runs the kernels anyway'

Where = tuple[str, int]
"""Type and index of a device."""
LOGGER = logging.getLogger("sparge")


@dataclass
class _Known:
    """One card, as this process knows it. tried: sets of costs that a call has begun to measure.
    told: kinds of reasons for dense attention that were logged."""

    card: Card
    estimate: Crossover | str
    measured: Crossover | None
    failure: str = ""
    tried: set[tuple[str, ...]] = field(default_factory=set)
    measuring: bool = False
    told: set[str] = field(default_factory=set)

    def numbers(self, call: Call) -> Crossover | str:
        """Measured ones for the kind of a call, else the estimate, or why there is none."""
        if self.measured is not None and self.measured.knows(call):
            return self.measured
        return self.estimate


class GpuCost:
    """One object for the process; numbers are kept by device, densities by layer."""

    def __init__(self) -> None:
        self._cards: dict[Where, _Known] = {}
        self._densities = Densities()
        self._under_way: list[tuple[Call, Arrived]] = []
        self._looks = True
        self._lock = threading.Lock()
        self._generation = 0

    @property
    def generation(self) -> int:
        return self._generation

    def before(self, call: Call) -> Estimate:
        if call.device == "cpu" and not call.needs_grad:
            return Estimate(False, "Triton's interpreter runs it on the cpu: for tests only")
        if (decided := decided_without_numbers(call)) is not None:
            return decided
        self._take_in_what_arrived(call.where)
        known = self._known(call.where)
        numbers = known.numbers(call)
        if isinstance(numbers, str):
            estimate = Estimate(False, f"{numbers}; {WAY_OUT}")
        else:
            seen = self._densities.learnt(call) is not None
            why = "as this layer kept before" if seen else ""
            estimate = numbers.estimate(call, self._densities.expected(call), why=why)
        if known.failure and not (isinstance(numbers, Crossover) and numbers.measured):
            reason = f"{estimate.reason}; calibration failed: {known.failure}"
            estimate = replace(estimate, reason=reason)
        estimate = replace(estimate, settled=not self._would_measure(call, known))
        if estimate.settled and not estimate.faster:
            self._tell(call, known, estimate)
        return estimate

    def after(self, call: Call, plan: BlockPlan) -> None:
        """Keeps the choice: the plan is on the device. What it keeps is learnt later."""
        self._take_in_what_arrived(call.where)
        on_host = plan.counts.device.type in ("cpu", "meta")
        if (
            on_host
            or not self._looks
            or capturing(torch.device(*call.where))
            or not self._densities.due(call)
        ):
            return
        try:
            arrived = counts_later(plan)
        except RuntimeError:  # no pinned memory here; a call does not fail for that
            self._looks = False
            return
        with self._lock:
            self._under_way.append((call, arrived))

    def learn(self, call: Call, kept: int, allowed: int) -> None:
        """Take in what a call kept, from whoever has read it. Choices are made again only if this
        one would be another."""
        before = self._densities.expected(call)
        if not self._densities.learn(call, kept, allowed):
            return
        numbers = self._known(call.where).numbers(call)
        if isinstance(numbers, str):
            return
        was, now = (
            numbers.estimate(call, density).faster
            for density in (before, self._densities.expected(call))
        )
        if was != now:
            self._generation += 1

    def calibrate(self, call: Call) -> bool:
        """Measure what calls of this kind need, once per card and process. Nobody waits but the
        caller, and nothing is measured while its stream is captured in a graph."""
        known = self._known(call.where)
        if not self._would_measure(call, known) or capturing(torch.device(*call.where)):
            return False
        wanted = costs_of(call)
        with self._lock:
            if known.measuring or wanted in known.tried:
                return False
            known.measuring = True
            known.tried.add(wanted)
        try:
            measured = measure_apart(_measurement(call.where, wanted))
        except Exception as error:
            known.failure = f"{type(error).__name__}: {error}"
            return True
        except BaseException:  # Ctrl-C; the next call tries again
            known.tried.discard(wanted)
            raise
        else:
            self.adopt(measured, *call.where)
            return True
        finally:
            known.measuring = False
            self._generation += 1  # also for choices that were made meanwhile

    def crossover(self, kind: str, index: int) -> Crossover | str:
        """The numbers in force on a device: measured or estimated; or why there are none."""
        known = self._known((kind, index))
        return known.measured or known.estimate

    def failure(self, kind: str, index: int) -> str:
        """Why the last calibration inside a call failed; "" if none did."""
        return self._known((kind, index)).failure

    def adopt(self, crossover: Crossover, kind: str, index: int) -> str:
        """Use numbers measured on a device from now on, with those known before that they do not
        replace, and store them; returns why they are not stored, or ""."""
        known = self._known((kind, index))
        stored, _ = cost_file.read(crossover.key, complete=False)
        for older in (known.measured, stored):  # another process may have stored more
            if older is not None and older.key == crossover.key:
                crossover = replace(crossover, costs={**older.costs, **crossover.costs})
        known.measured, known.failure = crossover, ""
        self._generation += 1
        return cost_file.write(crossover)

    def _known(self, where: Where) -> _Known:
        found = self._cards.get(where)
        if found is None:
            card = card_of(*where)
            read, _ = cost_file.read(key_of(card), complete=False)
            made = _Known(card, roofline(card, triton_version() or ""), read)
            found = self._cards.setdefault(where, made)
        return found

    def _would_measure(self, call: Call, known: _Known) -> bool:
        """Whether numbers are missing that a call should measure."""
        if known.numbers(call) is known.measured or costs_of(call) in known.tried:
            return False
        if not calibration_allowed() or not _is_long(call, known.estimate):
            return False
        if isinstance(known.estimate, str):
            return True
        ours = known.estimate.predict_sparse(call, self._densities.expected(call))
        return ours < IN_REACH * known.estimate.predict_dense(call)

    def _take_in_what_arrived(self, where: Where) -> None:
        if not self._under_way or capturing(
            torch.device(*where)
        ):  # asking for an event would end the capture
            return
        with self._lock:
            looked = [(call, arrived()) for call, arrived in self._under_way]
            pairs = zip(self._under_way, looked, strict=True)
            self._under_way = [each for each, (_, counts) in pairs if counts is None]
        for call, counts in looked:
            if counts is not None:
                self.learn(call, *counts)

    def _tell(self, call: Call, known: _Known, estimate: Estimate) -> None:
        """Log, once for a card and kind of reason, that a long call runs dense after all. Where the
        card was measured there is nothing to be done about it; else there is, hence the level."""
        numbers = known.numbers(call)
        keeps_all = isinstance(call.recipe.keep, KeepAll)
        if known.measuring or keeps_all or not _is_long(call, numbers):
            return
        kind = estimate.source or "no numbers"
        if kind in known.told:
            return
        known.told.add(kind)
        measured = numbers is known.measured
        way_out = 'backend="triton" runs the kernels anyway' if measured else WAY_OUT
        LOGGER.log(
            logging.INFO if measured else logging.WARNING,
            'backend="auto" runs dense attention on %s (%s), for %s and calls like it: %s; %s',
            known.card.name,
            ":".join(map(str, call.where)),
            call,
            estimate.reason.removesuffix(f"; {WAY_OUT}"),
            way_out,
        )


def _is_long(call: Call, numbers: Crossover | str) -> bool:
    if isinstance(numbers, str):
        return call.B * call.Hq * call.Lq * call.Lk >= LONG_PAIRS
    return numbers.predict_dense(call) >= LONG_CALL


def _measurement(
    where: Where, wanted: tuple[str, ...]
) -> Callable[[Callable[[], None]], Crossover]:
    from . import TRITON_BACKEND, calibrate

    def measure(proceed: Callable[[], None]) -> Crossover:
        return calibrate.measure_for_call(TRITON_BACKEND, *where, wanted=wanted, proceed=proceed)

    return measure


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
