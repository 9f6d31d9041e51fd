"""What the tools import of the library that is not public. The list may only shrink.

Run as a program, this file prints what stands in private_imports.txt.
"""

from __future__ import annotations

import ast
from pathlib import Path

import sparge

TOOLS = Path(__file__).parent.parent.parent / "tools/sparge_tools"
LIST = Path(__file__).parent / "private_imports.txt"
PUBLIC = {"compat", "interop", "parallel", "reorder", "synthetic"}
"""Modules of `sparge` whose names are public; all other public names are in `sparge.__all__`."""


def imported(file: Path) -> set[str]:
    """Dotted names of what a file imports from `sparge`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "sparge"}


def is_public(name: str) -> bool:
    parts = name.split(".")[1:]
    if any(part.startswith("_") for part in parts) and parts != ["__version__"]:
        return False
    if len(parts) < 2:
        return True
    return len(parts) == 2 and parts[0] in PUBLIC


def private_imports() -> set[str]:
    found = {name for file in TOOLS.rglob("*.py") for name in imported(file)}
    return {name for name in found if not is_public(name)}


def test_the_list_of_private_imports_only_shrinks():
    listed = LIST.read_text(encoding="utf-8").split()
    assert listed == sorted(set(listed))
    found = private_imports()
    assert sorted(found - set(listed)) == [], "use what is public, or make it public"
    assert sorted(set(listed) - found) == [], "no longer imported: take it off the list"


def test_what_counts_as_private():
    assert is_public("sparge")
    assert is_public("sparge.__version__")
    assert is_public("sparge.attention")
    assert is_public("sparge.reorder.token_order")
    assert not is_public("sparge.synthetic._axes")
    assert not is_public("sparge.values.recipe.Recipe")
    for module in PUBLIC - {"synthetic"}:
        assert getattr(sparge, module).__doc__


if __name__ == "__main__":
    print("\n".join(sorted(private_imports())))
