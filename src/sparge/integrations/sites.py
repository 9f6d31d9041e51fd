"""One attention module of a model: what it shall do, and what it has done."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..dispatch import AUTO
from ..recipe import Recipe
from ..record import Run, unwatch, watch

OWN = "own attention"
Tap = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], None]
"""query, key, value, and the other arguments of `attention`."""
_numbers = itertools.count()


@dataclass(frozen=True)
class LayerReport:
    """What ran in one attention module since the start or the last `reset()`.

    ran: how often each way ran. fallbacks: why calls went to dense or to the model's own attention.
    density, density_by_head, pv_skipped: over the calls that ran sparse; 1 and empty without any.
    error_by_head: mean relative L1 against exact attention, where it was asked for.
    seconds: time in attention; on a GPU, the model's own attention is only launched in it.
    """

    name: str
    calls: int
    ran: dict[str, int]
    density: float
    density_by_head: tuple[float, ...]
    pv_skipped: float
    error_by_head: tuple[float, ...] | None
    seconds: float
    fallbacks: dict[str, int]
    recipe: Recipe | None

    @property
    def error(self) -> float | None:
        return None if self.error_by_head is None else _mean(self.error_by_head)

    @property
    def sparse_calls(self) -> int:
        return sum(n for way, n in self.ran.items() if way not in (OWN, "dense"))

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {
            "density_by_head": list(self.density_by_head),
            "error_by_head": None if self.error_by_head is None else list(self.error_by_head),
            "error": self.error,
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
        }


@dataclass
class _Tally:
    ran: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    kept: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    pv_skips: int = 0
    pv_groups: int = 0
    errors: list[float] = field(default_factory=list)
    errors_seen: int = 0
    seconds: float = 0.0


class Site:
    """The settings and counts of one attention module.

    recipe None: the module keeps its own attention, and `left_out` says why. own: the name of that
    attention, eager: its eager function. holder: the handle that made it.
    tap: sees the arguments of every call of `sparge.attention`, outside of compiled graphs.
    A copy of a site has the settings and its own counts; a handle copied with it takes it over.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe | None,
        *,
        own: str,
        eager: Callable[..., Any] | None = None,
        backend: str = AUTO,
        measure_error: bool = False,
        left_out: str = "",
    ) -> None:
        self.name, self.recipe, self.own, self.eager = name, recipe, own, eager
        self.backend, self.measure_error, self.left_out = backend, measure_error, left_out
        self.watched = False
        self.holder: weakref.ref[Any] | None = None
        # For a mask that has the diagonal in it, where `attention` cannot see that there is one.
        self.windowed = recipe and replace(recipe, local_blocks=recipe.window(True))
        self.tap: Tap | None = None
        self._begin()

    def _begin(self) -> None:
        # Two models may have layers of one name; runs find their way home by the label.
        self.label = f"{self.name}#{next(_numbers)}"
        self._lock, self._tally, self._last = threading.Lock(), _Tally(), threading.local()

    def __getstate__(self) -> dict[str, Any]:
        begun = ("label", "_lock", "_tally", "_last", "holder", "tap")
        return {name: value for name, value in vars(self).items() if name not in begun}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.holder = self.tap = None
        self._begin()
        if self.watched:
            self.open()

    def open(self) -> None:
        self.watched = True
        note = weakref.WeakMethod(self._note)  # a model that is dropped takes its sites with it
        watch(self.label, lambda run: (to := note()) and to(run))
        weakref.finalize(self, unwatch, self.label).atexit = False

    def close(self) -> None:
        self.watched = False
        unwatch(self.label)

    def ran_sparse(self) -> bool:
        """Whether the last run of this thread did."""
        return bool(getattr(self._last, "sparse", False))

    def reset(self) -> None:
        with self._lock:
            self._tally = _Tally()

    def note_own(self, reason: str, seconds: float) -> None:
        """The model's own attention ran."""
        with self._lock:
            self._tally.ran[OWN] += 1
            self._tally.fallbacks[reason] += 1
            self._tally.seconds += seconds

    def note_error(self, errors: Sequence[float]) -> None:
        with self._lock:
            tally = self._tally
            tally.errors = _added(tally.errors, errors)
            tally.errors_seen += 1

    def _note(self, run: Run) -> None:
        self._last.sparse = bool(run.kept_by_head)
        with self._lock:
            tally = self._tally
            tally.seconds += run.seconds["total"]
            if not run.kept_by_head:
                tally.ran["dense"] += 1
                tally.fallbacks[run.reason] += 1
                return
            tally.ran[f"{run.backend} ({run.isa})"] += 1
            tally.kept = _added(tally.kept, run.kept_by_head)
            tally.allowed = _added(tally.allowed, run.allowed_by_head)
            tally.pv_skips += run.pv_skips
            tally.pv_groups += run.pv_groups

    def report(self) -> LayerReport:
        with self._lock:
            tally = self._tally
            pairs = list(zip(tally.kept, tally.allowed, strict=True))
            return LayerReport(
                name=self.name,
                calls=sum(tally.ran.values()),
                ran=dict(tally.ran),
                density=sum(tally.kept) / max(sum(tally.allowed), 1) if pairs else 1.0,
                density_by_head=tuple(kept / max(allowed, 1) for kept, allowed in pairs),
                pv_skipped=tally.pv_skips / tally.pv_groups if tally.pv_groups else 0.0,
                error_by_head=tuple(e / tally.errors_seen for e in tally.errors) or None,
                seconds=tally.seconds,
                fallbacks=dict(tally.fallbacks),
                recipe=self.recipe,
            )


def _added(sums: list[Any], numbers: Sequence[Any]) -> list[Any]:
    return [a + b for a, b in zip(sums, numbers, strict=True)] if sums else list(numbers)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
