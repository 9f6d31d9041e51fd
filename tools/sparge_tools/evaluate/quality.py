"""Perplexity by position, agreement and divergence; and the error of every layer and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .logits import Comparison, compare, outputs_of
from .settings import DENSE_VARIANT, SPARGE_VARIANT, Cell
from .tested_model import TestedModel

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
