"""Quick correctness checks that run real calls, for `sparge doctor` and before a benchmark.

Every backend and precision with all blocks kept, against dense fp64; and sparse recipes in bf16,
against fp64 over the same blocks, which must be the blocks that the reference chooses. A benchmark
prints no numbers if a check fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api.attention import attention, make_plan
from ..engine.recording import record
from ..routing import AUTO, DENSE, backends
from ..support.errors import Unsupported
from ..synthetic import structured_qkv
from ..values.recipe import DEFAULT, KeepAll, KeepFraction, Recipe
from .truth import Truth, relative_l1

Inputs = tuple[Tensor, Tensor, Tensor]
# About three times the reference's error on these inputs; a wrong block costs far more.
TOLERANCES = {"exact": 1e-5, "half": 0.01, "int8": 0.01, "int8-fast": 0.02}
LENGTH = 331  # the last query block and the last key block are partial
SPARSE = {
    "40 % by mean": Recipe(keep=KeepFraction(0.4), predictor="mean"),
    "40 % by mean, fast": Recipe(keep=KeepFraction(0.4), predictor="mean", precision="int8-fast"),
    "default": DEFAULT,
}
SPARSE_LENGTH = 1000
OTHER_BLOCKS = 0.02
"""Share of the blocks that may differ from the reference's: rounding decides between blocks of
nearly equal mass."""
ROW_TOLERANCE = 0.05
"""Largest error of a benchmark row against fp64 over its own blocks: ten times the usual error of
8 bits and a bf16 output."""


@dataclass(frozen=True)
class Check:
    """verdict: "passed", "failed" or "refused". error: the largest relative L1, None if not run."""

    backend: str
    precision: str
    device: str
    verdict: str
    error: float | None
    why: str
    isa: str | None = None
    recipe: str = "all"


def check_backends(device: str = "cpu") -> list[Check]:
    """Every backend, dense attention, and what `auto` chooses, with all blocks kept."""
    inputs = structured_qkv(L=LENGTH, device=device)
    wanted = [(backend.name, precision) for backend in backends() for precision in TOLERANCES]
    recipes = [
        (name, "all", Recipe(keep=KeepAll(), precision=precision))
        for name, precision in (*wanted, (DENSE, "exact"), (AUTO, "exact"))
    ]
    return _checks(inputs, recipes)


def check_sparse(names: Iterable[str], device: str = "cpu") -> list[Check]:
    """Recipes like those of a benchmark, in bf16, with as many key heads as queries."""
    inputs = structured_qkv(Hk=4, L=SPARSE_LENGTH, dtype=torch.bfloat16, device=device)
    return _checks(inputs, [(name, title, SPARSE[title]) for name in names for title in SPARSE])


def wrong_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Messages about sparge's rows whose error against fp64 over the same blocks is too large."""
    return [
        f"{row['contender']} at length {row['length']}, head dim {row['head_dim']}: "
        f"error {row['quantization_error']:.3g} against fp64 over its own blocks"
        for row in rows
        if row["kind"] == "sparse" and row["why_not"] is None
        if not row["quantization_error"] < ROW_TOLERANCE  # also fails for NaN
    ]


class WrongBlocksError(Exception):
    """The backend keeps other blocks than the reference."""


def _checks(inputs: Inputs, wanted: Iterable[tuple[str, str, Recipe]]) -> list[Check]:
    """wanted: backend, name of the recipe, recipe."""
    rows = torch.arange(inputs[0].shape[2])
    truths = [Truth(*inputs, rows=rows, is_causal=causal) for causal in (True, False)]
    return [_check(inputs, truths, *each) for each in wanted]


def _check(
    inputs: Inputs, truths: Iterable[Truth], name: str, recipe_name: str, recipe: Recipe
) -> Check:
    error, verdict, why = None, "passed", ""
    limit = TOLERANCES[recipe.precision]
    with record() as runs:
        try:
            error = max(_error(inputs, truth, name, recipe) for truth in truths)
            if not error < limit:  # also fails for NaN
                verdict, why = "failed", f"the error must be below {limit:g}"
        except Unsupported as refusal:
            verdict, why = "refused", refusal.reasons.get(name, str(refusal))
        except Exception as fault:  # reported as a failed check
            verdict, why = "failed", f"{type(fault).__name__}: {fault}"
    isa, device = runs[0].isa if runs else None, inputs[0].device.type
    return Check(name, recipe.precision, device, verdict, error, why, isa, recipe_name)


def _error(inputs: Inputs, truth: Truth, name: str, recipe: Recipe) -> float:
    """Against fp64 over the same blocks, which must be those that the reference chooses."""
    is_causal = truth.tokens.is_causal
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True, "recipe": recipe}
    expected = truth.dense
    if not isinstance(recipe.keep, KeepAll):
        plan, meant = (
            make_plan(*inputs[:2], backend=each, value=inputs[2], **options)
            for each in (name, "reference")
        )
        others = int((plan.to_mask() ^ meant.to_mask()).sum()) / int(meant.counts.sum())
        if others > OTHER_BLOCKS:
            raise WrongBlocksError(f"{others:.0%} of its blocks are not the reference's")
        expected = truth.of_blocks(plan, recipe.pool_group if recipe.pools else None)
    return relative_l1(attention(*inputs, backend=name, **options), expected)
