"""A value that is read when it is first asked for, by whichever thread asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")
U = TypeVar("U")


class Later(Generic[T]):
    """read: makes the value, and may wait; called once. ready: whether it would not wait now."""

    def __init__(self, ready: Callable[[], bool], read: Callable[[], T]) -> None:
        self._ready: Callable[[], bool] | None = ready
        self._read: Callable[[], T] | None = read
        self._lock = threading.Lock()
        self._value: T | None = None

    @classmethod
    def known(cls, value: T) -> Later[T]:
        made = cls(lambda: True, lambda: value)
        made.value()
        return made

    @property
    def is_known(self) -> bool:
        return self._read is None

    def ready(self) -> bool:
        """Whether `value()` would return without waiting."""
        ready = self._ready
        return ready is None or ready()

    def value(self) -> T:
        with self._lock:
            if self._read is not None:
                self._value = self._read()
                self._read = self._ready = None  # they hold memory of the device
        return cast(T, self._value)

    def then(self, make: Callable[[T], U]) -> Later[U]:
        """What is made of the value; at once if that is known."""
        if self.is_known:
            return Later.known(make(self.value()))
        return Later(self.ready, lambda: make(self.value()))
