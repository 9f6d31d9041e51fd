"""The original's thresholds become a recipe.

simthreshd1 → min_similarity: below 0 the judge is off; from 1 no block is similar, so all run.
cdfthreshd  → KeepMass, topk → KeepFraction; exactly one of them.
pvthreshd   → pv_skip = pvthreshd · ln 2: theirs counts in powers of two, ours in those of e.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...support.errors import Unsupported
from ...values.recipe import KeepFraction, KeepMass, Recipe

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
    amount = topk if cdfthreshd is None else cdfthreshd
    assert amount is not None
    name = "topk" if cdfthreshd is None else "cdfthreshd"
    return _recipe(
        heads,
        name,
        numbers_of(name, amount, heads),
        numbers_of("simthreshd1", simthreshd1, heads),
        numbers_of("pvthreshd", pvthreshd, heads),
        check_flag("attention_sink", attention_sink),
        precision,
    )


def numbers_of(name: str, value: Threshold, heads: int) -> Numbers:
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
    return _recipe(
        heads, "topk", 1.0, -1.0, numbers_of("pvthreshd", pvthreshd, heads), False, precision
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _recipe(*arguments: Any) -> Recipe:
    """Outside any graph, which can read a recipe but not make one; and the same one each time."""
    return _make_recipe(*arguments)


@lru_cache(maxsize=1024)
def _make_recipe(
    heads: int,
    name: str,
    amount: Numbers,
    similarity: Numbers,
    pv: Numbers,
    sink: bool,
    precision: str,
) -> Recipe:
    per_head = any(isinstance(x, tuple) for x in (amount, similarity, pv))
    n = heads if per_head else 1
    amounts, similarities, pvs = (
        x if isinstance(x, tuple) else (x,) * n for x in (amount, similarity, pv)
    )
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
