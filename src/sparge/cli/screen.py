"""What reaches the terminal: tables, JSON documents, and progress on stderr."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..support.atomic_files import replace_file
from .table import Table, to_json

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 150  # columns of a table that does not go to a terminal
TEXT_WIDTH = 14  # columns of text fold in a narrow terminal, but not below this width


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


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that counts one step: `step("loading")`.

    On a terminal it moves a bar on stderr; elsewhere it prints a line, if it is given a text.
    """
    if not sys.stderr.isatty():
        numbers = itertools.count(1)

        def print_line(text: str = "") -> None:
            line = f"sparge: {next(numbers)} of {total}: {text}"
            if text:
                print(line, file=sys.stderr, flush=True)

        yield print_line
        return
    from rich.console import Console
    from rich.progress import Progress

    # Drawn only when it moves: a thread that redraws would disturb the measurement.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()

        def move_bar(text: str = "") -> None:
            bar.update(task, description=text or what, advance=1, refresh=True)

        yield move_bar
