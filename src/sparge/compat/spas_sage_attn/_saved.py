"""The values a tuned module saves, one per head: read without running anything, and checked.

is_sparse     bool   False leaves the head dense
cdfthreshd    mass to keep            simthreshd1   similarity below which a block always runs
pvthreshd     second filter, log2     simthreshd2   never used, kept for the original
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...values.recipe import KeepAll, KeepMass, Recipe, heads_of
from ._recipes import LN2, recipe_of

FIELDS = ("is_sparse", "cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd")
READ = tuple(name for name in FIELDS if name != "simthreshd2")
Values = dict[str, Tensor]


def read_values(path: str | os.PathLike[str]) -> Values:
    """The tensors of a file that `torch.save` wrote; anything but tensors is refused unread."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, and reading that could run its code; needed is a "
            "dict of tensors. If you trust where it comes from, load it yourself, keep the "
            f"tensors, and save those again. ({_first_line(error)})"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{path} is damaged or was not written by torch.save: {_first_line(error)}"
        ) from error
    check_saved(saved, str(path))
    return dict(saved)


def check_saved(saved: Any, where: str = "saved") -> None:
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"{where} must hold a dict of module names and tensors, got {type(saved).__name__}; "
            "extract_sparse_attention_state_dict(model) makes one"
        )
    for name, value in saved.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(
                f"{where} must map names to tensors, got {name!r}: {type(value).__name__}; keep "
                "only what extract_sparse_attention_state_dict gave"
            )


def check_values(values: Mapping[str, Tensor], where: str) -> Values:
    """The fields of one module as float32 and bool on the CPU, or an error that names it."""
    missing = [name for name in READ if name not in values]
    if missing:
        raise ValueError(
            f"{where} has no {', '.join(missing)}; needed are {', '.join(FIELDS)}, one value per "
            "head"
        )
    plain = {name: values[name].detach().cpu() for name in FIELDS if name in values}
    plain.setdefault("simthreshd2", torch.zeros_like(plain["cdfthreshd"]))
    shapes = {tuple(value.shape) for value in plain.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1 or 0 in next(iter(shapes)):
        given = ", ".join(f"{name} {list(value.shape)}" for name, value in plain.items())
        raise ValueError(f"{where} must have 1-D values, one for each head, got {given}")
    # clone: the caller's tensors stay theirs
    checked = {name: value.to(torch.float32, copy=True) for name, value in plain.items()}
    checked["is_sparse"] = plain["is_sparse"] != 0
    try:
        recipe_of_values(checked)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return checked


def recipe_of_values(values: Mapping[str, Tensor], precision: str = "int8") -> Recipe:
    """What a module with these values runs; a head that is not sparse computes every block."""
    rows = zip(*(values[name].tolist() for name in READ), strict=True)
    heads = [
        (mass, similarity, pv) if sparse else (1.0, 1.0, math.inf)
        for sparse, mass, similarity, pv in rows
    ]
    masses, similarities, pvs = map(list, zip(*heads, strict=True))
    return recipe_of(
        len(heads),
        simthreshd1=similarities,
        cdfthreshd=masses,
        topk=None,
        pvthreshd=pvs,
        attention_sink=True,  # as the original runs its tuned modules
        precision=precision,
    )


def values_of_recipe(recipe: Recipe, heads: int) -> Values:
    """A tuned recipe in the original's terms; a mass of 1.0 is a head left dense."""
    if not isinstance(recipe, Recipe) or not isinstance(recipe.keep, KeepMass | KeepAll):
        raise TypeError(f"tuning must give a Recipe that keeps a mass, got {recipe!r}")
    mass = recipe.keep.mass if isinstance(recipe.keep, KeepMass) else 1.0
    masses = torch.tensor(heads_of(mass, heads, none=1.0))
    sparse = masses < 1.0
    similarity = torch.tensor(heads_of(recipe.min_similarity, heads, none=-1.0))
    pv = torch.tensor(heads_of(recipe.pv_skip, heads, none=math.inf)) / LN2
    return {
        "is_sparse": sparse,
        "cdfthreshd": masses,
        "simthreshd1": torch.where(sparse, similarity, 1.0),
        "simthreshd2": torch.zeros(heads),
        "pvthreshd": pv,
    }


def safest(a: Values, b: Values) -> Values:
    """The safer of two values everywhere; a head that is dense in one stays dense."""
    return {
        name: (a[name] & b[name]) if name == "is_sparse" else torch.maximum(a[name], b[name])
        for name in FIELDS
    }


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
