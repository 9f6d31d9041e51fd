"""Progress of a fetch on stderr: bars on a terminal (with rich), else a line per stage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

Show = Callable[[int], None]  # called with the number of bytes done so far


@contextmanager
def stage(what: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Show]:
    """A bar over `total` bytes, or a spinner, with the elapsed time."""
    if quiet:
        yield lambda done: None
        return
    if not sys.stderr.isatty() or find_spec("rich") is None:
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
        # pip keeps a file twice for a moment: do not move past the end.
        yield lambda done: bar.update(task, completed=min(done, total or done))


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1_000_000 else f"{max(size, 1) / 1e3:.0f} kB"
