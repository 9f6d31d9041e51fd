"""NOUN the machine as far as choosing a backend needs it: its devices and what runs on them."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field

import torch

from ..support.cpuinfo import cpu_name


@dataclass(frozen=True)
class Device:
    """One kind of device.

    type: as torch names it, `"cpu"` or `"cuda"`. capability: what torch's own kernels run with,
    such as `AVX512` or `sm_90`.
    """

    type: str
    name: str = ""
    capability: str = ""


@dataclass(frozen=True)
class Host:
    machine: str = ""
    devices: dict[str, Device] = field(default_factory=dict)
    """By type: the processor, and the accelerator that was asked for."""

    def device(self, kind: str) -> Device:
        return self.devices.get(kind) or Device(kind)


_CPU_ONLY = Host(
    platform.machine(),
    {"cpu": Device("cpu", cpu_name(), torch.backends.cpu.get_cpu_capability())},
)
_hosts: dict[tuple[str, int], Host] = {}
"""By type and index: the cards of a machine may differ."""


def host(kind: str = "cpu", index: int = 0) -> Host:
    """This machine with its processor, and with this accelerator if it is one (`Call.where`)."""
    if kind in ("cpu", "meta"):
        return _CPU_ONLY  # a constant, for graphs being traced
    where = (kind, index)
    if where not in _hosts:
        devices = {**_CPU_ONLY.devices, kind: _accelerator(kind, index)}
        _hosts[where] = Host(_CPU_ONLY.machine, devices)
    return _hosts[where]


def _accelerator(kind: str, index: int) -> Device:
    """Name and architecture of a device; empty where torch does not tell."""
    module = getattr(torch, kind, None)
    try:
        facts = module.get_device_properties(index)  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, AssertionError):
        return Device(kind)
    name = str(getattr(facts, "name", ""))
    architecture = getattr(facts, "gcnArchName", None)  # AMD
    if architecture is None and hasattr(facts, "major"):
        architecture = f"sm_{facts.major}{facts.minor}"
    return Device(kind, name, str(architecture or ""))
