"""Plans kept over the steps of a run, while rows computed exactly say that they still fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..api.accuracy import output_error
from ..api.attention import attend, explain, make_plan
from ..routing import DENSE
from ..values.blockplan import BlockPlan
from ..values.recipe import Recipe
from ..values.run import Run, record
from ..values.schedule import Schedule


@dataclass(frozen=True)
class _Kept:
    plan: BlockPlan
    step: int
    recipe: Recipe
    shape: tuple[int, ...]


@dataclass
class PlanKeeper:
    """The plans of one layer, by the order of its calls in a step: guidance makes two or more."""

    plans: dict[int, _Kept] = field(default_factory=dict)
    step: int = -1
    calls: int = 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
        *,
        recipe: Recipe,
        backend: str,
        schedule: Schedule,
        step: int,
    ) -> tuple[Tensor, Run, bool] | None:
        """The output, its record, and whether a kept plan was used; None where dense is faster."""
        if explain(query, key, value, **arguments, recipe=recipe, backend=backend).backend == DENSE:
            return None
        if step != self.step:
            self.step, self.calls = step, 0
        at, self.calls = self.calls, self.calls + 1
        kept = self.plans.get(at)
        shape = (*query.shape, key.shape[2])
        rest = {name: x for name, x in arguments.items() if name != "is_causal"}
        chosen: dict[str, Any] = {"recipe": recipe, "backend": backend}
        if (
            kept is not None
            and 0 < step - kept.step <= schedule.reuse_steps
            and (kept.recipe, kept.shape) == (recipe, shape)
        ):
            with record() as runs:
                out, _ = attend(query, key, value, kept.plan, **rest, **chosen)
            error = output_error(query, key, value, out, **arguments).mean().item()
            if error <= schedule.reuse_error:
                return out, runs[-1], True
        plan = make_plan(query, key, value=value, **arguments, **chosen)
        self.plans[at] = _Kept(plan, step, recipe, shape)
        with record() as runs:
            out, _ = attend(query, key, value, plan, **rest, **chosen)
        return out, runs[-1], False
