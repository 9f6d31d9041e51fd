"""Seconds to the first token, dense and sparge in turns, and how much of it is attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..integrations import accelerate
from ..report.race import SECONDS_OF_A_LONG_ROUND, quiet, rounds_for
from .settings import DENSE, SHORT, SPARGE
from .subject import Subject, density_of

CLOCKED = "dense, clocked"
"""Dense attention through our own hook, which alone can say how long it took."""
WAYS = (DENSE, SPARGE, CLOCKED)
SHORT_ROUNDS = 15
"""A few per cent are to be told at the shortest length, and its rounds are cheap."""


@dataclass
class Way:
    """seconds, attention: one number for each turn."""

    seconds: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    report: Any = None


def measure_prefill(subject: Subject, length: int) -> dict[str, Any]:
    """Every turn's seconds of each way, in rounds there and back."""
    ids = subject.window(length)
    ways = {name: Way() for name in WAYS}
    with quiet(), torch.inference_mode():
        start = time.perf_counter()
        for name, way in ways.items():
            take_turn(subject, name, ids, way)
        one_round = time.perf_counter() - start
        is_long = one_round > len(WAYS) * SECONDS_OF_A_LONG_ROUND
        if not is_long:  # a cold start is lost in a long round, and shows in a short one
            ways = {name: Way() for name in WAYS}
        least = SHORT_ROUNDS if length <= SHORT else 0
        rounds = subject.settings.repeat or max(least, rounds_for(one_round))
        for i in range(1 if is_long else 0, rounds):
            for name in WAYS[:: 1 if i % 2 == 0 else -1]:
                take_turn(subject, name, ids, ways[name])
    report = ways[SPARGE].report
    return {
        "rounds": rounds,
        "density": density_of(report),
        "ran": _ran(report),
        "fallbacks": report.fallbacks,
        **{f"{_word(name)}_seconds": way.seconds for name, way in ways.items()},
        **{f"{_word(n)}_attention_seconds": w.attention for n, w in ways.items() if w.attention},
    }


def take_turn(subject: Subject, name: str, ids: Tensor, way: Way) -> None:
    model = subject.model
    if name == CLOCKED:
        with accelerate(model, backend="dense") as handle:
            way.seconds.append(first_token(model, ids))
            way.attention.append(handle.report().seconds)
        return
    with subject.variant(name) as handle:
        way.seconds.append(first_token(model, ids))
        if handle is not None:
            way.report = handle.report()
            way.attention.append(way.report.seconds)


def first_token(model: Any, ids: Tensor) -> float:
    """The whole prefill with its cache, and the one row of logits that names the next token."""
    _wait(ids.device)
    start = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    _wait(ids.device)
    return time.perf_counter() - start


def prefill_row(length: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, ratios within a round, and the limit that attention's share sets."""
    dense, sparge = cell["dense_seconds"], cell["sparge_seconds"]
    clocked, inside = cell["clocked_seconds"], cell["clocked_attention_seconds"]
    ours = cell["sparge_attention_seconds"]
    share = statistics.median(a / s for a, s in zip(inside, clocked, strict=True))
    ratios = [d / s for d, s in zip(dense, sparge, strict=True)]
    attention = statistics.median(d / s for d, s in zip(inside, ours, strict=True))
    return {
        "length": length,
        "rounds": cell["rounds"],
        "dense_seconds": statistics.median(dense),
        "sparge_seconds": statistics.median(sparge),
        "prefill_speedup": statistics.median(ratios),
        "spread": (max(ratios) - min(ratios)) / 2,
        "dense_attention_seconds": statistics.median(inside),
        "sparge_attention_seconds": statistics.median(ours),
        "attention_speedup": attention,
        "attention_share": share,
        "limit": 1 / (1 - share) if share < 1 else None,
        "density": cell["density"],
        "ran": cell["ran"],
        "fallbacks": cell["fallbacks"],
    }


def _ran(report: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for layer in report.layers:
        for way, n in layer.ran.items():
            total[way] = total.get(way, 0) + n
    return total


def _word(name: str) -> str:
    return "clocked" if name == CLOCKED else name


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
