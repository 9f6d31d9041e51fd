"""Who collects what ran: `with record() as runs:`, and the listeners of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol
from weakref import WeakValueDictionary

from ..values.run import Run

_collectors: ContextVar[tuple[list[Run], ...]] = ContextVar("sparge_record", default=())


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


def recording() -> bool:
    return bool(_collectors.get())


def note(run: Run | None) -> None:
    """Give a run to every surrounding `record()`."""
    if run is not None:
        for runs in _collectors.get():
            runs.append(run)


class Listener(Protocol):
    def note(self, run: Run) -> None: ...


class GraphListeners:
    """Who is told what a compiled graph ran, by the label of the call.

    A call outside of graphs returns its run. An op in a graph cannot: it returns tensors alone, and
    it runs later, in any thread. The label is an argument of the op, so it is the one thing in the
    graph that says whose call this is. Listeners are held weakly: one that is dropped is told
    nothing more.
    """

    def __init__(self) -> None:
        self._by_label: WeakValueDictionary[str, Listener] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._by_label)

    def add(self, label: str, listener: Listener) -> None:
        if not label or label in self._by_label:
            raise ValueError(f"label must be new and not empty, got {label!r}")
        self._by_label[label] = listener

    def remove(self, label: str) -> None:
        self._by_label.pop(label, None)

    def find(self, label: str) -> Listener | None:
        return self._by_label.get(label) if label else None


GRAPH_LISTENERS = GraphListeners()
