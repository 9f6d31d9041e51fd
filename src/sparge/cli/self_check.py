"""Quick correctness checks that run real calls: every backend and precision with all blocks kept,
against dense attention in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.attention import attention
from ..engine.recording import record
from ..routing import AUTO, DENSE, backends
from ..support.errors import Unsupported
from ..synthetic import structured_qkv
from ..values.recipe import KeepAll, Recipe

# About three times the reference's error on these inputs; a wrong block costs far more.
TOLERANCES = {"exact": 1e-5, "half": 0.01, "int8": 0.01, "int8-fast": 0.02}
LENGTH = 331  # the last query block and the last key block are partial


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


def check_backends(
    device: str = "cpu",
    wanted: Iterable[tuple[str, str, Recipe]] | None = None,
    error_of: Callable[[str, Recipe], float] | None = None,
) -> list[Check]:
    """Run backends; one check for each. wanted: backend, name of the recipe, recipe; error_of: the
    error of a backend with a recipe, which may raise. Without them: every backend, dense attention,
    and what `auto` chooses, with all blocks kept, against dense attention in fp64."""
    if wanted is None or error_of is None:
        error_of = _error_beside_dense(device)
        pairs = [(backend.name, precision) for backend in backends() for precision in TOLERANCES]
        wanted = [
            (name, "all", Recipe(keep=KeepAll(), precision=precision))
            for name, precision in (*pairs, (DENSE, "exact"), (AUTO, "exact"))
        ]
    return [_check(device, error_of, *named_recipe) for named_recipe in wanted]


def relative_l1(out: Tensor, truth: Tensor) -> float:
    """Σ|out - truth| / Σ|truth|, in fp64."""
    out, truth = out.cpu().double(), truth.cpu().double()
    return float((out - truth).abs().sum() / truth.abs().sum())


def _check(
    device: str,
    error_of: Callable[[str, Recipe], float],
    name: str,
    recipe_name: str,
    recipe: Recipe,
) -> Check:
    error, verdict, why = None, "passed", ""
    limit = TOLERANCES[recipe.precision]
    with record() as runs:
        try:
            error = error_of(name, recipe)
            if not error < limit:  # also fails for NaN
                verdict, why = "failed", f"the error must be below {limit:g}"
        except Unsupported as refusal:
            verdict, why = "refused", refusal.reasons.get(name, str(refusal))
        except Exception as fault:  # reported as a failed check
            verdict, why = "failed", f"{type(fault).__name__}: {fault}"
    isa, kind = runs[0].isa if runs else None, torch.device(device).type
    return Check(name, recipe.precision, kind, verdict, error, why, isa, recipe_name)


def _error_beside_dense(device: str) -> Callable[[str, Recipe], float]:
    """The larger error of two calls, causal and not, against torch's dense attention in fp64."""
    inputs = structured_qkv(L=LENGTH, device=device)
    q, k, v = (x.cpu().double() for x in inputs)
    dense = {
        causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        for causal in (True, False)
    }

    def error_of(name: str, recipe: Recipe) -> float:
        options: dict[str, Any] = {"enable_gqa": True, "recipe": recipe, "backend": name}
        return max(
            relative_l1(attention(*inputs, is_causal=causal, **options), truth)
            for causal, truth in dense.items()
        )

    return error_of
