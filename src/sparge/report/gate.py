"""The quick checks that really run, with the instruction set that would be measured.

Every backend and precision, all blocks, against dense fp64; and sparse recipes in bf16 against
fp64 of the same blocks, which must be those that the reference chooses.
Numbers of a backend that fails here mean nothing, so a benchmark refuses to print them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import attention, make_plan
from ..dispatch import AUTO, DENSE, backends
from ..errors import Unsupported
from ..recipe import DEFAULT, KeepAll, KeepFraction, Recipe
from ..record import record
from ..synthetic import structured_qkv
from .measure import Truth, dense_fp64, relative_l1

# About three times what the reference loses on these inputs; a wrong block loses far more.
TOLERANCES = {"exact": 1e-5, "half": 0.01, "int8": 0.01, "int8-fast": 0.02}
LENGTH = 331
"""Ends in the middle of a query block and of a key block."""
SPARSE = {
    "40 % by mean": Recipe(keep=KeepFraction(0.4), predictor="mean"),
    "40 % by mean, fast": Recipe(keep=KeepFraction(0.4), predictor="mean", precision="int8-fast"),
    "default": DEFAULT,
}
SPARSE_LENGTH = 1000
OTHER_BLOCKS = 0.02
"""Share of the blocks that may be others than the reference's: sums in another order choose
differently between two that are all but equal."""
ROW_TOLERANCE = 0.05
"""A row of the benchmark further from fp64 of its own blocks than this is wrong: ten times what
8 bits and a bf16 output lose."""


@dataclass(frozen=True)
class Check:
    """verdict: "passed", "failed" or "refused"; error: the worst relative L1, if it ran."""

    backend: str
    precision: str
    device: str
    verdict: str
    error: float | None
    why: str
    isa: str | None = None
    recipe: str = "all"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_backends(device: str = "cpu") -> list[Check]:
    """Every backend, dense attention, and whatever `auto` takes, with all blocks."""
    inputs = structured_qkv(L=LENGTH, device=device)
    sparse = [(backend.name, precision) for backend in backends() for precision in TOLERANCES]
    wanted = [*sparse, (DENSE, "exact"), (AUTO, "exact")]
    truths = {causal: dense_fp64(*inputs, is_causal=causal) for causal in (True, False)}

    def error_of(name: str, recipe: Recipe) -> float:
        return max(
            relative_l1(_run(name, inputs, recipe, is_causal=causal), truth)
            for causal, truth in truths.items()
        )

    recipes = {precision: Recipe(keep=KeepAll(), precision=precision) for precision in TOLERANCES}
    return [_check(name, recipes[precision], "all", device, error_of) for name, precision in wanted]


def check_sparse(names: Iterable[str]) -> list[Check]:
    """The recipes that a benchmark measures, on the CPU in bf16, as many key heads as query's."""
    inputs = structured_qkv(Hk=4, L=SPARSE_LENGTH, dtype=torch.bfloat16)
    rows = torch.arange(SPARSE_LENGTH)
    truths = {c: Truth(*inputs, rows=rows, is_causal=c) for c in (True, False)}

    def error_of(name: str, recipe: Recipe) -> float:
        errors = []
        for causal, truth in truths.items():
            plan, meant = (
                make_plan(*inputs[:2], is_causal=causal, recipe=recipe, backend=backend)
                for backend in (name, "reference")
            )
            others = int((plan.to_mask() ^ meant.to_mask()).sum()) / int(meant.counts.sum())
            if others > OTHER_BLOCKS:
                raise WrongBlocksError(f"{others:.0%} of its blocks are not those of the reference")
            out = _run(name, inputs, recipe, is_causal=causal)
            errors.append(relative_l1(out, truth.of_blocks(plan)))
        return max(errors)

    return [
        _check(name, recipe, recipe_name, "cpu", error_of)
        for name in names
        for recipe_name, recipe in SPARSE.items()
    ]


def wrong_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of a benchmark's rows, those of ours that are too far from fp64 of the same blocks."""
    return [
        f"{row['contender']} at length {row['length']}, head dim {row['head_dim']}: "
        f"{row['quantization_error']:.3g} from fp64 of its own blocks"
        for row in rows
        if row["kind"] == "sparse" and row["why_not"] is None
        if not row["quantization_error"] < ROW_TOLERANCE  # NaN is not
    ]


class WrongBlocksError(Exception):
    """The backend's selection is not the reference's."""


def _run(
    name: str, inputs: tuple[Tensor, Tensor, Tensor], recipe: Recipe, *, is_causal: bool
) -> Tensor:
    out = attention(*inputs, is_causal=is_causal, enable_gqa=True, recipe=recipe, backend=name)
    assert isinstance(out, Tensor)
    return out


def _check(
    name: str,
    recipe: Recipe,
    recipe_name: str,
    device: str,
    error_of: Callable[[str, Recipe], float],
) -> Check:
    what = (name, recipe.precision, device)
    error, why = None, ""
    with record() as runs:
        try:
            error = error_of(name, recipe)
            limit = TOLERANCES[recipe.precision]
            verdict = "passed" if error < limit else "failed"  # NaN is not
            why = "" if verdict == "passed" else f"the error must be below {limit:g}"
        except Unsupported as refusal:
            verdict, why = "refused", refusal.reasons.get(name, str(refusal))
        except Exception as fault:  # a fault of a backend is an answer here, not the end
            verdict, why = "failed", f"{type(fault).__name__}: {fault}"
    isa = runs[0].isa if runs else None
    return Check(*what, verdict, error, why, isa, recipe_name)
