"""Who takes part in the benchmark: dtype, recipe and roughly how long each takes, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..recipe import DEFAULT, KeepAll, KeepFraction, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SDPA, SPARSE, FLEX = "sdpa", "sparse", "flex"


@dataclass(frozen=True)
class Wanted:
    """name: how much is kept; in int8, and in int8-fast if it says fast.

    work: its time as a share of SDPA's, guessed once for the estimate and nothing else.
    """

    name: str
    recipe: Recipe
    work: float
    dtype: str = "bf16"
    in_flex: bool = False


def _share(share: float, *, precision: str = "int8", predictor: str = "mean") -> Recipe:
    return Recipe(keep=KeepFraction(share), precision=precision, predictor=predictor)


WANTED = (
    Wanted("all", Recipe(keep=KeepAll()), 1.0, in_flex=True),
    Wanted("40%", _share(0.4), 0.45, in_flex=True),
    # The same amount chosen by the default predictor: what its exact rows cost on top.
    Wanted("40% blend", _share(0.4, predictor="blend"), 0.5),
    Wanted("20%", _share(0.2), 0.25, in_flex=True),
    Wanted("default", DEFAULT, 0.35, in_flex=True),
    Wanted("fast all", Recipe(keep=KeepAll(), precision="int8-fast"), 1.0),
    Wanted("fast 40%", _share(0.4, precision="int8-fast"), 0.45),
    Wanted("fast 20%", _share(0.2, precision="int8-fast"), 0.25),
    Wanted("fp32 all", Recipe(keep=KeepAll()), 1.0, dtype="fp32"),
)


@dataclass(frozen=True)
class Entry:
    """One contender's name and what it runs. backend: whose attention, or whose blocks."""

    name: str
    kind: str
    dtype: str
    work: float
    backend: str | None = None
    recipe_name: str | None = None
    recipe: Recipe | None = None


def entries(backends: Sequence[str], words: Sequence[str] = ()) -> list[Entry]:
    """Those whose name contains one of the words, all without words, and SDPA of their dtypes."""
    found = [
        Entry(f"{backend} {w.name}", SPARSE, w.dtype, w.work, backend, w.name, w.recipe)
        for backend in backends
        for w in WANTED
    ]
    # Its blocks are those of the first backend; FlexAttention has no precision of its own.
    found += [
        Entry(f"flex {w.name}", FLEX, w.dtype, w.work, backends[0], w.name, w.recipe)
        for w in WANTED
        if w.in_flex
    ]
    for word in words:
        if not any(word in entry.name for entry in found):
            names = ", ".join(entry.name for entry in found)
            raise ValueError(f"--contenders: no name contains {word!r}; there are {names}")
    chosen = [e for e in found if not words or any(word in e.name for word in words)]
    result = []
    for dtype in DTYPES:
        same = [entry for entry in chosen if entry.dtype == dtype]
        if same:
            result += [Entry(f"SDPA {dtype}", SDPA, dtype, 1.0), *same]
    return result
