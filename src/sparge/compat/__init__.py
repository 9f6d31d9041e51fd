"""Other packages' functions, by their names, computed here.

`sparge.compat.spas_sage_attn` is the public code of the paper. `install()` puts it under its own
name, for programs that say `from spas_sage_attn import ...`; `uninstall()` takes it away again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

NAME = "spas_sage_attn"
PARTS = ("", ".core", ".utils", ".autotune")
# What stood under these names before, while ours do; None while they do not.
_before: dict[str, ModuleType] | None = None


def install(*, force: bool = False) -> ModuleType:
    """Put our `spas_sage_attn` under that name in `sys.modules`, and return it.

    Refused where the real one is imported or could be, unless `force`: then later imports find
    ours, what was imported from the real one before stays, and `uninstall()` puts it back.
    """
    global _before
    ours = _ours()
    if _before is not None and all(sys.modules.get(name) is ours[name] for name in ours):
        return ours[NAME]
    if not force and (found := _real()):
        raise ImportError(
            f"{NAME} is {found}, and it would be hidden; needed is a name that is free. Pass "
            "force=True to hide it until uninstall(), or import from "
            f"sparge.compat.{NAME} and leave it alone"
        )
    uninstall()  # if somebody else took the name since, what they put there is kept below
    _before = {name: module for name, module in sys.modules.items() if _is_part(name)}
    for name in _before:
        del sys.modules[name]
    sys.modules.update(ours)
    return ours[NAME]


def uninstall() -> None:
    """Undo `install()`; nothing happens where nothing is installed."""
    global _before
    if _before is None:
        return
    for name, module in _ours().items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    for name, module in _before.items():
        sys.modules.setdefault(name, module)
    _before = None


def _ours() -> dict[str, ModuleType]:
    return {NAME + part: importlib.import_module(f"{__name__}.{NAME}{part}") for part in PARTS}


def _is_part(name: str) -> bool:
    return name == NAME or name.startswith(NAME + ".")


def _real() -> str:
    """Where the real package is, in words; empty if nowhere."""
    if NAME in sys.modules:
        where = getattr(sys.modules[NAME], "__file__", None)
        return f"imported already, from {where or 'an unknown place'}"
    spec = importlib.util.find_spec(NAME)
    return f"installed, at {spec.origin or 'an unknown place'}" if spec else ""
