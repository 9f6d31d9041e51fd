"""Tables of plain data: columns, number formats, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """key: the field of a row. form: formats its value; any form but `str` aligns right."""

    key: str
    heading: str
    form: Callable[[Any], str] = str

    def text(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        return MISSING if value is None else self.form(value)


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    def cells(self) -> list[list[str]]:
        return [[column.text(row) for column in self.columns] for row in self.rows]


def share(value: float) -> str:
    return f"{value:.3f}"


def error(value: float) -> str:
    """Fixed point, or an exponent below 1e-4."""
    return f"{value:.4f}" if value >= 1e-4 or value == 0 else f"{value:.0e}"


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.2f}"


def times(value: float) -> str:
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.3f}x"


def percent(value: float) -> str:
    return f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"


def three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - max(-1, math.floor(math.log10(value))))}f}" if value > 0 else "0"


def to_json(data: Any, indent: int | None = 2) -> str:
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
