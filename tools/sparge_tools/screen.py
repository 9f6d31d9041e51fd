"""Forms of numbers in tables, and progress on stderr."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.2f}"


def times(value: float) -> str:
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.3f}x"


def percent(value: float) -> str:
    return f"{value:.0%}" if abs(value) >= 0.1 else f"{value:.1%}"


def three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - max(-1, math.floor(math.log10(value))))}f}" if value > 0 else "0"


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
