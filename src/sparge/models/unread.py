"""Runs whose numbers are still on a device, kept until they can be added up without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..values.run import Run

MOST_UNREAD = 64
"""Runs that may wait here. The queue of launches keeps a host from being that many calls ahead, so
this only bounds memory: where there are more, the oldest is waited for."""


class Unread:
    """Runs in the order of their calls, each with the function that adds it up."""

    def __init__(self) -> None:
        self._runs: deque[tuple[Run, Callable[[Run], None]]] = deque()

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: Run, add_up: Callable[[Run], None]) -> None:
        """Add up this run and those before it, as far as they can be read without waiting."""
        self._runs.append((run, add_up))
        while len(self._runs) > MOST_UNREAD or (self._runs and self._runs[0][0].ready()):
            self._add_up_oldest()

    def read(self) -> None:
        """Wait for all of them."""
        while self._runs:
            self._add_up_oldest()

    def _add_up_oldest(self) -> None:
        run, add_up = self._runs.popleft()
        add_up(run)
