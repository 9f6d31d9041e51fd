"""Seconds to the first token, dense and sparge in turns, and the time spent in attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..integrations import accelerate
from ..support.turns import no_garbage_collection, take_turns
from .settings import DENSE_VARIANT, SHORT, SPARGE_VARIANT
from .tested_model import TestedModel, total_runs

CLOCKED = "clocked"
"""Dense attention through sparge's hook, which measures the time spent in attention."""
FEWEST_ROUNDS, MOST_ROUNDS, SHORT_ROUNDS = 3, 25, 15
"""SHORT_ROUNDS: at least, at the shortest length, where a few per cent matter."""
SECONDS, WARM_UP = 5.0, 6.0
"""Time budget of a length; a first round shorter than WARM_UP is discarded."""


@dataclass
class Way:
    """One way to run the model. attention: seconds in attention, one per turn, warm-up included."""

    tested: TestedModel
    name: str
    ids: Tensor
    attention: list[float] = field(default_factory=list)
    report: Any = None

    def take_turn(self) -> float:
        model = self.tested.model
        clocked = self.name == CLOCKED
        with (
            accelerate(model, backend="dense")
            if clocked
            else self.tested.variant(self.name) as handle
        ):
            seconds = first_token(model, self.ids)
            if handle is not None:
                self.report = handle.report()
                self.attention.append(self.report.seconds)
        return seconds


def measure_prefill(tested: TestedModel, length: int) -> dict[str, Any]:
    """The seconds of every turn, for each way."""
    ids = tested.window(length)
    ways = [Way(tested, name, ids) for name in (DENSE_VARIANT, SPARGE_VARIANT, CLOCKED)]
    with no_garbage_collection(), torch.inference_mode():
        times = take_turns(
            [way.take_turn for way in ways],
            rounds=tested.settings.repeat,
            seconds=SECONDS,
            fewest=SHORT_ROUNDS if length <= SHORT else FEWEST_ROUNDS,
            most=MOST_ROUNDS,
            warm_up=WARM_UP,
        )
    rounds, report = len(times[0]), ways[1].report
    return {
        "rounds": rounds,
        "density": report.density,
        "ran": total_runs(report),
        "fallbacks": report.fallbacks,
        **{f"{way.name}_seconds": own for way, own in zip(ways, times, strict=True)},
        **{f"{way.name}_attention_seconds": way.attention[-rounds:] for way in ways[1:]},
    }


def first_token(model: Any, ids: Tensor) -> float:
    """Seconds of a prefill that fills the cache and computes the logits of the last row."""
    _wait(ids.device)
    start = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    _wait(ids.device)
    return time.perf_counter() - start


def prefill_row(length: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, ratios within a round, and the largest speed-up that attention's share allows."""
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


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
