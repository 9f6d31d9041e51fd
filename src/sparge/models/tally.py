"""What was counted of the calls of one attention layer, in any model or engine, and its report.

A call on an accelerator is not waited for: its counts and times stay there until they can be read
without waiting, or a report asks.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..values.backend import DENSE
from ..values.recipe import Recipe
from ..values.run import Run
from ..values.schedule import Context
from .report import OWN, LayerReport, RecipeReport, StepReport

MOST_UNREAD = 64
"""Runs of a layer that may be unread. The queue of launches keeps a host from being that many calls
ahead, so this only bounds memory: where there are more, the oldest is waited for."""


def is_sparse(run: Run) -> bool:
    """Whether a sparse backend ran, as far as is known without its numbers."""
    if run.ring is None:
        return run.backend != DENSE
    # A rank of a ring counts its own blocks, and none by head.
    return bool(run.kept_by_head) or not run.routed_to_dense


@dataclass
class StepTally:
    """Sums over the calls of one step of a run; by head over those that ran sparse."""

    noise_level: float | None = None
    calls: int = 0
    kept: int = 0
    allowed: int = 0
    kept_by_head: list[int] = field(default_factory=list)
    allowed_by_head: list[int] = field(default_factory=list)

    def add(self, kept: int, allowed: int, run: Run | None = None) -> None:
        self.calls += 1
        self.kept += kept
        self.allowed += allowed
        if run is not None and run.kept_by_head:
            self.kept_by_head = _added(self.kept_by_head, run.kept_by_head)
            self.allowed_by_head = _added(self.allowed_by_head, run.allowed_by_head)

    def report(self, step: int) -> StepReport:
        heads = _shares(self.kept_by_head, self.allowed_by_head)
        return StepReport(step, self.noise_level, self.calls, self.kept, self.allowed, heads)


@dataclass
class Tally:
    """Sums over the calls of one layer, from any thread; `by_head` over those that ran sparse.

    captured: calls that a graph holds, by what they run, which are not in the other sums. unread:
    runs in the order of their calls, each with the function that adds it up.
    """

    ran: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    by_recipe: dict[Recipe, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_head: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    by_step: dict[int, StepTally] = field(default_factory=dict)
    parallel: Counter[str] = field(default_factory=Counter)
    captured: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    unread: deque[tuple[Run, Callable[[Run], None]]] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        run: Run,
        *,
        recipe: Recipe,
        context: Context | None = None,
        seconds: float | None = None,
    ) -> None:
        """A call of this recipe, or each sequence of a pack as a call of its own; added up once its
        numbers can be read without waiting.

        seconds: of the call, by the caller's clock; None takes the time of its stages.
        """
        with self.lock:
            self.seconds += seconds or 0.0
            timed = seconds is None
            for part in run.parts or (run,):
                if part.captured:  # nothing may be asked of the device now
                    self.captured[_way(part)] += 1
                    continue
                step = self._step(context)
                add_up = partial(self._add_up, recipe=recipe, step=step, timed=timed)
                self.unread.append((part, add_up))
                while len(self.unread) > MOST_UNREAD or (self.unread and self.unread[0][0].ready()):
                    self._add_up_oldest()

    def add_own(
        self, reason: str, seconds: float, blocks: int, context: Context | None = None
    ) -> None:
        """A call of the model's (or the engine's) own attention, over this many blocks."""
        with self.lock:
            self.ran[OWN] += 1
            self.fallbacks[reason] += 1
            self.seconds += seconds
            self.counts.update(kept=blocks, allowed=blocks)
            self._step(context).add(blocks, blocks)

    def add_unrecorded(self, calls: int, seconds: float) -> None:
        """Sparse calls of which nothing was counted."""
        with self.lock:
            self.ran["not recorded"] += calls
            self.seconds += seconds

    def add_parallel(self, way: str) -> None:
        """A call over several processes ran in this way."""
        with self.lock:
            self.parallel[way] += 1

    def add_error(self, error: Sequence[float]) -> None:
        """What a sparse call was measured to be wrong by, for each head."""
        with self.lock:
            if len(error) != len(self.by_head["error"]):
                self.counts["measured"] = 0  # sums by head begin again
            self.by_head["error"] = _added(self.by_head["error"], error)
            self.counts["measured"] += 1

    def _add_up_oldest(self) -> None:
        run, add_up = self.unread.popleft()
        add_up(run)

    def _add_up(self, run: Run, *, recipe: Recipe, step: StepTally, timed: bool) -> None:
        self.seconds += run.seconds["total"] if timed else 0.0
        self.counts.update(kept=run.kept, allowed=run.allowed)
        step.add(run.kept, run.allowed, run)
        self.counts["estimated"] += run.cost_source == "estimate"
        if run.ring is not None:
            self.counts.update(sent=run.ring.bytes_sent, dense_sent=run.ring.dense_bytes)
        self.by_recipe[recipe].update(calls=1, kept=run.kept, allowed=run.allowed)
        self.ran[_way(run)] += 1
        if not is_sparse(run):
            self.fallbacks[run.reason] += 1
            return
        self.counts.update(pv_skips=run.pv_skips, pv_groups=run.pv_groups)
        self.counts.update(sparse=1, sparse_kept=run.kept, sparse_allowed=run.allowed)
        if run.kept_by_head:
            for name, numbers in (("kept", run.kept_by_head), ("allowed", run.allowed_by_head)):
                self.by_head[name] = _added(self.by_head[name], numbers)

    def _step(self, context: Context | None) -> StepTally:
        """The sums of a step; outside of a run nothing is kept by step."""
        if context is None or context.step is None:
            return StepTally()
        return self.by_step.setdefault(context.step, StepTally(context.noise_level))

    def sparse_density(self, *, calls: int) -> float | None:
        """Of the sparse calls that were read so far; None before there are this many."""
        with self.lock:
            enough = self.counts["sparse"] >= calls and self.counts["sparse_allowed"]
            return self._sparse_density() if enough else None

    def _sparse_density(self) -> float:
        kept, allowed = self.counts["sparse_kept"], self.counts["sparse_allowed"]
        return kept / allowed if allowed else 1.0

    def report(self, name: str, recipe: Recipe | None) -> LayerReport:
        """What was counted so far; waits for calls that a device has not finished."""
        with self.lock:
            while self.unread:
                self._add_up_oldest()
            counts = self.counts
            return LayerReport(
                name=name,
                calls=sum(self.ran.values()),
                ran=dict(self.ran),
                kept=counts["kept"],
                allowed=counts["allowed"],
                sparse_density=self._sparse_density(),
                density_by_head=_shares(self.by_head["kept"], self.by_head["allowed"]),
                pv_skipped=counts["pv_skips"] / max(counts["pv_groups"], 1),
                error_by_head=tuple(e / counts["measured"] for e in self.by_head["error"]) or None,
                seconds=self.seconds,
                fallbacks=dict(self.fallbacks),
                recipe=recipe,
                by_recipe=tuple(RecipeReport(r, **n) for r, n in self.by_recipe.items()),
                estimated=counts["estimated"],
                parallel=dict(self.parallel),
                bytes_sent=counts["sent"],
                dense_ring_bytes=counts["dense_sent"],
                by_step=tuple(each.report(step) for step, each in sorted(self.by_step.items())),
                captured=dict(self.captured),
            )


def _way(run: Run) -> str:
    """What ran, as reports call it."""
    return f"{run.backend} ({run.isa})" if is_sparse(run) else "dense"


def _added(sums: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """Sums by head; they begin again where a call has another number of heads than those before.

    A model that is split by heads while it is accelerated has fewer from then on.
    """
    if len(sums) != len(numbers):
        sums = [0] * len(numbers)
    return [a + b for a, b in zip(sums, numbers, strict=True)]


def _shares(kept: Sequence[int], allowed: Sequence[int]) -> tuple[float, ...]:
    return tuple(k / max(a, 1) for k, a in zip(kept, allowed, strict=True))
