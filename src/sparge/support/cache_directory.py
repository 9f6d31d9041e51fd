"""Where files that can be made again are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENV_CACHE = "SPARGE_CACHE"


def cache_directory() -> Path:
    """`SPARGE_CACHE`, or this system's directory for caches."""
    if own := os.environ.get(ENV_CACHE):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sparge"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "sparge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparge"
