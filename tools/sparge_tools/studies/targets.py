"""Compare measured documents with the project's targets.

    python -m sparge_tools.studies.targets FILE …

FILE: a document of `sparge bench --output` or the `eval.json` of `sparge eval`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparge.cli import OK, Parser, exit_code
from sparge.cli.screen import Table, console, show_table

from . import bench_targets, eval_targets

TABLES = {
    **dict.fromkeys(bench_targets.BY_FORMAT, bench_targets.targets_table),
    "sparge.eval/2": eval_targets.targets_table,
}


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.targets", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    tables = [table_of(Path(file)) for file in parser.parse_args(argv).files]
    screen = console()
    for table in tables:
        show_table(screen, table)
        screen.print()
    return OK


def table_of(file: Path) -> Table:
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not valid JSON: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found not in TABLES:
        raise ValueError(f"{str(file)!r} has the format {found!r}; known: {', '.join(TABLES)}")
    return TABLES[found](document)


if __name__ == "__main__":
    sys.exit(main())
