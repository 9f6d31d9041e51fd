"""The console program `sparge`: arguments in, exit codes out, and what reaches the screen.

Exit codes: 0 ok · 1 the command ran and the answer is bad · 2 the caller's mistake ·
3 nothing here can serve the request · 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__
from ..errors import Unsupported
from ..report.tables import Table, to_json
from ..support.atomic_files import replace_file

if TYPE_CHECKING:
    from rich.console import Console

OK, BAD_ANSWER, MISTAKE, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = {
    "demo": "a real model reads a long document, dense and sparse side by side; writes a page",
    "doctor": "what this machine has, which backends serve it, and a self-check that runs",
    "explain": "which backend a call would get, and why each other would not",
    "eval": "what a language model gains and what it costs: time, perplexity, needle, error",
    "trace": "save a model's queries, keys and values on real texts, to tune by elsewhere",
    "tune": "find every head's settings under two error bounds; writes a profile",
    "profile": "show, compare or check a tuned profile",
    "bench": "our attention beside torch's and FlexAttention's, stage by stage, in one run",
}
PIPE_WIDTH = 132
"""Columns of a table that does not go to a terminal."""
TEXT_WIDTH = 14
"""A column of texts folds in a narrow terminal, but not to less than this."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = _parse(sys.argv[1:] if argv is None else list(argv))
        code: int = args.run(args)
        return code
    except SystemExit as stop:  # --help and --version end this way
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except Unsupported as refusal:
        return _complain(str(refusal), UNSUPPORTED)
    except BrokenPipeError:
        # The reader left. What is still buffered must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_ANSWER
    except (ValueError, OSError) as mistake:
        return _complain(" ".join(str(mistake).split()), MISTAKE)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="sparge", description="Sparse and quantized attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        if name in argv:  # only the command that was asked for is imported
            module = import_module(f"{__name__}.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser.parse_args(argv)


def _complain(message: str, code: int) -> int:
    print(f"sparge: error: {message}", file=sys.stderr)
    return code


def whole(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def wholes(text: str) -> list[int]:
    """An argument such as 1024,2048."""
    return [whole(part) for part in text.split(",")]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, no text")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="also write the JSON document here")


def check_output(path: str | None) -> None:
    """Raise now, before minutes of work, if the document could not be written in the end."""
    if path is None:
        return
    target = Path(path)
    if not target.name or (target.exists() and not target.is_file()):
        # A device would be replaced by a file, not written to.
        raise ValueError(f"--output must name a file to make or replace; {path!r} is not one")
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise ValueError(f"--output {path!r} cannot be written: {error.strerror}") from None


def deliver(document: dict[str, Any], args: argparse.Namespace, show: Callable[[], None]) -> None:
    """The document to its file and to stdout; or, without --json, the text that `show` prints."""
    text = to_json(document)
    output: str | None = getattr(args, "output", None)
    if output is not None:
        replace_file(output, f"{text}\n".encode())
    if args.json:
        print(text, flush=True)
    else:
        show()


def console() -> Console:
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal still gets its text
    is_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPE_WIDTH if is_file else None, highlight=False, markup=False)


def show_table(screen: Console, table: Table) -> None:
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table as RichTable

    # Printed apart: rich would fold a title to the width of its table.
    screen.print(table.title, style="bold")
    grid = RichTable(box=box.SIMPLE_HEAD)
    rows = table.cells()
    for i, column in enumerate(table.columns):
        lines = [*column.heading.split("\n"), *(cells[i] for cells in rows)]
        longest = max(map(len, lines))
        if column.is_number:
            grid.add_column(column.heading, justify="right", min_width=longest)
        else:
            grid.add_column(column.heading, min_width=min(longest, TEXT_WIDTH))
    for cells in rows:
        grid.add_row(*cells)
    # Texts fold to fit; but no number is cut off, so a narrow terminal breaks the lines instead.
    needed = Measurement.get(screen, screen.options.update(max_width=10_000), grid).minimum
    before, screen.width = screen.width, max(screen.width, needed)
    screen.print(grid)
    screen.width = before
    for note in table.notes:
        screen.print(note)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr if that is a terminal; the function moves it on by one."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Drawn only when it moves: a thread that redraws would take time from what is measured.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)
