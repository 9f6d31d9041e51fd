"""The rows of an evaluation's document, computed from the cells that are finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .prefill import prefill_row
from .quality import errors_row, perplexity_row
from .settings import (
    DENSE_VARIANT,
    ERRORS,
    NEEDLE,
    PERPLEXITY,
    PREFILL,
    SPARGE_VARIANT,
    TASKS,
    Cell,
    Settings,
)

FORMAT = "sparge.eval/2"
Result = Callable[[str], dict[str, Any] | None]
Rows = list[dict[str, Any]]
Cells = list[tuple[Cell, dict[str, Any]]]


def measure_rows(settings: Settings, result: Result) -> dict[str, Rows]:
    """The rows of every measure; a measure that was not asked for has none."""
    cells: dict[str, Cells] = {}
    for cell in settings.cells():
        found = result(cell.key)
        if found is not None:
            cells.setdefault(cell.measure, []).append((cell, found))
    windows: dict[int, Rows] = {}
    for cell, found in cells.get(PERPLEXITY, []):
        windows.setdefault(cell.length, []).append(found)
    return {
        PREFILL: [prefill_row(c.length, found) for c, found in cells.get(PREFILL, [])],
        PERPLEXITY: [perplexity_row(n, found) for n, found in sorted(windows.items())],
        NEEDLE: _needle_rows(cells.get(NEEDLE, [])),
        ERRORS: [errors_row(c.length, found) for c, found in cells.get(ERRORS, [])],
        TASKS: _task_rows(cells.get(TASKS, [])),
    }


def _pairs(cells: Cells) -> list[tuple[Cell, dict[str, Any], dict[str, Any]]]:
    """Cells that both variants have finished: the cell, the dense result, sparge's result."""
    found: dict[tuple[str, int, int | None], dict[str, tuple[Cell, dict[str, Any]]]] = {}
    for cell, result in cells:
        key = (cell.task, cell.length, cell.depth)
        found.setdefault(key, {})[cell.variant] = (cell, result)
    return [
        (*pair[DENSE_VARIANT], pair[SPARGE_VARIANT][1]) for pair in found.values() if len(pair) == 2
    ]


def _needle_rows(cells: Cells) -> Rows:
    return [
        {
            "length": cell.length,
            "depth": cell.depth,
            "tokens": dense["tokens"],
            "density": sparge["density"],
            "dense_loss": dense["loss"],
            "sparge_loss": sparge["loss"],
            "dense_found": dense["found"],
            "sparge_found": sparge["found"],
            "lost": dense["found"] and not sparge["found"],
        }
        for cell, dense, sparge in _pairs(cells)
    ]


def _task_rows(cells: Cells) -> Rows:
    return [
        {
            "task": cell.task,
            "length": cell.length,
            "metric": metric,
            DENSE_VARIANT: value,
            SPARGE_VARIANT: sparge["scores"].get(metric),
            "limit": dense["limit"],
            "density": sparge["density"],
        }
        for cell, dense, sparge in _pairs(cells)
        for metric, value in dense["scores"].items()
    ]
