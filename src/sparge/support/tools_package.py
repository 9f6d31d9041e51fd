"""What the package sparge-tools adds to the library, found by its entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

COMMANDS, MODELS, TUNER = "sparge.commands", "sparge.models", "sparge.tuner"
INSTALL = 'pip install "sparge[tools]" (in a clone: pip install . ./tools)'


def find_tool(group: str, name: str) -> Any:
    """The object that an installed package registers under a name; None without one."""
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            # Registered, but its package is gone; a module that it misses itself is an error.
            if error.name != entry.module.partition(".")[0]:
                raise
    return None


def need_tool(group: str, name: str, *, what: str) -> Any:
    """The same; raises ValueError without it. what: what needs it, such as a command."""
    found = find_tool(group, name)
    if found is None:
        raise ValueError(
            f"{what} needs the package sparge-tools, which is not installed; install it with: "
            f"{INSTALL}"
        )
    return found
