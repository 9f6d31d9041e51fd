"""The stages of a call, timed: by the clock on the host, by marks in an accelerator's stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ..routing import Choice
from ..support.accelerator import Mark, accelerator, to_host
from ..support.later import Later
from ..values.call import Call
from .recording import recording

K = TypeVar("K", bound=Hashable)
_UNTIMED = nullcontext()


class Stopwatch:
    """Times the stages of a call; does nothing while not recording, nor while a graph is captured.

    recorded: make a run, though nobody records. captured: a graph is captured. shared: seconds of
    stages that ran for several calls at once, read with those of this one.
    """

    def __init__(
        self,
        call: Call,
        choice: Choice,
        device: torch.device,
        *,
        recorded: bool = False,
        shared: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.active = recorded or recording()
        self.call, self.choice, self.device = call, choice, device
        self._accelerator = accelerator(device.type) if self.active else None
        self.captured = self._accelerator is not None and self._accelerator.capturing()
        self._shared = shared
        self._seconds: dict[str, float] = {}
        self._marks: dict[str, tuple[Mark, Mark]] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        if not self.active or self.captured:
            return _UNTIMED
        return self._timed(name) if self._accelerator is None else self._marked(name)

    def to_host(self, tensors: Mapping[K, Tensor]) -> Later[dict[K, Tensor]]:
        """These small tensors on the host, once the device has come to here."""
        if self._accelerator is None:
            return Later.known(dict(tensors))
        return to_host(self._accelerator, self.device, tensors)

    def seconds(self) -> dict[str, float]:
        """Of each stage, and their total. On an accelerator, for when the device has come to the
        end of the call."""
        found = {**self._shared(), **self._seconds}
        for name, (start, end) in self._marks.items():
            found[name] = start.elapsed_time(end) / 1e3
        return {**found, "total": sum(found.values())}

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        assert self._accelerator is not None
        start = self._accelerator.mark(self.device)
        yield
        self._marks[name] = start, self._accelerator.mark(self.device)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self._seconds[name] = time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type not in ("cpu", "meta"):  # a device that has no events
            torch.accelerator.synchronize(self.device)
