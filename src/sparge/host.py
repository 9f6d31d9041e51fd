"""NOUN the machine as far as choosing a backend needs it: its devices and what runs on them."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field

import torch

from .support.cpuinfo import cpu_name


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
    """By type. Accelerators are looked at when a tensor is on one, or `sparge doctor` asks."""

    def device(self, kind: str) -> Device:
        return self.devices.get(kind) or Device(kind)


_CPU_ONLY = Host(
    platform.machine(),
    {"cpu": Device("cpu", cpu_name(), torch.backends.cpu.get_cpu_capability())},
)
_hosts: dict[str, Host] = {}


def host(kind: str = "cpu") -> Host:
    """This machine with its processor, and with the accelerator of this type if it is one."""
    if kind in ("cpu", "meta"):
        return _CPU_ONLY  # a constant, for graphs being traced
    if kind not in _hosts:
        devices = {**_CPU_ONLY.devices, kind: _accelerator(kind)}
        _hosts[kind] = Host(_CPU_ONLY.machine, devices)
    return _hosts[kind]


def _accelerator(kind: str) -> Device:
    """Name and architecture of the current device of a type; empty where torch does not tell."""
    module = getattr(torch, kind, None)
    try:
        facts = module.get_device_properties(module.current_device())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, AssertionError):
        return Device(kind)
    name = str(getattr(facts, "name", ""))
    architecture = getattr(facts, "gcnArchName", None)  # AMD
    if architecture is None and hasattr(facts, "major"):
        architecture = f"sm_{facts.major}{facts.minor}"
    return Device(kind, name, str(architecture or ""))
