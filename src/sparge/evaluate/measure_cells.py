"""Measure cells one after another; each is saved before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import harness
from .prefill import measure_prefill
from .quality import measure_errors, measure_perplexity
from .run_directory import RunDirectory
from .settings import ERRORS, NEEDLE, PERPLEXITY, PREFILL, Cell
from .tested_model import TestedModel

Told = Callable[[Cell, float | None], None]
"""Called with every cell and the seconds it took; None for a cell of an earlier run."""


def run_cells(tested: TestedModel, directory: RunDirectory, told: Told) -> None:
    """Measure every cell that is not in the directory yet."""
    for cell in tested.settings.cells():
        if directory.result(cell.key) is not None:
            told(cell, None)
            continue
        start = time.perf_counter()
        result = measure(tested, cell)
        took = time.perf_counter() - start
        directory.keep(cell.key, result, took=took)
        told(cell, took)


def measure(tested: TestedModel, cell: Cell) -> dict[str, Any]:
    if cell.measure == PREFILL:
        return measure_prefill(tested, cell.length)
    if cell.measure == PERPLEXITY:
        assert cell.window is not None
        return measure_perplexity(tested, cell.length, cell.window)
    if cell.measure == NEEDLE:
        return measure_needle(tested, cell)
    if cell.measure == ERRORS:
        return measure_errors(tested, cell.length)
    return measure_task(tested, cell)


def measure_needle(tested: TestedModel, cell: Cell) -> dict[str, Any]:
    """One prefill: the loss of the answer, and whether greedy decoding would write it."""
    assert cell.depth is not None
    needles = tested.checked.needles
    i = list(needles).index((cell.length, cell.depth))
    task = tested.needle_task()
    lm = harness.wrap(
        tested.model, tested.tokenizer, max_length=max(tested.settings.lengths), answers_only=True
    )
    with tested.variant(cell.variant) as handle:
        loss, found, tokens = harness.answer_of(task, harness.NEEDLE_TASK, i, lm)
        density = None if handle is None else handle.report().density
    document = needles[cell.length, cell.depth]
    return {
        "loss": loss,
        "found": found,
        "answer": document.answer,
        "answer_tokens": tokens,
        "tokens": document.tokens,
        "density": density,
    }


def measure_task(tested: TestedModel, cell: Cell) -> dict[str, Any]:
    lm = harness.wrap(tested.model, tested.tokenizer, max_length=cell.length)
    directory = tested.own_task_directory(cell.task)
    with tested.variant(cell.variant) as handle:
        scores = harness.scores_of(
            cell.task,
            lm,
            length=cell.length,
            limit=tested.settings.limit,
            tokenizer_path=str(tested.checked.directory.resolve()),
            directory=directory,
        )
        density = None if handle is None else handle.report().density
    return {"scores": scores, "limit": tested.settings.limit, "density": density}
