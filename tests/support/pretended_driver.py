"""A driver of Triton's for a card that is not here: `kernel[grid](...)` is Triton's own code up to
the launch. Arguments are specialized, kernels compiled, loaded and checked against the limits of
the card; what would be launched is noted, and runs nothing.

    with pretended(CARDS["sm_89"]) as traffic:
        out = sparge.attention(*(torch.empty(1, 8, 4096, 128, device="cuda:0") for _ in range(3)))
        traffic.launches, traffic.compiled, traffic.reads, traffic.waits

The process must not have TRITON_INTERPRET set when triton is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from calls import FIXED
from pretended_card import STREAM, Card, Refused, Traffic, allow_cuda_devices, torch_sees
from pretended_tensors import OnCard, TensorsOnCard
from sparge.routing import Router, backends, use_router

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""Of a grid's dimensions, CUDA; HIP has as many or more."""
MOST_THREADS = 1024


@dataclass(frozen=True)
class Launched:
    """One launch as the card would have got it.

    arguments: by name, with constants. signature, constants, attributes: what Triton compiled for.
    options: everything that the compiler was told, and what it found out, such as `shared`. binary:
    the machine code."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    arguments: Mapping[str, Any]
    signature: Mapping[str, Any]
    constants: Mapping[Any, Any]
    attributes: Mapping[Any, Any]
    options: Mapping[str, Any]
    binary: bytes

    @property
    def shared(self) -> int:
        return int(self.options["shared"])


class PretendedDriver:
    """What Triton's runtime asks of a driver, 3.6 to 3.9."""

    def __init__(self, card: Card, traffic: Traffic) -> None:
        from triton.backends.compiler import GPUTarget

        arch = int(card.architecture[3:]) if card.is_nvidia else card.architecture
        self.card, self.traffic = card, traffic
        self.target = GPUTarget("cuda" if card.is_nvidia else "hip", arch, card.warp_size)
        self.utils = Utils(card)
        self.loaded: set[str] = set()

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> tuple[PretendedDriver, int]:
        """Not a plain index: Triton keeps compiled kernels by it, and those of another card are of
        no use here."""
        return self, torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return self.card.capability

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def launcher_cls(self, source: Any, metadata: Any) -> Launcher:
        return Launcher(self, source, metadata)

    def get_benchmarker(self) -> Any:
        raise Refused("a pretended card has no speed to measure")


@dataclass(frozen=True)
class Utils:
    """What Triton's drivers have written in C."""

    card: Card

    def get_device_properties(self, device: int) -> dict[str, Any]:
        card = self.card
        return {
            "max_shared_mem": card.shared,
            "multiprocessor_count": card.processors,
            "sm_clock_rate": card.clock,
            "mem_clock_rate": card.memory_clock,
            "mem_bus_width": card.bus,
            "max_num_regs": 65536,
            "warpSize": card.warp_size,
            "arch": card.architecture,
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[Any, Any, int, int, int]:
        """`(module, function, registers, spills, most threads)`. The module is None: there is none
        to unload, which Triton does when the process ends, without this driver by then."""
        if not binary.startswith(b"\x7fELF") or name.encode() not in binary:
            raise RuntimeError(f"{name} is not in the machine code that was to be loaded")
        return None, binary, 0, 0, MOST_THREADS


class Launcher:
    """Checks what the launchers of Triton and CUDA check, and notes the launch."""

    def __init__(self, driver: PretendedDriver, source: Any, metadata: Any) -> None:
        self.driver, self.source, self.metadata = driver, source, metadata
        # A kernel without a module is loaded again at each launch, if launches are hooked.
        if metadata.hash not in driver.loaded:
            driver.loaded.add(metadata.hash)
            driver.traffic.compiled.append(metadata.name)

    def __call__(self, x: int, y: int, z: int, stream: int, binary: bytes, *rest: Any) -> None:
        arguments = rest[4:]  # after metadata and hooks
        given = dict(zip(self.source.signature, arguments, strict=True))
        check_pointers(given, self.source.signature)
        grid = (x, y, z)
        if any(not 0 <= n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=True)):
            raise RuntimeError(f"grid {grid} is beyond {MOST_PROGRAMS}")
        if x * y * z == 0:
            return
        made = Launched(
            kernel=self.source.fn.fn.__name__,
            grid=grid,
            stream=stream,
            arguments=given,
            signature=self.source.signature,
            constants=self.source.constants,
            attributes=self.source.attrs,
            options=self.metadata._asdict(),
            binary=binary,
        )
        self.driver.traffic.work += 1
        self.driver.traffic.launches.append(made)


def check_pointers(given: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
    """Of all arguments, and of the fields of those that are tuples."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            check_pointers(given[name]._asdict(), kind._asdict())
        elif kind.startswith("*"):
            check_pointer(name, given[name])


def check_pointer(name: str, value: Any) -> None:
    """Raises as the launchers of Triton do, of memory that the card cannot read. Numbers fit: their
    types follow from them."""
    here = isinstance(value, OnCard) and value.device.index == torch.cuda.current_device()
    if value is not None and not here:
        raise ValueError(f"pointer argument {name} cannot be accessed from Triton: {value!r}")


@contextmanager
def card_here(card: Card, traffic: Traffic, *, count: int = 1) -> Iterator[None]:
    """torch, Triton and sparge find these cards; there are no tensors on them yet."""
    import triton

    allow_cuda_devices()
    with (
        mock.patch.object(triton.runtime.driver, "_active", PretendedDriver(card, traffic)),
        mock.patch("sparge.values.backend._hosts", {}),
        use_router(Router(backends(), costs={"cpu": FIXED})),  # as if nothing had run here
        torch_sees(card, traffic, count=count),
    ):
        yield


@contextmanager
def pretended(card: Card, *, count: int = 1, refuses: bool = True) -> Iterator[Traffic]:
    """A process with these cards: torch finds them, `device="cuda:0"` makes tensors on them, and
    Triton launches there. refuses: reading from the card and waiting for it raise; else reads get
    zeros. Kernels of one card are compiled anew for the next."""
    traffic = Traffic(refuses=refuses)
    run = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with TensorsOnCard(traffic):  # of one thread, as modes are
            run(thread)

    with (
        card_here(card, traffic, count=count),
        mock.patch.object(threading.Thread, "run", run_there),
        TensorsOnCard(traffic),
    ):
        yield traffic
