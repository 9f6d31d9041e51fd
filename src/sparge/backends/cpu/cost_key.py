"""What a measurement of the native core depends on."""

from __future__ import annotations

from pathlib import Path

import torch

from ...routing.cost_file import sparge_version
from ...support.cpuinfo import cpu_name
from . import library


def key_of(isa: str, threads: int) -> dict[str, str]:
    """With another key it is another measurement."""
    return {
        "cpu": cpu_name(),
        "isa": isa,
        "threads": str(threads),
        "torch": torch.__version__,
        "sparge": sparge_version(),
        # A library that was built anew may be faster, whatever its version says.
        "library": native_build(),
    }


def native_build() -> str:
    """Size and time of the library's file; "" where there is none."""
    try:
        facts = Path(library.library() or "").stat()
    except OSError:
        return ""
    return f"{facts.st_size}-{facts.st_mtime_ns}"
