"""NOUN a card that is not here, as torch describes it, and what a program did with it.

`torch_sees(card, traffic)` patches what torch asks of CUDA's runtime: devices, properties, streams,
events. Nothing is computed on it; what would wait for the card is counted, or refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

KB, GB = 1024, 1 << 30
STREAM = 0x5EA
"""Handle of the current stream; none of CUDA's own, which are 0, 1 and 2."""
_CUDA = 1
"""The number of the device type."""


class Properties(SimpleNamespace):
    """What torch tells of a card."""


@dataclass(frozen=True)
class Card:
    """architecture: `sm_89` or `gfx942`. processors: multiprocessors. clock, memory_clock: kHz, as
    torch tells them. bus: bits. memory: bytes. shared: bytes of shared memory that one program may
    ask for."""

    name: str
    architecture: str
    processors: int
    clock: int
    memory_clock: int
    bus: int
    memory: int
    shared: int

    @property
    def is_nvidia(self) -> bool:
        return self.architecture.startswith("sm_")

    @property
    def capability(self) -> tuple[int, int]:
        """Of AMD's, what torch tells: the digits of its generation."""
        digits = self.architecture[3:]
        return (int(digits[:-1]), int(digits[-1])) if self.is_nvidia else (int(digits[:-2]), 4)

    @property
    def warp_size(self) -> int:
        return 64 if self.architecture.startswith("gfx9") else 32

    @property
    def properties(self) -> Properties:
        """As `torch.cuda.get_device_properties` returns them."""
        major, minor = self.capability
        facts = {
            "name": self.name,
            "major": major,
            "minor": minor,
            "multi_processor_count": self.processors,
            "clock_rate": self.clock,
            "memory_clock_rate": self.memory_clock,
            "memory_bus_width": self.bus,
            "total_memory": self.memory,
            "shared_memory_per_block": 48 * KB,
            "shared_memory_per_block_optin": self.shared,
            "shared_memory_per_multiprocessor": self.shared + KB,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 2048,
            "max_threads_per_block": 1024,
            "warp_size": self.warp_size,
            "L2_cache_size": 64 << 20,
            "is_integrated": 0,
            "is_multi_gpu_board": 0,
            "uuid": f"pretended {self.name}",
        }
        if not self.is_nvidia:
            facts["gcnArchName"] = self.architecture
        return Properties(**facts)


CARDS = {
    card.architecture: card
    for card in (
        Card("A100-SXM4-80GB", "sm_80", 108, 1_410_000, 1_593_000, 5120, 80 * GB, 163 * KB),
        Card("GeForce RTX 3090", "sm_86", 82, 1_695_000, 9_751_000, 384, 24 * GB, 99 * KB),
        Card("L40S", "sm_89", 142, 2_520_000, 9_001_000, 384, 48 * GB, 99 * KB),
        Card("H100 80GB HBM3", "sm_90", 132, 1_980_000, 2_619_000, 5120, 80 * GB, 227 * KB),
        Card("B200", "sm_100", 148, 1_965_000, 3_996_000, 8192, 180 * GB, 227 * KB),
        Card("GeForce RTX 5090", "sm_120", 170, 2_407_000, 14_001_000, 512, 32 * GB, 99 * KB),
        Card("AMD Instinct MI300X", "gfx942", 304, 2_100_000, 1_300_000, 8192, 192 * GB, 64 * KB),
        Card("Radeon RX 7900 XTX", "gfx1100", 48, 2_482_000, 1_249_000, 384, 24 * GB, 64 * KB),
    )
}
"""One card for each architecture that kernels are compiled for, by the vendors' data sheets."""


class Refused(RuntimeError):  # noqa: N818 - of the kind of Unsupported
    """The program waited for the card, or read what it computed, where it must not."""


