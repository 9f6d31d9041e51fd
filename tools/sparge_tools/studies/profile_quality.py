"""A tuned profile compared with one recipe for all heads: density at the same perplexity, on
held-out text.

The recipe is measured at several masses; its density at the profile's perplexity is interpolated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from sparge import DEFAULT, KeepMass, Profile, Recipe, accelerate
from sparge.cli.screen import Column, Table, share
from sparge.routing import CPU

from ..evaluate.logits import compare, outputs_of, splits
from ..tuning import Trace, trace_model
from ..tuning.tuning_windows import Window, calibration_windows, held_out_windows

MASSES = (0.9, 0.92, 0.94, 0.96, 0.98, 0.99)
TUNED = "tuned profile"


@dataclass(frozen=True)
class Quality:
    """Density and perplexity over all windows."""

    what: str
    density: float
    perplexity: float


def bench_traces(
    model: Any,
    tokenizer: Any,
    directory: Path,
    *,
    name: str,
    length: int,
    inputs: int,
    held_out: int = 3,
    texts: Sequence[str] = ("essays",),
    layers: Sequence[str] | None = None,
    step: Callable[[str], None] = lambda what: None,
) -> tuple[Trace, Trace, float]:
    """A trace to tune on, a held-out trace, and the seconds that the first took."""

    def trace(windows: Sequence[Window], folder: str) -> Trace:
        return trace_model(
            model,
            [window.tokens for window in windows],
            directory / folder,
            layers=layers,
            name=name,
            about=[window.about for window in windows],
            calibration={"texts": list(texts), "length": length},
            done=lambda digest: step(f"{folder} {digest[:12]}"),
        )

    start = time.perf_counter()
    mine = trace(calibration_windows(texts, tokenizer, length=length, inputs=inputs), "calibration")
    seconds = time.perf_counter() - start
    others = held_out_windows(texts, tokenizer, length=length, inputs=held_out)
    return mine, trace(others, "held-out"), seconds


def compare_quality(
    model: Any,
    windows: Sequence[Tensor],
    profile: Profile | None,
    *,
    recipe: Recipe = DEFAULT,
    masses: Sequence[float] = MASSES,
    backend: str = CPU,
    step: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """The profile, and the recipe at several masses, on windows `[1, L]` of tokens."""
    settings: dict[str, dict[str, Any]] = {
        f"mass {mass:g}": {"recipe": replace(recipe, keep=KeepMass(mass))} for mass in masses
    }
    if profile is not None:
        settings[TUNED] = {"profile": profile}
    split = splits(model, windows[0])
    lost: dict[str, float] = dict.fromkeys([*settings, "dense"], 0.0)
    density: dict[str, float] = dict.fromkeys(settings, 0.0)
    tokens = 0
    for window in windows:
        dense = outputs_of(model, window, split=split)
        for what, given in settings.items():
            with accelerate(model, backend=backend, **given) as handle:
                outputs = outputs_of(model, window, split=split)
                density[what] += handle.report().density / len(windows)
            found = compare(dense, outputs, window)
            lost[what] += float(found.sparge.sum())
            step(what)
        lost["dense"] += float(found.dense.sum())
        tokens += window.shape[1] - 1
    rows = [
        Quality(what, density.get(what, 1.0), math.exp(nats / tokens))
        for what, nats in lost.items()
    ]
    return summary(rows)


def summary(rows: Sequence[Quality]) -> dict[str, Any]:
    """Plain data. same_perplexity: the recipe's density at the profile's perplexity."""
    tuned = next((row for row in rows if row.what == TUNED), None)
    curve = [row for row in rows if row.what.startswith("mass ")]
    same = None if tuned is None else density_at(curve, tuned.perplexity)
    return {
        "format": "sparge.benchmarks.profile_quality/1",
        "rows": [vars(row) for row in rows],
        "same_perplexity": same,
        "saved": None if same is None or tuned is None else 1.0 - tuned.density / same,
    }


def density_at(curve: Sequence[Quality], perplexity: float) -> float | None:
    """Linear interpolation between neighbours in density; None outside the curve."""
    points = sorted(curve, key=lambda row: row.density)
    for a, b in pairwise(points):
        low, high = sorted((a.perplexity, b.perplexity))
        if low <= perplexity <= high and a.perplexity != b.perplexity:
            t = (perplexity - a.perplexity) / (b.perplexity - a.perplexity)
            return a.density + t * (b.density - a.density)
    return None


def quality_table(document: Mapping[str, Any]) -> Table:
    same = document["same_perplexity"]
    note = "one recipe does not reach the profile's perplexity at these masses"
    if same is not None:
        note = (
            f"one recipe has the profile's perplexity at density {same:.3f}; the profile's is "
            f"{document['saved']:.0%} lower"
        )
    return Table(
        title="a tuned profile and one recipe for all heads",
        columns=[
            Column("what", "what"),
            Column("density", "density", share),
            Column("perplexity", "perplexity", "{:.3f}".format),
        ],
        rows=document["rows"],
        notes=[note],
    )
