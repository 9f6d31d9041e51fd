"""Packages that only some features need."""

from __future__ import annotations

from importlib.util import find_spec

from sparge import Unsupported


def need_libraries(what: str, *names: str, extra: str, package: str = "sparge-tools") -> None:
    """Raise Unsupported if a package is not installed; it names the extra that installs it."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        way_out = f'install it with: pip install "{package}[{extra}]"'
        raise Unsupported(what, dict.fromkeys(missing, "not installed"), way_out)
