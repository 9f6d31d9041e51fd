"""The machine and the versions of what runs on it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from ..support.cpuinfo import cpu_name, cpuinfo

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
NEIGHBOURS = ("numpy", "safetensors", "triton", "transformers", "diffusers")


def machine() -> dict[str, Any]:
    """instruction_sets: None where the system does not list them."""
    facts = cpuinfo()
    flags = facts.get("flags") or facts.get("Features")
    has = None if flags is None else {name: name in flags.split() for name in INSTRUCTION_SETS}
    return {
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "instruction_sets": has,
        "accelerators": accelerators(),
    }


def versions() -> dict[str, str | None]:
    """Versions; None for a package that is not installed. No package is imported."""
    found = {"sparge": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, **{name: _installed(name) for name in NEIGHBOURS}}


def devices() -> list[str]:
    """The CPU, and the accelerator that torch would use, if any."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def accelerators() -> list[str]:
    """The names of all accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    name = getattr(module, "get_device_name", lambda i: accelerator.type)
    return [str(name(i)) for i in range(torch.accelerator.device_count())]


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("SPARGE_")}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
