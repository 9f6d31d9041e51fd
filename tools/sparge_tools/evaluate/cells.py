"""Measure cells one after another, and compute the rows of the document from finished cells."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparge.support.turns import take_turns

from ..measuring import no_garbage_collection
from . import harness
from .logits import Comparison, compare, outputs_of
from .run_directory import RunDirectory
from .settings import (
    DENSE_VARIANT,
    ERRORS,
    MEASURES,
    NEEDLE,
    PERPLEXITY,
    PREFILL,
    SHORT,
    SPARGE_VARIANT,
    TASKS,
    Cell,
    Settings,
)
from .tested_model import CLOCKED, TestedModel, total_runs

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


WAYS = (DENSE_VARIANT, SPARGE_VARIANT, CLOCKED)
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
SHORT_ROUNDS = 15  # at least, at the shortest length, where a few per cent matter
SECONDS, WARM_UP = 5.0, 6.0
"""Time limit of a length; a first round shorter than WARM_UP is discarded."""


def measure_prefill(tested: TestedModel, cell: Cell) -> dict[str, Any]:
    """The seconds of every turn, for each way."""
    ids = tested.window(cell.length)
    reports: dict[str, list[Any]] = {name: [] for name in WAYS}

    def take_turn(name: str) -> float:
        with tested.variant(name) as handle:
            seconds = first_token(tested.model, ids)
            if handle is not None:
                reports[name].append(handle.report())
        return seconds

    with no_garbage_collection(), torch.inference_mode():
        times = take_turns(
            [partial(take_turn, name) for name in WAYS],
            rounds=tested.settings.repeat,
            seconds=SECONDS,
            fewest=SHORT_ROUNDS if cell.length <= SHORT else FEWEST_ROUNDS,
            most=MOST_ROUNDS,
            warm_up=WARM_UP,
        )
    rounds, report = len(times[0]), reports[SPARGE_VARIANT][-1]
    return {
        "rounds": rounds,
        "density": report.density,
        "ran": total_runs(report),
        "fallbacks": report.fallbacks,
        **{f"{name}_seconds": own for name, own in zip(WAYS, times, strict=True)},
        **{
            f"{name}_attention_seconds": [each.seconds for each in reports[name][-rounds:]]
            for name in (SPARGE_VARIANT, CLOCKED)
        },
    }


def first_token(model: Any, ids: Tensor) -> float:
    """Seconds of a prefill that fills the cache and finds the next token."""
    start = time.perf_counter()
    int(model(ids, use_cache=True, logits_to_keep=1).logits.argmax())  # waits for the device
    return time.perf_counter() - start


def prefill_row(length: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, ratios within a round, and the largest speed-up that attention's share allows."""
    dense, sparge = cell["dense_seconds"], cell["sparge_seconds"]
    inside, ours = cell["clocked_attention_seconds"], cell["sparge_attention_seconds"]
    ratios = ratios_of(dense, sparge)
    share = median(ratios_of(inside, cell["clocked_seconds"]))
    return {
        "length": length,
        "rounds": cell["rounds"],
        "dense_seconds": median(dense),
        "sparge_seconds": median(sparge),
        "prefill_speedup": median(ratios),
        "spread": (max(ratios) - min(ratios)) / 2,
        "dense_attention_seconds": median(inside),
        "sparge_attention_seconds": median(ours),
        "attention_speedup": median(ratios_of(inside, ours)),
        "attention_share": share,
        "limit": 1 / (1 - share) if share < 1 else None,
        **{name: cell[name] for name in ("density", "ran", "fallbacks")},
    }


