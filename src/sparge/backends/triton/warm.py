"""Compile ahead what some work would launch: kernels and their launchers, into Triton's cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...support.errors import Unsupported
from .launch import Launch, on_device_of, watch_launches

COMPILED, STORED, LOADED = "compiled", "stored", "loaded"
"""Compiled now; read from Triton's cache on disk; in this process already."""


@dataclass(frozen=True)
class WarmKernel:
    """One kernel of a launch. how: one of the three."""

    name: str
    how: str
    seconds: float


@dataclass(frozen=True)
class Warmed:
    """launches: of the work, each of which had a kernel ready in the end. kernels: each once."""

    launches: int
    kernels: tuple[WarmKernel, ...]

    @property
    def seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)

    def count(self, how: str) -> int:
        return sum(kernel.how == how for kernel in self.kernels)

    def __str__(self) -> str:
        each = (f"{n} {how}" for how in (COMPILED, STORED, LOADED) if (n := self.count(how)))
        return f"{len(self.kernels)} kernels in {self.seconds:.1f} s: {', '.join(each)}"


def warm(work: Callable[..., Any], *args: Any, **named: Any) -> Warmed:
    """Compile every kernel that `work(*args, **named)` launches, and launch none.

        sparge.warm(sparge.attention, query, key, value, is_causal=True, backend="triton")
        sparge.warm(model, **inputs)    # an accelerated one

    The work runs, but for the launches: what it returns is not computed, and is not returned. Give
    it tensors on the card; their lengths may be short, as kernels take any, but `auto` may choose
    dense attention for them. Refused where nothing would be launched.
    """
    with torch.no_grad(), watch_launches(run=False) as launches:
        work(*args, **named)
    if not launches:
        way_out = (
            "give tensors on a GPU, and backend='triton' or SPARGE_BACKEND=triton; "
            "sparge.explain says what a call would use"
        )
        why = {"triton": "the work launches none of its kernels"}
        raise Unsupported("there is nothing to compile ahead:", why, way_out)
    kernels: dict[int, WarmKernel] = {}  # by Triton's own objects, which it keeps
    for launch in launches:
        which, made = _ready(launch)
        kernels.setdefault(which, made)
    return Warmed(len(launches), tuple(kernels.values()))


def _ready(launch: Launch) -> tuple[int, WarmKernel]:
    """Have the kernel of a launch compiled and loaded; also returns which of Triton's it is."""
    if not hasattr(launch.kernel, "warmup"):
        why = {"triton": "TRITON_INTERPRET is set, and interpreted kernels are not compiled"}
        raise Unsupported("kernels cannot be compiled ahead:", why, "unset it")
    start = time.perf_counter()
    with on_device_of(launch.arguments), _told() as hits:
        kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
        kernel.run  # noqa: B018  builds the launcher in C, and loads the machine code
    how = LOADED if not hits else STORED if hits[0] else COMPILED
    return id(kernel), WarmKernel(launch.name, how, time.perf_counter() - start)


@contextmanager
def _told() -> Iterator[list[bool]]:
    """Whether each kernel that Triton makes meanwhile was in its cache."""
    from triton import knobs

    hits: list[bool] = []
    before = knobs.compilation.listener

    def listen(**facts: Any) -> None:
        hits.append(bool(facts["cache_hit"]))
        if before is not None:
            before(**facts)

    knobs.compilation.listener = listen
    try:
        yield hits
    finally:
        knobs.compilation.listener = before
