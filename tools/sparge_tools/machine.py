"""The machine and the versions that a number was measured with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from sparge.backends.cpu import library as native
from sparge.cli.machine import machine, versions


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


def machine_line() -> str:
    """The machine in one line."""
    facts = machine()
    gpus = "".join(f", {name}" for name in facts["accelerators"])
    return (
        f"{facts['cpu']} ({facts['architecture']}), cores: {facts['cores']}, torch threads: "
        f"{facts['threads']}{gpus}; torch {torch.__version__} ({facts['cpu_capability']})"
    )


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