def ratios_of(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Within each round: whatever slowed the machine slowed both."""
    return [a / b for a, b in zip(one, other, strict=True)]


FIRST_EDGE = 128
SUMMED = (DENSE_VARIANT, SPARGE_VARIANT, "extra_squared", "kl", "agree")


def measure_perplexity(tested: TestedModel, cell: Cell) -> dict[str, Any]:
    """One window of the text through both variants, summed by position."""
    ids, split = tested.window(cell.length, cell.window or 0), tested.split
    dense = outputs_of(tested.model, ids, split=split)
    with tested.variant(SPARGE_VARIANT) as handle:
        sparge = outputs_of(tested.model, ids, split=split)
        density = handle.report().density
    return {"density": density, **sums_of(compare(dense, sparge, ids))}


def sums_of(found: Comparison) -> dict[str, Any]:
    """Sums over buckets of positions, which can be added over windows; percentiles cannot."""
    each = {**vars(found), "extra_squared": (found.sparge - found.dense) ** 2}
    buckets = []
    for start, stop in edges_of(len(found.kl) + 1):
        # Token t is predicted by row t - 1; the first token is not predicted.
        part = slice(max(start, 1) - 1, stop - 1)
        sums = {name: float(each[name][part].sum()) for name in SUMMED}
        buckets.append({"start": start, "stop": stop, "tokens": part.stop - part.start, **sums})
    kl = found.kl
    return {"kl_p99": float(kl.quantile(0.99)), "kl_max": float(kl.max()), "buckets": buckets}


def edges_of(length: int) -> list[tuple[int, int]]:
    """Positions in powers of two: the same buckets at every length, except the last."""
    edges, stop = [(0, min(FIRST_EDGE, length))], FIRST_EDGE
    while stop < length:
        edges.append((stop, min(2 * stop, length)))
        stop *= 2
    return edges


def perplexity_row(length: int, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All windows of one length together, and by position."""
    buckets: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for cell in cells:
        for bucket in cell["buckets"]:
            buckets.setdefault((bucket["start"], bucket["stop"]), []).append(bucket)
    every = [bucket for each in buckets.values() for bucket in each]
    return {
        "length": length,
        "windows": len(cells),
        "density": sum(cell["density"] for cell in cells) / len(cells),
        **_summary(every),
        # Of the worst window: percentiles cannot be added.
        "kl_p99": max(cell["kl_p99"] for cell in cells),
        "kl_max": max(cell["kl_max"] for cell in cells),
        "buckets": [
            {"start": start, "stop": stop, **_summary(each)}
            for (start, stop), each in sorted(buckets.items())
        ],
    }


def _summary(buckets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = {name: sum(bucket[name] for bucket in buckets) for name in ("tokens", *SUMMED)}
    n = total["tokens"]
    extra = (total[SPARGE_VARIANT] - total[DENSE_VARIANT]) / n
    variance = max(0.0, total["extra_squared"] / n - extra * extra)
    return {
        "tokens": n,
        "dense_perplexity": math.exp(total[DENSE_VARIANT] / n),
        "sparge_perplexity": math.exp(total[SPARGE_VARIANT] / n),
        "relative": math.expm1(extra),
        # Standard error of the relative change, as if tokens were independent.
        "relative_error": math.sqrt(variance / n),
        "agreement": total["agree"] / n,
        "kl_mean": total["kl"] / n,
    }


@torch.inference_mode()
def measure_errors(tested: TestedModel, cell: Cell) -> dict[str, Any]:
    """Relative L1 against exact attention, and density, for each layer and head."""
    with tested.variant(SPARGE_VARIANT, measure_error=True) as handle:
        tested.model(tested.window(cell.length), use_cache=False, logits_to_keep=1)
        report = handle.report()
    return {
        "layers": [layer.name for layer in report.layers],
        "error": [_plain(layer.error_by_head) for layer in report.layers],
        "density": [_plain(layer.density_by_head) for layer in report.layers],
        "pv_skipped": [layer.pv_skipped for layer in report.layers],
        "fallbacks": report.fallbacks,
    }


def errors_row(length: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics over heads and over layers; None where no layer was measured."""
    by_name = {
        name: sum(errors) / len(errors)
        for name, errors in zip(cell["layers"], cell["error"], strict=True)
        if errors
    }
    heads = torch.tensor([e for layer in cell["error"] for e in layer or []], dtype=torch.float64)
    layers = list(by_name.values())
    return {
        "length": length,
        "layers": len(layers),
        "heads": len(heads),
        "mean": sum(layers) / len(layers) if layers else None,
        "median": float(heads.quantile(0.5)) if layers else None,
        "p95": float(heads.quantile(0.95)) if layers else None,
        "worst_layer": max(by_name, key=by_name.__getitem__, default=None),
        "worst_layer_mean": max(layers, default=None),
        "layer_names": cell["layers"],
        "layer_means": layers,
        "error_by_head": cell["error"],
        "density_by_head": cell["density"],
        "fallbacks": cell["fallbacks"],
    }


def _plain(values: Any) -> list[float] | None:
    return [float(value) for value in values] if values else None
