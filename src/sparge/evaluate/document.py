"""NOUN one evaluation as data: what was asked, where it ran, and a row for every figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .prefill import prefill_row
from .quality import errors_row, perplexity_row
from .settings import DENSE, ERRORS, NEEDLE, PERPLEXITY, PREFILL, SPARGE, TASKS, Cell, Settings
from .targets import judge

FORMAT = "sparge.eval/1"
Result = Callable[[str], dict[str, Any] | None]
Rows = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Evaluation:
    """where: versions, machine and date. Rows of a measure that was not asked for are empty."""

    command: str
    where: Mapping[str, Any]
    model: Mapping[str, Any]
    text: Mapping[str, Any]
    settings: Mapping[str, Any]
    took_seconds: float
    prefill: Rows
    perplexity: Rows
    needle: Rows
    errors: Rows
    tasks: Rows
    targets: Rows

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        where = plain.pop("where")
        return {"format": FORMAT, **where, **plain}


def rows_of(settings: Settings, result: Result) -> dict[str, Rows]:
    """The rows of every measure, from the cells that are finished."""
    cells: dict[str, list[tuple[Cell, dict[str, Any]]]] = {}
    for cell in settings.cells():
        found = result(cell.key)
        if found is not None:
            cells.setdefault(cell.measure, []).append((cell, found))
    windows: dict[int, list[dict[str, Any]]] = {}
    for cell, found in cells.get(PERPLEXITY, []):
        windows.setdefault(cell.length, []).append(found)
    rows = {
        PREFILL: tuple(prefill_row(c.length, found) for c, found in cells.get(PREFILL, [])),
        PERPLEXITY: tuple(perplexity_row(n, found) for n, found in sorted(windows.items())),
        NEEDLE: _needle_rows(cells.get(NEEDLE, [])),
        ERRORS: tuple(errors_row(c.length, found) for c, found in cells.get(ERRORS, [])),
        TASKS: _task_rows(cells.get(TASKS, [])),
    }
    return {**rows, "targets": tuple(judge(rows))}


def _needle_rows(cells: list[tuple[Cell, dict[str, Any]]]) -> Rows:
    """One for each document that both variants have read."""
    pairs: dict[tuple[int, int | None], dict[str, dict[str, Any]]] = {}
    for cell, found in cells:
        pairs.setdefault((cell.length, cell.depth), {})[cell.variant] = found
    return tuple(
        {
            "length": length,
            "depth": depth,
            "tokens": pair[DENSE]["tokens"],
            "density": pair[SPARGE]["density"],
            "dense_loss": pair[DENSE]["loss"],
            "sparge_loss": pair[SPARGE]["loss"],
            "dense_found": pair[DENSE]["found"],
            "sparge_found": pair[SPARGE]["found"],
            "lost": pair[DENSE]["found"] and not pair[SPARGE]["found"],
        }
        for (length, depth), pair in pairs.items()
        if len(pair) == 2
    )


def _task_rows(cells: list[tuple[Cell, dict[str, Any]]]) -> Rows:
    pairs: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell, found in cells:
        pairs.setdefault((cell.task, cell.length), {})[cell.variant] = found
    return tuple(
        {
            "task": task,
            "length": length,
            "metric": metric,
            DENSE: value,
            SPARGE: pair[SPARGE]["scores"].get(metric),
            "limit": pair[DENSE]["limit"],
            "density": pair[SPARGE]["density"],
        }
        for (task, length), pair in pairs.items()
        if len(pair) == 2
        for metric, value in pair[DENSE]["scores"].items()
    )
