"""Whether the native core is faster than dense attention, by numbers measured on this machine.

The numbers are measured at the first call that needs them, kept in a file (cost_file.py) and read
by later processes. `SPARGE_CALIBRATE=0` turns measuring inside a user's call off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import torch

from ...routing import cost_file
from ...routing.crossover import CLEARLY, Crossover, decided_without_numbers
from ...routing.measure_apart import calibration_allowed, measure_apart
from ...values.backend import Estimate
from ...values.blockplan import BlockPlan
from ...values.call import Call
from . import library
from .cost_key import key_of
from .crossover import BUILT_IN

FEWEST_PAIRS = 1 << 19
"""Calls of fewer query-key pairs take a millisecond or two; planning alone takes half of that."""
RETRY_AFTER = timedelta(hours=1)
"""A measurement of a busy machine is repeated by a process that starts this much later."""

Where = tuple[str, int]


class CpuCost:
    """One object for the process; numbers are kept by instruction set and number of threads."""

    def __init__(self) -> None:
        self._crossovers: dict[Where, Crossover] = {}
        self._failures: dict[Where, str] = {}
        # Who measures. By process too: a fork does not wait for a thread that it does not have.
        self._measuring: dict[tuple[int, Where], object] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        return self._generation

    def before(self, call: Call) -> Estimate:
        if (decided := decided_without_numbers(call)) is not None:
            return decided
        pairs = call.B * call.Hq * call.Lq * call.Lk
        if pairs < FEWEST_PAIRS:
            return Estimate(
                False,
                f"{pairs} query-key pairs are fewer than {FEWEST_PAIRS}; dense attention is done "
                "before a plan is made",
            )
        estimate = self.crossover().estimate(call)
        if failure := self.failure():
            reason = f"{estimate.reason}; calibration failed: {failure}"
            return replace(estimate, reason=reason)
        return estimate

    def after(self, call: Call, plan: BlockPlan) -> Estimate | None:
        return self.crossover().estimate_plan(call, plan)

    def after_counts(self, call: Call, kept: int, allowed: int) -> Estimate:
        """`after` of a plan without raised heads, from the blocks that it keeps and may keep."""
        blocks = call.B * call.Hq * call.n_q * call.n_k
        return self.crossover().estimate_kept(call, kept, allowed, blocks)

    def dense_in_pack(self, calls: Mapping[int, Call]) -> dict[int, str]:
        """Why sequences are faster in one pack of the native core, every block kept, than by
        torch one after another; none if they do not save what the pack itself costs."""
        crossover = self.crossover()
        if not crossover.measured:
            return {}
        found, saved = {}, 0.0
        for i, call in calls.items():
            ours, dense = crossover.predict_in_pack(call), crossover.predict_dense(call)
            if ours < CLEARLY * dense:
                saved += dense - ours
                found[i] = (
                    "dense attention in a pack, every block kept: predicted "
                    f"{ours * 1e3:.2f} ms, torch's {dense * 1e3:.2f} ms ({crossover.words})"
                )
        return found if found and saved > crossover.cost_of_call(call) else {}

    def crossover(self) -> Crossover:
        """The numbers in force: measured, read from the file, or the built-in estimate."""
        where = _where()
        found = self._crossovers.get(where)
        if found is None:
            read, _ = cost_file.read(key_of(*where))
            found = self._crossovers[where] = read or BUILT_IN
        return found

    def failure(self) -> str:
        """Why the last calibration of this process failed; "" if none did."""
        return self._failures.get(_where(), "")

    def adopt(self, crossover: Crossover) -> str:
        """Use these numbers from now on and store them; returns why they are not stored, or ""."""
        where = (crossover.key["isa"], int(crossover.key["threads"]))
        self._crossovers[where] = crossover
        self._failures.pop(where, None)
        self._generation += 1
        return cost_file.write(crossover)

    def calibrate(self, call: Call) -> bool:
        """Measure once per process, if nothing was measured or only on a busy machine long ago."""
        if not library.available():
            return False
        where, current = _where(), self.crossover()
        if not calibration_allowed() or (current.measured and not _stale(current)):
            return False
        own = object()
        if self._measuring.setdefault((os.getpid(), where), own) is not own:
            return False  # another caller measures or has measured; nobody waits for it
        try:
            measured = _measure_apart()
        except Exception as error:
            self._failures[where] = f"{type(error).__name__}: {error}"
            self._generation += 1  # reasons made before do not know of the failure
            return True
        except BaseException:  # Ctrl-C; the next call tries again
            del self._measuring[os.getpid(), where]
            raise
        if current.measured and not measured.steady and measured.disturbance > current.disturbance:
            return False
        self.adopt(measured)
        return True


def _where() -> Where:
    return library.chosen_isa(library.available()), torch.get_num_threads()


def _stale(crossover: Crossover) -> bool:
    if crossover.steady:
        return False
    try:
        made = datetime.fromisoformat(crossover.date)
        return datetime.now(timezone.utc) - made > RETRY_AFTER
    except (ValueError, TypeError):
        return True


def _measure_apart() -> Crossover:
    from .calibrate import measure

    return measure_apart(measure)


COST = CpuCost()
