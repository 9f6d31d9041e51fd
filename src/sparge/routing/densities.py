"""What each layer kept of its blocks, learnt from its calls without waiting for the card.

A plan stays on the device. Now and then its two sums are copied to the host behind the kernels that
are under way, and looked at in a later call, once they have arrived. A layer that keeps more than
pays then goes dense, as it does on the CPU after planning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from ..support.accelerator import accelerator, capturing, to_host
from ..support.turns import HOST
from ..values.blockplan import BlockPlan
from ..values.call import Call

MOVED = 0.05
"""Change of a density that counts. Less would choose again for each prompt."""
WEIGHT = 0.25
"""Of the latest call in a layer's density."""
EVERY = 64
"""Calls 1, 2, 4, … of a layer are looked at, then every 64th: two sums, a copy and an event."""
MOST_LAYERS = 4096

Arrived = Callable[[], tuple[int, int] | None]
"""Kept and allowed blocks, or None while they are under way. Never waits."""


@dataclass
class _Layer:
    """latest: mean over calls, recent ones weighing more. expected: what choices go by."""

    latest: float | None = None
    expected: float | None = None
    calls: int = 0


class Densities:
    """By layer: the label of a call, its recipe and its lengths to a power of two. Calls without a
    label share an entry with others of their shape. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[Hashable, _Layer] = {}
        self._under_way: list[tuple[str, Call, Arrived]] = []
        self._looks = True

    def learnt(self, call: Call) -> float | None:
        """What this layer kept in earlier calls; None if that is not known."""
        found = self._layers.get(_layer_of(call))
        return None if found is None else found.expected

    def learn(self, call: Call, kept: int, allowed: int) -> bool:
        """Whether what is expected of such calls has changed."""
        if allowed <= 0:
            return False
        density = kept / allowed
        with self._lock:
            layer = self._layer(call)
            before = density if layer.latest is None else layer.latest
            layer.latest = before + WEIGHT * (density - before)
            if layer.expected is not None and abs(layer.latest - layer.expected) <= MOVED:
                return False
            layer.expected = layer.latest
            return True

    def look_at(self, backend: str, call: Call, plan: BlockPlan) -> None:
        """Send what a plan on a device keeps on its way, if it is due; not while a graph is
        captured there."""
        if plan.counts.device.type in HOST or not self._looks:
            return
        if capturing(torch.device(*call.where)) or not self.due(call):
            return
        try:
            arrived = counts_later(plan)
        except RuntimeError:  # no pinned memory here; a call does not fail for that
            self._looks = False
            return
        with self._lock:
            self._under_way.append((backend, call, arrived))

    def take_arrived(self, kind: str, index: int) -> list[tuple[str, Call, int, int]]:
        """Backends, calls, and their kept and allowed blocks, as far as these have arrived. Nothing
        is asked for while a graph is captured on the device: that would end the capture."""
        if not self._under_way or capturing(torch.device(kind, index)):
            return []
        with self._lock:
            looked = [(sent, sent[2]()) for sent in self._under_way]
            self._under_way = [sent for sent, counts in looked if counts is None]
        return [(*sent[:2], *counts) for sent, counts in looked if counts is not None]

    def due(self, call: Call) -> bool:
        """Counts a call; whether to look at what it keeps."""
        with self._lock:
            layer = self._layer(call)
            layer.calls += 1
            n = layer.calls
            return n % EVERY == 0 or (n < EVERY and n & (n - 1) == 0)

    def _layer(self, call: Call) -> _Layer:
        if len(self._layers) >= MOST_LAYERS:
            self._layers.clear()
        return self._layers.setdefault(_layer_of(call), _Layer())


def _layer_of(call: Call) -> Hashable:
    shape = (call.Hq, call.Hk, call.D, call.Lq.bit_length(), call.Lk.bit_length())
    return call.label, call.recipe, call.is_causal, call.has_mask, call.has_block_mask, *shape


def counts_later(plan: BlockPlan) -> Arrived:
    """What the plan keeps and might keep, on its way to the host behind the kernels of the current
    stream."""
    device = plan.counts.device
    found = accelerator(device.type)
    if found is None:
        raise RuntimeError(f"{device.type} has no streams to copy behind")
    sums = torch.stack([plan.counts.sum(), plan.allowed.sum()])
    later = to_host(found, device, {"sums": sums})
    return lambda: tuple(later.value()["sums"].tolist()) if later.ready() else None
