"""The original's thresholds, and the values a tuned module saves, become a recipe.

simthreshd1 → min_similarity: below 0 the judge is off; from 1 no block is similar, so all run.
cdfthreshd  → KeepMass, topk → KeepFraction; exactly one of them.
pvthreshd   → pv_skip = pvthreshd · ln 2: theirs counts in powers of two, ours in those of e.

Saved values, one per head, are read without running anything, and checked:
is_sparse     bool   False leaves the head dense
cdfthreshd    mass to keep            simthreshd1   similarity below which a block always runs
pvthreshd     second filter, log2     simthreshd2   never used, kept for the original
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...support.errors import Unsupported
from ...values.recipe import KeepAll, KeepFraction, KeepMass, Recipe, heads_of

LN2 = math.log(2.0)
Numbers = float | tuple[float, ...]
Threshold = float | Tensor | Sequence[float]


def recipe_of(
    heads: int,
    *,
    simthreshd1: Threshold,
    cdfthreshd: Threshold | None,
    topk: Threshold | None,
    pvthreshd: Threshold,
    attention_sink: bool,
    precision: str = "int8",
) -> Recipe:
    """What the original's arguments ask for; thresholds are one number, or one per head."""
    if (cdfthreshd is None) == (topk is None):
        raise ValueError(
            f"exactly one of cdfthreshd and topk must be set, got cdfthreshd={cdfthreshd!r} and "
            f"topk={topk!r}; set the other one to None"
        )
    name = "topk" if cdfthreshd is None else "cdfthreshd"
    given = {
        name: topk if cdfthreshd is None else cdfthreshd,
        "simthreshd1": simthreshd1,
        "pvthreshd": pvthreshd,
    }
    numbers = tuple(numbers_of(each, value, heads) for each, value in given.items())
    return _recipe(heads, name, numbers, check_flag("attention_sink", attention_sink), precision)


def numbers_of(name: str, value: Threshold | None, heads: int) -> Numbers:
    """One number, or a tuple with one for each head."""
    if isinstance(value, Tensor):
        if value.dim() > 1:
            raise ValueError(
                f"{name} must be a number or 1-D with one number per head, got shape "
                f"{list(value.shape)}; give each batch element a call of its own"
            )
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return _number(name, value)
    each = tuple(_number(name, number) for number in value)
    if len(each) != heads:
        raise ValueError(
            f"{name} has {len(each)} numbers for {heads} query heads; give one per query head, or "
            "one for all (is tensor_layout right?)"
        )
    return each


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def precision_of(dtype: torch.dtype, smooth_k: Any) -> str:
    """int8 keys are always smoothed here, so unsmoothed ones are attended to unquantized."""
    if check_flag("smooth_k", smooth_k):
        return "int8"
    return "half" if dtype in (torch.float16, torch.bfloat16) else "exact"


def pv_recipe(heads: int, pvthreshd: Threshold, precision: str) -> Recipe:
    """For a block mask, where nothing is predicted: the second filter and the precision alone."""
    numbers = (1.0, -1.0, numbers_of("pvthreshd", pvthreshd, heads))
    return _recipe(heads, "topk", numbers, False, precision)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@lru_cache(maxsize=1024)
def _recipe(
    heads: int, name: str, numbers: tuple[Numbers, ...], sink: bool, precision: str
) -> Recipe:
    """numbers: of `name`, simthreshd1 and pvthreshd. Outside any graph, which can read a recipe but
    not make one; and the same one each time."""
    per_head = any(isinstance(x, tuple) for x in numbers)
    n = heads if per_head else 1
    amounts, similarities, pvs = (x if isinstance(x, tuple) else (x,) * n for x in numbers)
    for number in amounts:
        if not 0.0 < number <= 1.0:
            raise ValueError(
                f"{name} must be in (0, 1], got {number}; the smallest useful value keeps one "
                "block in each row"
            )
    for number in pvs:
        if not number > 0.0:
            raise ValueError(
                f"pvthreshd must be greater than 0, got {number}; larger is safer, and "
                "float('inf') is off"
            )
    dense = [s >= 1.0 for s in similarities]
    kept = tuple(1.0 if all_ else a for a, all_ in zip(amounts, dense, strict=True))
    judge = tuple(None if s < 0.0 else min(s, 1.0) for s in similarities)
    skip = tuple(None if math.isinf(p) else p * LN2 for p in pvs)
    keep = KeepFraction if name == "topk" else KeepMass
    return Recipe(
        keep=keep(kept if per_head else kept[0]),
        predictor="mean",
        min_similarity=judge if per_head else judge[0],
        pv_skip=skip if per_head else skip[0],
        precision=precision,
        sink_blocks=int(sink),
        local_blocks=0,
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number, or a 1-D tensor with one per head; got {value!r}"
        )
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got nan")
    return float(value)


def refuse(what: str, way_out: str) -> Unsupported:
    """A fair request that the original took and ignored, or that has no meaning here."""
    return Unsupported(what, {}, way_out)


FIELDS = ("is_sparse", "cdfthreshd", "simthreshd1", "simthreshd2", "pvthreshd")
READ = tuple(name for name in FIELDS if name != "simthreshd2")
Values = dict[str, Tensor]


def _load(path: str | os.PathLike[str]) -> Any:
    """What is in a file that `torch.save` wrote; anything but tensors is refused unread."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
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


def read_saved(saved: Any) -> Values:
    """Saved values, from a dict or from the path of its file; all are tensors with names."""
    where = "saved"
    if isinstance(saved, str | os.PathLike):
        where, saved = str(saved), _load(saved)
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
    return dict(saved)


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
