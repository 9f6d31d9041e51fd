"""The contenders of a benchmark: dtype, recipe and expected cost of each, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..recipe import DEFAULT, KeepAll, KeepFraction, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SDPA, SPARSE, FLEX = "sdpa", "sparse", "flex"


@dataclass(frozen=True)
class BenchRecipe:
    """A recipe that is measured on every backend.

    name: what is kept; int8, or int8-fast if the name says fast. in_flex: FlexAttention runs it
    too.
    """

    name: str
    recipe: Recipe
    dtype: str = "bf16"
    in_flex: bool = False


def _share(share: float, *, precision: str = "int8", predictor: str = "mean") -> Recipe:
    return Recipe(keep=KeepFraction(share), precision=precision, predictor=predictor)


RECIPES = (
    BenchRecipe("all", Recipe(keep=KeepAll()), in_flex=True),
    BenchRecipe("40%", _share(0.4), in_flex=True),
    # The same amount, chosen by the default predictor: shows the cost of its exact rows.
    BenchRecipe("40% blend", _share(0.4, predictor="blend")),
    BenchRecipe("20%", _share(0.2), in_flex=True),
    BenchRecipe("default", DEFAULT, in_flex=True),
    BenchRecipe("fast all", Recipe(keep=KeepAll(), precision="int8-fast")),
    BenchRecipe("fast 40%", _share(0.4, precision="int8-fast")),
    BenchRecipe("fast 20%", _share(0.2, precision="int8-fast")),
    BenchRecipe("fp32 all", Recipe(keep=KeepAll()), dtype="fp32"),
)


@dataclass(frozen=True)
class Entry:
    """One contender. backend: the backend that computes attention, or that chooses the blocks."""

    name: str
    kind: str
    dtype: str
    backend: str | None = None
    recipe_name: str | None = None
    recipe: Recipe | None = None


def lineup(backends: Sequence[str], words: Sequence[str] = ()) -> list[Entry]:
    """Contenders whose name contains one of the words (all without words), and SDPA of their
    dtypes. Raises ValueError for a word that no name contains."""
    found = [
        Entry(f"{backend} {r.name}", SPARSE, r.dtype, backend, r.name, r.recipe)
        for backend in backends
        for r in RECIPES
    ]
    # FlexAttention has no precision of its own and gets the blocks of the first backend.
    found += [
        Entry(f"flex {r.name}", FLEX, r.dtype, backends[0], r.name, r.recipe)
        for r in RECIPES
        if r.in_flex
    ]
    for word in words:
        if not any(word in entry.name for entry in found):
            names = ", ".join(entry.name for entry in found)
            raise ValueError(f"--contenders: no name contains {word!r}; the names are {names}")
    chosen = [e for e in found if not words or any(word in e.name for word in words)]
    result = []
    for dtype in DTYPES:
        same = [entry for entry in chosen if entry.dtype == dtype]
        if same:
            result += [Entry(f"SDPA {dtype}", SDPA, dtype), *same]
    return result
