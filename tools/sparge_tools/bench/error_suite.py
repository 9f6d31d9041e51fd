"""`KeepError` on the adversarial inputs: what it promised, what it told, and what came out.

over     heads whose true total error is above OVER x the budget
misjudged  heads whose true error is above SEEN, and more than TOLD x off the one told
rising   heads that keep more at a larger budget
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.api.attention import attention
from sparge.engine.recording import record
from sparge.values.recipe import KeepError, Recipe

from .adversarial import Adversary

BUDGETS = (0.01, 0.02, 0.05, 0.1)
OVER, TOLD, SEEN = 1.25, 1.5, 0.005
"""What must hold: 99 % of heads are not over, 95 % of those with a visible error are told well."""
MOST_OVER, MOST_MISJUDGED = 0.01, 0.05


@dataclass(frozen=True)
class Outcome:
    """One head of one case at one budget."""

    family: str
    budget: float
    density: float
    told: float
    bound: float
    true: float
    raised: bool
    rising: bool

    @property
    def is_over(self) -> bool:
        return not self.true <= OVER * self.budget

    @property
    def is_visible(self) -> bool:
        return self.true > SEEN

    @property
    def is_misjudged(self) -> bool:
        return self.is_visible and not self.true / TOLD <= self.told <= self.true * TOLD


def run_case(
    case: Adversary, budgets: Sequence[float], recipe: Recipe, *, backend: str
) -> list[Outcome]:
    """Every head of a case at every budget, against dense attention in fp32."""
    query, key, value = case.qkv()
    truth = F.scaled_dot_product_attention(query, key, value, is_causal=case.is_causal).double()
    outcomes: list[Outcome] = []
    before: Sequence[int] | None = None
    for budget in sorted(budgets):
        its = replace(recipe, keep=KeepError(budget))
        with record() as runs:
            out = attention(
                query, key, value, is_causal=case.is_causal, recipe=its, backend=backend
            )
        run = runs[0]
        assert run.error_by_head is not None
        assert run.bound_by_head is not None
        true = _relative_l1(out, truth)
        given = run.precision_by_head or (recipe.precision,) * len(true)
        for h, error in enumerate(true):
            rising = before is not None and run.kept_by_head[h] > before[h]
            found = (run.density_by_head[h], run.error_by_head[h], run.bound_by_head[h], error)
            raised = given[h] != recipe.precision
            outcomes.append(Outcome(case.family, budget, *found, raised, rising))
        before = run.kept_by_head
    return outcomes


def run_suite(
    cases: Iterable[Adversary],
    budgets: Sequence[float],
    recipe: Recipe,
    *,
    backend: str,
    step: Callable[[str], Any] = lambda what: None,
) -> list[Outcome]:
    outcomes = []
    for case in cases:
        outcomes += run_case(case, budgets, recipe, backend=backend)
        step(f"{case.family} {case.seed}")
    return outcomes


def summarize(outcomes: Sequence[Outcome], by: str) -> list[dict[str, Any]]:
    """One row for each value of a field, and one for all."""
    values = list(dict.fromkeys(getattr(one, by) for one in outcomes))
    groups: list[tuple[Any, list[Outcome]]] = [
        (value, [one for one in outcomes if getattr(one, by) == value]) for value in values
    ]
    return [_row(value, some) for value, some in [*groups, ("all", list(outcomes))]]


def _row(name: Any, some: Sequence[Outcome]) -> dict[str, Any]:
    visible = [one for one in some if one.is_visible]
    return {
        "of": name if isinstance(name, str) else f"{name:g}",
        "heads": len(some),
        "density": _mean([one.density for one in some]),
        "error": _mean([one.true for one in some]),
        "worst": max(one.true / one.budget for one in some),
        "over": sum(one.is_over for one in some) / len(some),
        "visible": len(visible),
        "misjudged": sum(one.is_misjudged for one in visible) / max(len(visible), 1),
        "raised": sum(one.raised for one in some) / len(some),
        "rising": sum(one.rising for one in some),
    }


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the last row, of all heads, misses."""
    every, missed = rows[-1], []
    if every["over"] > MOST_OVER:
        missed.append(f"{every['over']:.1%} of heads exceed {OVER} x their budget")
    if every["misjudged"] > MOST_MISJUDGED:
        missed.append(f"{every['misjudged']:.1%} of heads are told an error {TOLD} x off")
    if every["rising"]:
        missed.append(f"{every['rising']} heads keep more at a larger budget")
    return missed


def _relative_l1(out: Tensor, truth: Tensor) -> list[float]:
    """Of each head of the one sequence."""
    wrong = (out.double() - truth).abs().sum((0, 2, 3)) / truth.abs().sum((0, 2, 3))
    return torch.where(torch.isfinite(wrong), wrong, torch.inf).tolist()


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
