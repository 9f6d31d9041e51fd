"""The processor, as far as the system tells of it."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpuinfo() -> dict[str, str]:
    """The first core's lines; empty where the system has no such file."""
    try:
        first = CPUINFO.read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def cpu_name() -> str:
    return cpuinfo().get("model name") or platform.processor() or "unknown"
