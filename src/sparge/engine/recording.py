"""Who collects what ran: `with record() as runs:`, and the listeners of compiled graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..routing import Choice
from ..support.accelerator import Mark, accelerator, to_host
from ..support.later import Later
from ..values.blockplan import BlockPlan, raised_heads
from ..values.call import BLOCK_Q, Call
from ..values.run import Run
from ..values.stages import WAITED, by_key_head

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


GRAPH_LISTENERS: WeakValueDictionary[str, Listener] = WeakValueDictionary()
"""Who is told what a compiled graph ran, by the label of the call, which belongs to one listener.

A call outside of graphs returns its run. An op in a graph cannot: it returns tensors alone, and it
runs later, in any thread. The label is an argument of the op, so it is the one thing in the graph
that says whose call this is. A listener that is dropped is told nothing more."""

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
        self.waited = 0.0
        self._marks: list[tuple[str, Mark, Mark]] = []

    def stage(self, name: str) -> AbstractContextManager[None]:
        if not self.active or self.captured:
            return _UNTIMED
        return self._timed(name) if self._accelerator is None else self._marked(name)

    def whole(self, seconds: float, workers: Mapping[str, float]) -> None:
        """A call whose stages ran at once: its seconds, divided as its workers' were."""
        self.waited = workers[WAITED]
        spent = {name: x for name, x in workers.items() if x and name != WAITED}
        every = sum(spent.values()) or 1.0
        self._seconds |= {name: seconds * x / every for name, x in spent.items()}

    def to_host(self, tensors: Mapping[K, Tensor]) -> Later[dict[K, Tensor]]:
        """These small tensors on the host, once the device has come to here."""
        if self._accelerator is None:
            return Later.known(dict(tensors))
        return to_host(self._accelerator, self.device, tensors)

    def seconds(self) -> dict[str, float]:
        """Of each stage, and their total. On an accelerator, for when the device has come to the
        end of the call."""
        own = dict(self._seconds)
        for name, start, end in self._marks:
            own[name] = own.get(name, 0.0) + start.elapsed_time(end) / 1e3
        found = {**self._shared(), **own}
        return {**found, "total": sum(found.values())}

    def times(self) -> dict[str, Any]:
        """As a run holds them."""
        return {"seconds": self.seconds(), "waited": self.waited}

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        assert self._accelerator is not None
        start = self._accelerator.mark(self.device)
        yield
        self._marks.append((name, start, self._accelerator.mark(self.device)))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type not in ("cpu", "meta"):  # a device that has no events
            torch.accelerator.synchronize(self.device)


def count_blocks(plan: BlockPlan, pv_skips: Tensor | None) -> dict[str, Tensor]:
    """blocks int64 `[2, 2 or 3, Hq]`: kept, allowed and, if given, skipped of each head over the
    batch; and those of the last query block alone, which may be shorter. measured: the plan's."""
    each = torch.stack([x for x in (plan.counts, plan.allowed, pv_skips) if x is not None])
    found = {"blocks": torch.stack((each.sum((1, 3)), each[..., -1:].sum((1, 3))))}
    return found if plan.measured is None else found | {"measured": plan.measured}


def numbers_of(call: Call, found: Mapping[str, Tensor], *, row_group: int) -> dict[str, Any]:
    """The numbers of a `Run` by what `count_blocks` found; the same as the plan's own methods."""
    (kept, allowed, *skips), (last_kept, _, *last_skips) = found["blocks"].tolist()
    n_kept, n_allowed, n_last = sum(kept), sum(allowed), sum(last_kept)
    n_skips, n_last_skips = (sum(x[0]) if x else 0 for x in (skips, last_skips))
    rows_of_last = (call.Lq - 1) % BLOCK_Q + 1
    per_block, in_last = (-(-rows // row_group) for rows in (BLOCK_Q, rows_of_last))
    inside = (n_skips - n_last_skips) / per_block + n_last_skips / in_last
    skipped = 2 * (n_allowed - n_kept) + inside
    return {
        "sparsity": skipped / (2 * n_allowed) if n_allowed else 0.0,
        "kept": n_kept,
        "allowed": n_allowed,
        "pv_skips": n_skips,
        "pv_groups": per_block * (n_kept - n_last) + in_last * n_last,
        "kept_by_head": tuple(kept),
        "allowed_by_head": tuple(allowed),
        "pv_skips_by_head": tuple(skips[0]) if skips else (),
        **_measured(call, found.get("measured")),
    }


def _measured(call: Call, measured: Tensor | None) -> dict[str, Any]:
    """What `KeepError` found, the worst of the batch for each head, and the heads it raised."""
    if measured is None:
        return {}
    errors, bounds = (tuple(x.tolist()) for x in measured[:2].amax(1))
    raised, precisions = by_key_head(raised_heads(measured), call.Hk), None
    if any(raised) and call.recipe.quantized:
        names = (call.recipe.precision, call.own_precision)
        precisions = tuple(names[x] for x in raised for _ in range(call.Hq // call.Hk))
    return {"error_by_head": errors, "bound_by_head": bounds, "precision_by_head": precisions}
