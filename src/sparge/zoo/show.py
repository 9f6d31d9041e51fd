"""What a long fetch shows: bars on stderr if that is a terminal, else a line for each stage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int], None]
"""Told how many bytes are done by now."""


@contextmanager
def stage(what: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Show]:
    """A bar over `total` bytes, or a spinner and the time that has passed."""
    if quiet:
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    measured = (BarColumn(), DownloadColumn()) if total is not None else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *measured, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        # pip holds a file twice for a moment: the bar stays at its end.
        yield lambda done: bar.update(task, completed=min(done, total or done))


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1_000_000 else f"{max(size, 1) / 1e3:.0f} kB"
