"""The run directory: cells are saved one by one, so interrupted runs resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from sparge.cli.screen import to_json
from sparge.support.atomic_files import replace_file

FORMAT = "sparge.eval.run/1"
KEY_FILE, CELL_FILE, DOCUMENT_FILE = "run.json", "cells.jsonl", "eval.json"
REPLACED = (KEY_FILE, DOCUMENT_FILE, "needle.png", "errors.png", "perplexity.png")
"""The files that --fresh removes; cells are truncated."""


class RunDirectory:
    """Cells by key. One process at a time; it can be opened again after any kind of exit."""

    def __init__(self, path: Path, cells: dict[str, Any], file: BinaryIO) -> None:
        self.path, self.cells, self._file = path, cells, file

    def keep(self, key: str, result: Mapping[str, Any], *, took: float) -> None:
        """Write a result; it is on disk when this returns."""
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = {"cell": key, "date": date, "took": took, "result": result}
        line = to_json(entry, indent=None)
        self._file.write(f"{line}\n".encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.cells[key] = json.loads(line)

    def result(self, key: str) -> dict[str, Any] | None:
        return self.cells[key]["result"] if key in self.cells else None

    def close(self) -> None:
        self._file.close()


def open_run(path: Path, key: Mapping[str, Any], *, fresh: bool = False) -> RunDirectory:
    """Open the directory with its finished cells, or make it.

    key: what the results depend on. A directory with another key is refused.
    """
    path.mkdir(parents=True, exist_ok=True)
    there = sorted(entry.name for entry in path.iterdir())
    if there and KEY_FILE not in there:
        raise ValueError(
            f"{str(path)!r} holds {there[0]!r} and no {KEY_FILE}: it is not a run directory; name "
            "an empty one or one that does not exist"
        )
    document = to_json({"format": FORMAT, "key": key})
    if KEY_FILE in there and not fresh:
        _refuse_another(path, json.loads(document)["key"])
    file = _lock(path)
    try:
        if fresh:
            for name in REPLACED:
                (path / name).unlink(missing_ok=True)
            file.truncate(0)
        cells = _read_cells(path, file)
        replace_file(path / KEY_FILE, f"{document}\n".encode())
    except BaseException:
        file.close()
        raise
    return RunDirectory(path, cells, file)


def _refuse_another(path: Path, asked: Mapping[str, Any]) -> None:
    """Raise ValueError if the directory holds a run with another key."""
    file, way_out = str(path / KEY_FILE), "; --fresh discards it"
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        found, there = data["format"], dict(data["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file!r} is damaged: {error!r}{way_out}") from None
    if found != FORMAT:
        raise ValueError(f"{file!r} has the format {found!r}, needed is {FORMAT!r}{way_out}")
    differing = [
        f"{name} was {there.get(name)!r}, is {asked.get(name)!r}"
        for name in sorted({*there, *asked})
        if there.get(name) != asked.get(name)
    ]
    if differing:
        raise ValueError(
            f"{str(path)!r} holds a run with other settings: {'; '.join(differing)}. Name another "
            "directory with -o, or discard this one with --fresh"
        )


def _lock(path: Path) -> BinaryIO:
    """The file of cells, open for appending and locked where the system can lock."""
    file = open(path / CELL_FILE, "a+b")  # noqa: SIM115 - open as long as the run
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError:
        file.close()
        raise ValueError(
            f"another process uses {str(path)!r}; wait, or name another directory"
        ) from None
    return file


def _read_cells(path: Path, file: BinaryIO) -> dict[str, Any]:
    file.seek(0)
    lines = file.read().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # cut by a crash: that cell is not finished
        lines.pop()
        file.truncate(sum(map(len, lines)))
    cells = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            cells[str(entry["cell"])] = {**entry, "result": dict(entry["result"])}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path / CELL_FILE)!r} is damaged in line {number}: {error!r}; remove that "
                "line, or discard the run with --fresh"
            ) from None
    return cells
