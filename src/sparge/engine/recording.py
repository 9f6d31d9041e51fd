"""Collecting what ran: `with record() as runs:`, and who watches the calls of a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..values.run import Run

_collectors: ContextVar[tuple[list[Run], ...]] = ContextVar("sparge_record", default=())
_watchers: dict[str, Callable[[Run], None]] = {}


@contextmanager
def record() -> Iterator[list[Run]]:
    """Collect a `Run` for every attention, plan and attend call of this thread or task."""
    runs: list[Run] = []
    token = _collectors.set((*_collectors.get(), runs))
    try:
        yield runs
    finally:
        _collectors.reset(token)


@contextmanager
def apart() -> Iterator[list[Run]]:
    """Hide runs from the surrounding records, to note them as one; empty while nobody records."""
    runs: list[Run] = []
    token = _collectors.set((runs,) if recording() else ())
    try:
        yield runs
    finally:
        _collectors.reset(token)


def watch(label: str, callback: Callable[[Run], None]) -> None:
    """Call back with every run of this label, from any thread and from compiled graphs too."""
    if not label or label in _watchers:
        raise ValueError(f"a label is watched once and is not empty, got {label!r}")
    _watchers[label] = callback


def unwatch(label: str) -> None:
    _watchers.pop(label, None)


def recording(label: str = "") -> bool:
    return bool(_collectors.get()) or (bool(label) and label in _watchers)


def note(run: Run | None) -> None:
    if run is not None:
        for runs in _collectors.get():
            runs.append(run)
        watcher = _watchers.get(run.label)
        if watcher is not None:
            watcher(run)
