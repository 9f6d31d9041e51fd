"""Seconds to the first token, dense and sparge in turns, and the time spent in attention."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparge.support.turns import no_garbage_collection, take_turns

from .settings import DENSE_VARIANT, SHORT, SPARGE_VARIANT, Cell
from .tested_model import CLOCKED, TestedModel, total_runs

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
