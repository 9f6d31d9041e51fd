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

KB, GB = 1024, 1 << 30
STREAM = 0x5EA
"""Handle of the current stream; none of CUDA's own, which are 0, 1 and 2."""


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
    def properties(self) -> SimpleNamespace:
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
        return SimpleNamespace(**facts)


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
    reads: what came from the card to the host. writes: copies to the card. waits: calls that block
    until the card is idle. refuses: whether reads and waits raise. capturing: the current stream is
    being captured in a graph, where writes from pageable memory raise, too.
    """

    launches: list[Any] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
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

    def wait(self, what: str) -> None:
        self.waits.append(what)
        if self.refuses or self.capturing:
            raise Refused(f"{what} waits for the card")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As inside `torch.cuda.graph`."""
        before, self.capturing = self.capturing, True
        try:
            yield
        finally:
            self.capturing = before

    def clear(self) -> None:
        for found in (self.launches, self.compiled, self.reads, self.writes, self.waits):
            found.clear()


class Stream:
    """The one stream of a card."""

    cuda_stream = STREAM

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def synchronize(self) -> None:
        self._traffic.wait("Stream.synchronize")

    def wait_stream(self, other: Stream) -> None:
        """The card waits, not the program."""

    def query(self) -> bool:
        return True


def _event_class(traffic: Traffic) -> type:
    class Event:
        """Everything before it has happened; no time passes on a card that does nothing."""

        def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
            self.timed, self.recorded = enable_timing, False

        def record(self, stream: Any = None) -> None:
            self.recorded = True

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            traffic.wait("Event.synchronize")

        def elapsed_time(self, end: Any) -> float:
            if not (self.timed and end.timed and self.recorded and end.recorded):
                raise ValueError("elapsed_time needs two recorded events with enable_timing=True")
            return 0.0

    return Event


class _Current:
    """Which device is current, for `torch.cuda.device`."""

    index = 0

    def exchange(self, index: int) -> int:
        if index < 0:
            return -1
        before, self.index = self.index, index
        return before


def _index_of(device: Any) -> int:
    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


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


@contextmanager
def torch_sees(card: Card, traffic: Traffic, *, count: int = 1) -> Iterator[None]:
    """torch finds `count` of these cards, the first of which is current."""
    current, stream, gpu = _Current(), Stream(traffic), torch.device("cuda")

    def properties(device: Any = None) -> SimpleNamespace:
        if not 0 <= _index_of(device) < count:
            raise AssertionError("Invalid device id")
        return card.properties

    def memory(device: Any = None) -> tuple[int, int]:
        return card.memory, card.memory

    event = _event_class(traffic)
    of_cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: count,
        "current_device": lambda: current.index,
        "set_device": lambda device: setattr(current, "index", _index_of(device)),
        "_exchange_device": current.exchange,
        "_maybe_exchange_device": current.exchange,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: card.capability,
        "mem_get_info": memory,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: traffic.capturing,
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda device=None: traffic.wait("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "Event": event,
    }
    of_accelerator = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_accelerator": lambda check_available=False: gpu,
        "current_device_index": lambda: current.index,
        "current_stream": lambda device=None: stream,
        "synchronize": lambda device=None: traffic.wait("torch.accelerator.synchronize"),
    }
    with ExitStack() as patches:
        for module, facts in ((torch.cuda, of_cuda), (torch.accelerator, of_accelerator)):
            for name, value in facts.items():
                patches.enter_context(mock.patch.object(module, name, value))
        patches.enter_context(mock.patch.object(torch, "Event", event))
        if not card.is_nvidia:
            patches.enter_context(mock.patch.object(torch.version, "hip", "6.4"))
        yield
