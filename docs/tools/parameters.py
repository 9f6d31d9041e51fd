"""Griffe extension: lines `name: text` of a docstring become a list, one item per parameter."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

PARAMETER = re.compile(r"^([a-z_A-Z]\w*(?:, [a-z_A-Z]\w*)*): (?=\S)")


class Parameters(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(_listed(obj.docstring.value.splitlines()))


def _listed(lines: list[str]) -> list[str]:
    """Prose stays; a parameter's line starts an item, the lines after it belong to it."""
    made: list[str] = []
    in_item = False
    for line in lines:
        match = PARAMETER.match(line)
        if match:
            if not in_item and made and made[-1]:
                made.append("")
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            made.append(f"- {names}: {line[match.end() :]}")
            in_item = True
        elif in_item and line.strip():
            made.append(f"  {line}")
        else:
            in_item = False
            made.append(line)
    return made
