"""Renders compared with dense: the rows of tables, and the sentences of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparge.cli.screen import Column, Table, error, percent, share, times

from ..renders import Renders
from ..renders.result import decibels
from .comparison import seconds

NAMES = {
    "psnr": "PSNR",
    "ssim": "SSIM",
    "flip": "FLIP",
    "latent_error": "error of the final latents",
    "iou": "IoU of the mask",
    "relative_l2": "relative L2",
    "largest_error": "largest error",
    "agreement": "same tokens",
    "accuracy_dense": "right tokens, dense",
    "accuracy_sparse": "right tokens, sparge",
}
UNITS = {"psnr": "dB", "largest_error": "m"}
WORST = "_worst"


def name_of(figure: str) -> str:
    """In words; of the worst frame of a video too."""
    base = figure.removesuffix(WORST)
    words = NAMES.get(base, base)
    return words if base == figure else f"{words} of the worst frame"


def form_of(figure: str) -> Callable[[float], str]:
    base = figure.removesuffix(WORST)
    return {"psnr": decibels, "largest_error": "{:.3f}".format}.get(base, error)


def words_of(figure: str, value: float) -> str:
    """Such as "PSNR 31.20 dB"."""
    unit = UNITS.get(figure.removesuffix(WORST))
    shown = form_of(figure)(value)
    return f"{name_of(figure)} {shown}{f' {unit}' if unit and math.isfinite(value) else ''}"


def heading_of(figure: str) -> str:
    base = figure.removesuffix(WORST)
    words = NAMES.get(base, base).replace(" of the ", "\nof the ").replace(", ", "\n")
    below = "worst" if base != figure else UNITS.get(figure)
    return words if below is None else f"{words}\n{below}"


def pairs_table(renders: Renders) -> Table:
    """One row for each input, and one for all."""
    columns = [
        Column("caption", "input"),
        *([Column("seed", "seed", "{}".format)] if renders.pairs[0].seed is not None else []),
        *(Column(name, heading_of(name), form_of(name)) for name in renders.figures),
        Column("density", "density", share),
        Column("sparse_density", "where\nsparse", share),
        Column("dense_seconds", "dense\ns", "{:.2f}".format),
        Column("sparse_seconds", "sparge\ns", "{:.2f}".format),
        Column("speedup", "times\ndense", times),
    ]
    rows: list[Mapping[str, Any]] = [
        {
            **pair.figures,
            "caption": _short(pair.caption),
            "seed": pair.seed,
            "density": pair.report.density,
            "sparse_density": pair.report.sparse_density,
            "dense_seconds": pair.dense_seconds,
            "sparse_seconds": pair.sparse_seconds,
            "speedup": pair.speedup,
        }
        for pair in renders.pairs
    ]
    if len(rows) > 1:
        means = {name: renders.mean(name) for name in renders.figures}
        means |= {"density": renders.density, "speedup": renders.speedup}
        rows.append({**means, "caption": "mean", "sparse_density": renders.sparse_density})
    return Table(f"{renders.model}: {renders.about}", columns, rows, notes(renders))


def notes(renders: Renders) -> list[str]:
    missing = dict.fromkeys(
        f"no {what}: {why}" for pair in renders.pairs for what, why in pair.missing.items()
    )
    told = dict.fromkeys(note for pair in renders.pairs for note in pair.report.notes)
    reasons = [f"not sparse {n}×: {reason}" for reason, n in renders.fallbacks.items()]
    return [
        "density: kept / allowed blocks over all attention calls; a dense call counts as 1. "
        "where sparse: of the calls that were. times dense: of the whole run; their median in the "
        "row of means.",
        *missing,
        *told,
        *reasons,
    ]


def verdict(sections: Sequence[Renders]) -> str:
    """What sparse attention did to the results, in one sentence for each model."""
    return _of_each(sections, _verdict)


def cost(sections: Sequence[Renders]) -> str:
    """How long it took, in one sentence for each model."""
    return _of_each(sections, _cost)


def _of_each(sections: Sequence[Renders], say: Callable[[Renders], str]) -> str:
    if len(sections) == 1:
        return say(sections[0])
    return " ".join(f"{renders.model}: {say(renders)}" for renders in sections)


def _verdict(renders: Renders) -> str:
    blocks = f"{percent(renders.density)} of the attention blocks"
    mean = renders.mean(renders.metric)
    if mean is None:
        return f"{blocks} were computed."
    if math.isinf(mean):
        return f"Pictures equal to the dense ones, with {blocks}."
    return f"{words_of(renders.metric, mean)} against dense, with {blocks}."


def _cost(renders: Renders) -> str:
    dense, sparse = (
        sum(getattr(pair, name) for pair in renders.pairs) / len(renders.pairs)
        for name in ("dense_seconds", "sparse_seconds")
    )
    speed = f"{times(renders.speedup)} the speed"
    return f"{seconds(dense)} dense, {seconds(sparse)} with sparge per input ({speed})."


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
