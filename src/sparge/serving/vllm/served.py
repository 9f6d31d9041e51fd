"""The layers that a worker serves: their settings, their calls and their counters."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention
from ...api.varlen import attention_varlen
from ...engine.recording import record
from ...models.report import Report
from ...values.recipe import Recipe
from .batch import Pack, Request
from .counters import Counters, WorkerReport
from .refusals import LEFT_DENSE
from .routing import ENOUGH_CALLS, OwnCost, Shape, chosen_backend, why_not
from .settings import Settings

RECORD_EVERY = {"cpu": 1}
RECORD_EVERY_ON_GPU = 16
"""Counting adds some launches to a call, so one call in so many is counted there."""


@dataclass(eq=False)
class ServedLayer:
    """One attention layer of vLLM's. why: the reason why none of its calls is served, or ""."""

    name: str
    shape: Shape | None
    backend: str
    why: str = ""
    own: OwnCost | None = None
    counters: Counters = field(default_factory=Counters)
    calls: int = 0

    @property
    def recipe(self) -> Recipe | None:
        return None if self.shape is None else self.shape.recipe

    def why_not(self, request: Request) -> str:
        """Why vLLM's attention shall run a request; "" if it is served here."""
        if self.shape is None:
            return self.why or LEFT_DENSE
        density = self.counters.density(ENOUGH_CALLS)
        return why_not(self.shape, request, backend=self.backend, own=self.own, density=density)

    def attend(self, pack: Pack, output: Tensor) -> None:
        """Attend a pack and write its rows to the step's output `[T, Hq, D]`, counted."""
        start = time.perf_counter()
        every = RECORD_EVERY.get(pack.query.device.type, RECORD_EVERY_ON_GPU)
        counted = self.calls % every == 0
        self.calls += 1
        if counted:
            with record() as runs:
                result = self._attend(pack)
        else:
            runs, result = [], self._attend(pack)
        pack.write(result, output)
        self.counters.add_served(pack.requests, runs, time.perf_counter() - start)

    def _attend(self, pack: Pack) -> Tensor:
        shape = self.shape
        assert shape is not None
        longest = max(pack.requests, key=lambda request: request.Lq)
        backend = chosen_backend(shape, longest, self.backend)
        options: Any = {
            "is_causal": True,
            "causal_align": "bottom_right",
            "scale": shape.scale,
            "enable_gqa": shape.Hq != shape.Hk,
            "recipe": shape.recipe,
            "backend": backend,
        }
        tensors = (pack.query, pack.key, pack.value)
        if len(pack.requests) == 1:
            alone = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
            out: Tensor = attention(*alone, **options)
            return out[0].transpose(0, 1)
        cuts = (torch.tensor(x, dtype=torch.int32) for x in (pack.cuts_q, pack.cuts_k))
        return attention_varlen(*tensors, *(x.to(pack.query.device) for x in cuts), **options)


@dataclass
class Worker:
    """The layers of this process, and the log."""

    rank: int = 0
    ranks: int = 1
    settings: Settings = field(default_factory=Settings)
    layers: dict[str, ServedLayer] = field(default_factory=dict)
    write_line: Callable[[str], None] | None = None
    last_line: float = field(default_factory=time.monotonic)
    last_tokens: int = 0
    paused: bool = False

    def start_log(self, write_line: Callable[[str], None]) -> None:
        if self.write_line is None:
            atexit.register(self.log)
        self.write_line = write_line

    def log_if_due(self) -> None:
        """A line, where the last one is long ago and prompts came since."""
        every = self.settings.log_seconds
        if every and time.monotonic() - self.last_line >= every:
            self.log()

    def log(self) -> None:
        self.last_line = time.monotonic()
        tokens = sum(sum(each.counters.tokens.values()) for each in self.layers.values())
        if self.write_line is not None and self.settings.log_seconds and tokens > self.last_tokens:
            self.last_tokens = tokens
            self.write_line(self.report().line)

    def report(self) -> WorkerReport:
        layers = self.layers.values()
        profile = self.settings.profile is not None
        return WorkerReport(
            rank=self.rank,
            ranks=self.ranks,
            threads=torch.get_num_threads(),
            settings=self.settings.origin,
            report=Report(
                layers=tuple(each.counters.report(each.name, each.recipe) for each in layers),
                recipe=None if profile else self.settings.recipe,
                left_alone={each.name: each.why for each in layers if each.why},
            ),
            tokens={name: dict(each.counters.tokens) for name, each in self.layers.items()},
            decode_seconds={n: each.counters.decode_seconds for n, each in self.layers.items()},
        )

    def reset(self) -> None:
        for layer in self.layers.values():
            layer.counters = Counters()
        self.last_tokens = 0


WORKER = Worker()
"""Of this process: a worker of vLLM's is one."""