@dataclass
class Traffic:
    """What a program did with the card.

    launches: in order. compiled: names of kernels that Triton compiled, or read from its cache.
    reads: what came from the card to the host, which waits for it. later: copies to pinned memory
    that nothing waits for. writes: copies to the card. waits: calls that block until the card has
    come to some place. work: pieces that the card was given; done: those that it has completed,
    none until `finish`.
    refuses: reads and waits raise; else the card is done with everything at once, and reads get
    zeros. capturing: the current stream is being captured in a graph, where writes raise, too.
    """

    launches: list[Any] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    work: int = 0
    done: int = 0
    refuses: bool = True
    capturing: bool = False

    def read(self, what: str) -> None:
        self.reads.append(what)
        if self.refuses or self.capturing:
            raise Refused(f"{what} reads from the card")

    def write(self, what: str) -> None:
        self.writes.append(what)
        if self.capturing:
            raise Refused(f"{what} copies to the card while its stream is captured")

    def copy_later(self, what: str) -> None:
        self.later.append(what)
        if self.capturing:
            raise Refused(f"{what} would be repeated with the graph that is captured")

    def wait(self, what: str) -> None:
        self.waits.append(what)
        if self.refuses or self.capturing:
            raise Refused(f"{what} waits for the card")

    def finish(self) -> None:
        """The card has come to the end of what it was given."""
        self.done = self.work

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As inside `torch.cuda.graph`."""
        before, self.capturing = self.capturing, True
        try:
            yield
        finally:
            self.capturing = before

    def clear(self) -> None:
        """Forget what was noted."""
        for name in ("launches", "compiled", "reads", "later", "writes", "waits"):
            getattr(self, name).clear()


class Stream(torch.Stream):
    """The one stream of a card."""

    traffic: Traffic

    @property
    def cuda_stream(self) -> int:
        return STREAM

    def synchronize(self) -> None:
        self.traffic.wait("Stream.synchronize")

    def wait_stream(self, other: torch.Stream) -> None:
        """The card waits, not the program."""

    def query(self) -> bool:
        return True


def _stream(traffic: Traffic, index: int = 0) -> Stream:
    made = Stream(stream_id=STREAM, device_index=index, device_type=_CUDA)
    made.traffic = traffic
    return made


def _event_class(traffic: Traffic) -> type:
    class Event:
        """A place among the pieces of work; at: how many there were before it."""

        def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
            self.timed, self.at = enable_timing, 0

        def record(self, stream: Any = None) -> None:
            traffic.work += 1
            self.at = traffic.work

        def query(self) -> bool:
            if traffic.capturing:
                raise Refused("Event.query while the stream is captured")
            return not traffic.refuses or self.at <= traffic.done

        def synchronize(self) -> None:
            if not self.query():
                traffic.wait("Event.synchronize")

        def elapsed_time(self, end: Any) -> float:
            """10 us for each piece of work between the two: no speed, and no zero to divide by."""
            if not (self.timed and end.timed and self.at and end.at and end.query()):
                raise RuntimeError("elapsed_time needs two events that the card has timed")
            return 0.01 * (end.at - self.at)

    return Event


class _Current:
    """Which device is current, for `torch.cuda.device`."""

    index = 0

    def change(self, index: int) -> None:
        self.index = index

    def exchange(self, index: int) -> int:
        before, self.index = self.index, index if index >= 0 else self.index
        return before


def allow_cuda_devices() -> None:
    """Let a torch without CUDA enter CUDA devices, as indexing a tensor of theirs does; it lasts as
    long as the process.

    torch has a guard for this that does nothing, and sets it where CUDA's own finds no device. So
    it is shown one that answers 0 to everything.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1] is None:
        answer = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 0)
        methods = (ctypes.c_void_p * 64)(*[ctypes.cast(answer, ctypes.c_void_p).value] * 64)
        nothing = (ctypes.c_void_p * 1)(ctypes.addressof(methods))
        guards[1] = ctypes.addressof(nothing)
        torch._C._ensureCUDADeviceGuardSet()
        assert guards[1] != ctypes.addressof(nothing)
    torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def torch_sees(card: Card, traffic: Traffic, *, count: int = 1) -> Iterator[None]:
    """torch finds `count` of these cards, the first of which is current.

    What torch has written in C is replaced, and little above it: torch's own functions then answer,
    which graphs being traced know by name."""
    current, event = _Current(), _event_class(traffic)
    streams = [_stream(traffic, index) for index in range(count)]

    def stream(device: Any = None) -> Stream:
        index = device if isinstance(device, int) else getattr(device, "index", None)
        return streams[current.index if index is None else index]

    in_c = {
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": lambda: current.index,
        "_cuda_setDevice": current.change,
        "_cuda_getCurrentRawStream": lambda index: STREAM,
        "_cuda_synchronize": lambda: traffic.wait("torch.cuda.synchronize"),
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_memoryStats": lambda index: {},
        "_cuda_resetPeakMemoryStats": lambda index: None,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: current.index,
        "_accelerator_setDeviceIndex": current.change,
        "_accelerator_getStream": stream,
        "_accelerator_synchronizeDevice": lambda _: traffic.wait("torch.accelerator.synchronize"),
    }
    in_cuda = {
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_get_device_properties": lambda index: card.properties,
        "_exchange_device": lambda index: current.exchange(index),
        "_maybe_exchange_device": lambda index: current.exchange(index),
        "device_count": lambda: count,
        "mem_get_info": lambda device=None: (card.memory, card.memory),
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": lambda: traffic.capturing,
        "default_generators": tuple(torch.Generator() for _ in range(count)),
        "empty_cache": lambda: None,
        "Event": event,
    }
    with ExitStack() as patches:
        for module, facts in ((torch._C, in_c), (torch.cuda, in_cuda)):
            for name, value in facts.items():
                patches.enter_context(mock.patch.object(module, name, value, create=True))
        patches.enter_context(mock.patch.object(torch, "Event", event))
        maker, version = ("cuda", "12.8") if card.is_nvidia else ("hip", "6.4")
        patches.enter_context(mock.patch.object(torch.version, maker, version))
        # Fake tensors of the card, which graphs are traced with, must not be made from real ones.
        yes = property(lambda _: True)
        patches.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", yes))
        # torch.tensor(numbers, device="cuda") then copies them with an operation that can be seen.
        patches.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        yield
