"""Cells measured one after another, each kept before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import harness
from .prefill import measure_prefill
from .quality import measure_errors, measure_perplexity
from .settings import ERRORS, NEEDLE, PERPLEXITY, PREFILL, Cell
from .store import RunDirectory
from .subject import Subject, density_of

Told = Callable[[Cell, float | None], None]
"""Told of every cell and the seconds it took; None for one that was finished before."""


def run_cells(subject: Subject, directory: RunDirectory, told: Told) -> None:
    """Measure every cell that is not in the directory yet."""
    for cell in subject.settings.cells():
        if directory.result(cell.key) is not None:
            told(cell, None)
            continue
        start = time.perf_counter()
        result = measure(subject, cell)
        took = time.perf_counter() - start
        directory.keep(cell.key, result, took=took)
        told(cell, took)


def measure(subject: Subject, cell: Cell) -> dict[str, Any]:
    if cell.measure == PREFILL:
        return measure_prefill(subject, cell.length)
    if cell.measure == PERPLEXITY:
        assert cell.window is not None
        return measure_perplexity(subject, cell.length, cell.window)
    if cell.measure == NEEDLE:
        return measure_needle(subject, cell)
    if cell.measure == ERRORS:
        return measure_errors(subject, cell.length)
    return measure_task(subject, cell)


def measure_needle(subject: Subject, cell: Cell) -> dict[str, Any]:
    """One prefill: the loss of the answer, and whether greedy decoding would say it."""
    assert cell.depth is not None
    needles = subject.checked.needles
    i = list(needles).index((cell.length, cell.depth))
    task = subject.needle_task()
    lm = harness.wrap(
        subject.model,
        subject.tokenizer,
        max_length=max(subject.settings.lengths),
        answers_only=True,
    )
    with subject.variant(cell.variant) as handle:
        loss, found, tokens = harness.answer_of(task, harness.NEEDLE_TASK, i, lm)
        density = None if handle is None else density_of(handle.report())
    document = needles[cell.length, cell.depth]
    return {
        "loss": loss,
        "found": found,
        "answer": document.answer,
        "answer_tokens": tokens,
        "tokens": document.tokens,
        "density": density,
    }


def measure_task(subject: Subject, cell: Cell) -> dict[str, Any]:
    lm = harness.wrap(subject.model, subject.tokenizer, max_length=cell.length)
    directory = subject.own_task_directory(cell.task)
    with subject.variant(cell.variant) as handle:
        scores = harness.scores_of(
            cell.task,
            lm,
            length=cell.length,
            limit=subject.settings.limit,
            tokenizer_path=str(subject.checked.directory.resolve()),
            directory=directory,
        )
        density = None if handle is None else density_of(handle.report())
    return {"scores": scores, "limit": subject.settings.limit, "density": density}
