"""The contenders of a benchmark: dtype, recipe and expected cost of each, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparge import DEFAULT, KeepAll, KeepFraction, Recipe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SDPA, SPARSE, FLEX = "sdpa", "sparse", "flex"
TORCH_FLASH, FLASH_ATTN = "torch flash", "flash_attn"
"""FlashAttention: torch's kernel, and the package; on accelerators."""


def _share(share: float, *, precision: str = "int8", predictor: str = "mean") -> Recipe:
    return Recipe(keep=KeepFraction(share), precision=precision, predictor=predictor)


RECIPES = {
    "all": Recipe(keep=KeepAll()),
    "40%": _share(0.4),
    # The same amount, chosen by the default predictor: shows the cost of its exact rows.
    "40% blend": _share(0.4, predictor="blend"),
    "20%": _share(0.2),
    "default": DEFAULT,
    "fast all": Recipe(keep=KeepAll(), precision="int8-fast"),
    "fast 40%": _share(0.4, precision="int8-fast"),
    "fast 20%": _share(0.2, precision="int8-fast"),
    "fp32 all": Recipe(keep=KeepAll()),
}
"""Measured on every backend; in bf16, unless the name says fp32."""
IN_FLEX = ("all", "40%", "20%", "default")  # FlexAttention has no precision of its own


@dataclass(frozen=True)
class Entry:
    """One contender. backend: the backend that computes attention, or that chooses the blocks."""

    name: str
    kind: str
    dtype: str
    backend: str | None = None
    recipe_name: str | None = None
    recipe: Recipe | None = None


def lineup(backends: Sequence[str], words: Sequence[str] = (), device: str = "cpu") -> list[Entry]:
    """Contenders whose name contains one of the words (all without words), and SDPA of their
    dtypes. Raises ValueError for a word that no name contains."""
    runs = [(SPARSE, backend, backend, name) for backend in backends for name in RECIPES]
    runs += [(FLEX, FLEX, backends[0], name) for name in IN_FLEX]  # blocks of the first backend
    flash = () if device == "cpu" else (TORCH_FLASH, FLASH_ATTN)
    found = [Entry(kind, kind, "bf16") for kind in flash]
    for kind, title, backend, name in runs:
        dtype = "fp32" if name.startswith("fp32") else "bf16"
        found.append(Entry(f"{title} {name}", kind, dtype, backend, name, RECIPES[name]))
    for word in words:
        if not any(word in entry.name for entry in found):
            names = ", ".join(entry.name for entry in found)
            raise ValueError(f"--contenders: no name contains {word!r}; the names are {names}")
    chosen = [e for e in found if not words or any(word in e.name for word in words)]
    result = []
    for dtype in DTYPES:
        same = [entry for entry in chosen if entry.dtype == dtype]
        result += [Entry(f"SDPA {dtype}", SDPA, dtype), *same] if same else []
    return result
