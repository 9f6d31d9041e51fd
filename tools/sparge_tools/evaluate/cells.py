"""Measure cells one after another, and compute the rows of the document from finished cells."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import harness
from .prefill import measure_prefill, prefill_row
from .quality import errors_row, measure_errors, measure_perplexity, perplexity_row
from .run_directory import RunDirectory
from .settings import (
    DENSE_VARIANT,
    ERRORS,
    MEASURES,
    NEEDLE,
    PERPLEXITY,
    PREFILL,
    SPARGE_VARIANT,
    TASKS,
    Cell,
    Settings,
)
from .tested_model import TestedModel

FORMAT = "sparge.eval/2"
Result = dict[str, Any]
Rows = list[dict[str, Any]]
Cells = list[tuple[Cell, Result]]


def run_cells(
    tested: TestedModel, directory: RunDirectory, told: Callable[[Cell, float | None], None]
) -> None:
    """Measure every cell that is not in the directory yet; each is saved before the next begins.

    told: called with every cell and the seconds it took; None for a cell of an earlier run.
    """
    for cell in tested.settings.cells():
        took = None
        if directory.result(cell.key) is None:
            start = time.perf_counter()
            result = measure(tested, cell)
            took = time.perf_counter() - start
            directory.keep(cell.key, result, took=took)
        told(cell, took)


def measure(tested: TestedModel, cell: Cell) -> Result:
    measures = {
        PREFILL: measure_prefill,
        PERPLEXITY: measure_perplexity,
        NEEDLE: measure_needle,
        ERRORS: measure_errors,
        TASKS: measure_task,
    }
    return measures[cell.measure](tested, cell)


def measure_needle(tested: TestedModel, cell: Cell) -> Result:
    """One prefill: the loss of the answer, and whether greedy decoding would write it."""
    i = list(tested.needles).index((cell.length, cell.depth))
    needle = tested.needles[cell.length, cell.depth]
    task = tested.needle_task
    lm = tested.wrapped(max_length=max(tested.settings.lengths), answers_only=True)
    with tested.variant(cell.variant) as handle:
        loss, found, answer_tokens = harness.answer_of(task, harness.NEEDLE_TASK, i, lm)
        density = None if handle is None else handle.report().density
    return {
        "loss": loss,
        "found": found,
        "answer": needle.answer,
        "answer_tokens": answer_tokens,
        "tokens": needle.tokens,
        "density": density,
    }


def measure_task(tested: TestedModel, cell: Cell) -> Result:
    limit, own = tested.settings.limit, cell.task == harness.LONGTEXT_TASK
    lm = tested.wrapped(max_length=cell.length)
    with tested.variant(cell.variant) as handle:
        scores = harness.scores_of(
            cell.task,
            lm,
            length=cell.length,
            limit=limit,
            tokenizer_path=str(tested.directory),
            directory=tested.longtext_directory if own else None,
        )
        density = None if handle is None else handle.report().density
    return {"scores": scores, "limit": limit, "density": density}


def measure_rows(settings: Settings, result: Callable[[str], Result | None]) -> dict[str, Rows]:
    """The rows of every measure; a measure that was not asked for has none."""
    cells: dict[str, Cells] = {measure: [] for measure in MEASURES}
    windows: dict[int, Rows] = {}
    for cell in settings.cells():
        found = result(cell.key)
        if found is not None:
            cells[cell.measure].append((cell, found))
            if cell.measure == PERPLEXITY:
                windows.setdefault(cell.length, []).append(found)
    return {
        PREFILL: [prefill_row(cell.length, found) for cell, found in cells[PREFILL]],
        PERPLEXITY: [perplexity_row(n, found) for n, found in sorted(windows.items())],
        NEEDLE: [_needle_row(*pair) for pair in _pairs(cells[NEEDLE])],
        ERRORS: [errors_row(cell.length, found) for cell, found in cells[ERRORS]],
        TASKS: [row for pair in _pairs(cells[TASKS]) for row in _task_rows(*pair)],
    }


def _pairs(cells: Cells) -> list[tuple[Cell, Result, Result]]:
    """Cells that both variants have finished: the cell, the dense result, sparge's result."""
    found: dict[Cell, dict[str, Result]] = {}
    for cell, result in cells:
        found.setdefault(replace(cell, variant=""), {})[cell.variant] = result
    return [
        (cell, pair[DENSE_VARIANT], pair[SPARGE_VARIANT])
        for cell, pair in found.items()
        if len(pair) == 2
    ]


def _needle_row(cell: Cell, dense: Result, sparge: Result) -> Result:
    return {
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


def _task_rows(cell: Cell, dense: Result, sparge: Result) -> Rows:
    about = {"task": cell.task, "length": cell.length, "limit": dense["limit"]}
    return [
        {
            **about,
            "metric": metric,
            DENSE_VARIANT: value,
            SPARGE_VARIANT: sparge["scores"].get(metric),
            "density": sparge["density"],
        }
        for metric, value in dense["scores"].items()
    ]
