"""What a record needs of an accelerator: marks in its stream and copies to the host, none of which
the host waits for.

`accelerator` is the one place that asks torch for them; a test puts a pretended one into `KNOWN`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .later import Later

K = TypeVar("K", bound=Hashable)


Mark = torch.Event
"""A place in a stream; `elapsed_time` is in milliseconds of the device."""


@dataclass(frozen=True)
class TorchAccelerator:
    """module: torch's for the devices of one type, such as `torch.cuda`."""

    module: Any

    def capturing(self) -> bool:
        """Whether this thread captures a graph. Then no mark may be made or asked for."""
        asked = getattr(self.module, "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def mark(self, device: torch.device) -> Mark:
        """A mark in the current stream of a device."""
        event: Mark = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(device))
        return event

    def start_copy(self, x: Tensor) -> Tensor:
        """`x` in host memory, complete once the device passes a mark that is made after this."""
        # Pageable memory would make the copy wait. torch keeps pinned blocks for later copies.
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        return host.copy_(x, non_blocking=True)


KNOWN: dict[str, TorchAccelerator | None] = {"cpu": None, "meta": None}
"""By type of device; None for the host, and where torch has no events."""


def accelerator(kind: str) -> TorchAccelerator | None:
    """Marks and copies for devices of this type (`"cuda"`, `"xpu"`); None where there are none."""
    if kind not in KNOWN:
        KNOWN[kind] = _of_torch(kind)
    return KNOWN[kind]


def _of_torch(kind: str) -> TorchAccelerator | None:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return None
    able = all(hasattr(module, name) for name in ("Event", "current_stream"))
    return TorchAccelerator(module) if able else None


def capturing(device: torch.device) -> bool:
    """Whether this thread captures a graph on such a device: nothing may be read from it then."""
    found = accelerator(device.type)
    return found is not None and found.capturing()


def to_host(
    found: TorchAccelerator, device: torch.device, tensors: Mapping[K, Tensor]
) -> Later[dict[K, Tensor]]:
    """These small tensors on the host, all by one copy of their bytes."""
    copied = None
    if tensors:
        flat = [x.reshape(-1).view(torch.uint8) for x in tensors.values()]
        copied = found.start_copy(flat[0] if len(flat) == 1 else torch.cat(flat))
    end = found.mark(device)
    facts = {name: (x.dtype, x.shape, x.nbytes) for name, x in tensors.items()}

    def read() -> dict[K, Tensor]:
        end.synchronize()
        if copied is None:
            return {}
        parts = copied.split([size for *_, size in facts.values()])
        each = zip(facts.items(), parts, strict=True)
        # A part of the bytes may begin where its type must not.
        return {k: x.clone().view(dtype).view(shape) for (k, (dtype, shape, _)), x in each}

    return Later(end.query, read)
