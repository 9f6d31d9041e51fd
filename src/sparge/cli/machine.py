"""The machine and the versions that a number was measured with."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from ..backends.cpu import library as native
from ..support.cpuinfo import cpu_name, cpuinfo

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
NEIGHBOURS = ("numpy", "safetensors", "triton", "transformers", "diffusers")


def where_it_runs() -> dict[str, Any]:
    """Versions, machine, instruction set, load and date: what every document of numbers holds."""
    return {
        "versions": versions(),
        "machine": machine(),
        "machine_line": machine_line(),
        "isa": isa_in_use(),
        "load_average": load_average(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def isa_in_use() -> str | None:
    """The instruction set that sparge's native core uses; None without a native core."""
    there = native.available()
    return native.chosen_isa(there) if there else None


def machine() -> dict[str, Any]:
    return {
        "architecture": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "instruction_sets": _instruction_sets(cpuinfo()),
        "accelerators": accelerators(),
    }


def versions() -> dict[str, str | None]:
    """Versions; None for a package that is not installed. No package is imported."""
    found = {"sparge": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, **{name: _installed(name) for name in NEIGHBOURS}}


def machine_line() -> str:
    """The machine in one line."""
    facts = machine()
    gpus = "".join(f", {name}" for name in facts["accelerators"])
    return (
        f"{facts['cpu']} ({facts['architecture']}), cores: {facts['cores']}, torch threads: "
        f"{facts['threads']}{gpus}; torch {torch.__version__} ({facts['cpu_capability']})"
    )


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


def load_average() -> float | None:
    """Average over the last minute; None where the system does not provide it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def load_text(document: Mapping[str, Any]) -> str:
    load = document["load_average"]
    return "unknown" if load is None else f"{load:.1f}"


def machine_text(document: Mapping[str, Any]) -> str:
    """The machine, instruction set and load of a document that has `where_it_runs()`."""
    return (
        f"{document['machine_line']}; sparge's instruction set: {document['isa'] or 'none'}; "
        f"load average at the start: {load_text(document)}"
    )


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("SPARGE_")}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _instruction_sets(facts: dict[str, str]) -> dict[str, bool] | None:
    """None where the system does not list them."""
    flags = facts.get("flags") or facts.get("Features")
    return None if flags is None else {name: name in flags.split() for name in INSTRUCTION_SETS}
