"""What reaches the terminal: tables and JSON documents."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..support.atomic_files import replace_file

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 150  # columns of a table that does not go to a terminal
TEXT_WIDTH = 14  # columns of text fold in a narrow terminal, but not below this width
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


def to_json(data: Any, indent: int | None = 2) -> str:
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def deliver(document: dict[str, Any], args: argparse.Namespace, show: Callable[[], None]) -> None:
    """Write the document to `args.output`, if given; then print it (--json) or call `show`."""
    text = to_json(document)
    if getattr(args, "output", None) is not None:
        replace_file(args.output, f"{text}\n".encode())
    if args.json:
        print(text, flush=True)
    else:
        show()


def console() -> Console:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that are not UTF-8
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPE_WIDTH if is_file else None, highlight=False, markup=False)


def show_table(screen: Console, table: Table) -> None:
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table as RichTable

    # Printed separately: rich would fold a title to the width of its table.
    screen.print(table.title, style="bold")
    grid = RichTable(box=box.SIMPLE_HEAD)
    rows = table.cells()
    for i, column in enumerate(table.columns):
        longest = max(map(len, [*column.heading.split("\n"), *(cells[i] for cells in rows)]))
        if column.form is str:
            grid.add_column(column.heading, min_width=min(longest, TEXT_WIDTH))
        else:
            grid.add_column(column.heading, justify="right", min_width=longest)
    for cells in rows:
        grid.add_row(*cells)
    # Texts fold to fit. Numbers are never cut: in a narrow terminal the lines wrap instead.
    needed = Measurement.get(screen, screen.options.update(max_width=10_000), grid).minimum
    before, screen.width = screen.width, max(screen.width, needed)
    screen.print(grid)
    screen.width = before
    for note in table.notes:
        screen.print(note)
