"""A drawn call with the results of the reference, and how far rounding may move them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge import BlockPlan, Recipe
from sparge.engine.check import check_call
from sparge.engine.execute import tokens_of
from sparge.routing import get_backend
from sparge.values.call import Inputs
from sparge.values.recipe import heads_of
from sparge.values.stages import Prepared, QTensor, prepare, working
from sparge.values.tokenmask import OPEN, as_4d

from .draws import Drawn, tensors

EPS = 2.0**-24
PRECISE = 0.02


class WrongError(AssertionError):
    """The native core returned a wrong result."""


def need(ok: bool | Tensor, what: str, where: Tensor | None = None) -> None:
    if not bool(ok):
        places = "" if where is None else f" at {where.nonzero()[:3].tolist()}"
        raise WrongError(what + places)


@dataclass
class Case:
    """A drawn call with its tensors and the results of the reference."""

    drawn: Drawn

    def __post_init__(self) -> None:
        d = self.drawn
        self.q, self.k, self.v, self.masks = tensors(d)
        self.options = {
            "is_causal": d.is_causal, "causal_align": d.causal_align, "scale": d.scale,
            "enable_gqa": d.group > 1, "recipe": d.recipe, **self.masks,
        }  # fmt: skip
        self.call = check_call(self.q, self.k, self.v, **self.options)
        self.mask = as_4d(self.masks["attn_mask"])
        self.inputs = Inputs(self.q, self.k, self.v, self.mask)
        self.tokens = tokens_of(self.call, self.inputs)
        self.scale, self.recipe = self.call.scale, d.recipe
        options = {k: v for k, v in self.options.items() if k != "recipe"}
        self.plan = sparge.make_plan(
            self.q, self.k, value=self.v, recipe=self.recipe, backend="reference", **options
        )
        stages = get_backend("reference").stages()
        made = prepare(stages, self.call, self.inputs, to_plan=True, to_attend=True)
        self.prepared = contiguous(made)
        self.queries, self.keys = self.prepared.queries, self.prepared.keys
        self.out, self.lse, self.skips = self.attend("reference", self.plan)
        self.reach, self.drift = self._drift()

    def attend(
        self, backend: str, plan: BlockPlan, recipe: Recipe | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = replace(self.call, recipe=recipe or self.recipe)
        stages, tokens = get_backend(backend).stages(), replace(self.tokens)
        done = stages.attend(call, self.prepared, plan, tokens)
        return done.out, done.lse, done.pv_skips

    @cached_property
    def settled(self) -> Tensor:
        """Rows whose scores are far from overflow in any order of summation."""
        q = self.q.double().nan_to_num(0.0, 0.0, 0.0).abs().sum(-1)
        raw = q * self.heads(largest_of(self.k))[..., 0] * max(1.0, abs(self.scale))
        # The reference multiplies sums of codes by one scale and then the other.
        fits = not self.recipe.quantized or largest_of(self.q).max() < 1e33
        return (raw < 1e36) & (self.reach < 1e36) & fits

    @cached_property
    def skip_bounds(self) -> tuple[Tensor, Tensor]:
        """The fewest and the most row groups that the second filter may skip."""
        least, most = (
            self.attend("reference", self.plan, shifted(self, sign))[2] for sign in (1.0, -1.0)
        )
        return least, most

    def pools(self, plan: BlockPlan) -> Tensor:
        """Which blocks are pooled, bool `[B, Hq, n_q, n_k]`."""
        kept = plan.to_mask()
        if not self.recipe.pools:
            return torch.zeros_like(kept)
        return (self.tokens.block_kinds(kept.device) == OPEN).expand(kept.shape) & ~kept

    def heads(self, x: Tensor) -> Tensor:
        """Values of key heads repeated for query heads."""
        return x.repeat_interleave(self.drawn.group, 1)

    def _drift(self) -> tuple[Tensor, Tensor]:
        """`(largest sum of |q · k| terms, error of scores)` of each row, fp64 `[B, Hq, Lq]`."""
        parts = []
        for x in (self.queries.rows, self.keys.key):
            x = x.dequantize() if isinstance(x, QTensor) else working(x, self.recipe.precision)
            parts.append(x.nan_to_num(0.0, 0.0, 0.0).double().abs())
        reach = (parts[0] @ self.heads(parts[1]).mT).amax(-1) * abs(self.scale)
        bias = 0.0
        if self.mask is not None and self.mask.dtype != torch.bool:
            finite = self.mask.double().nan_to_num(0.0, 0.0, 0.0).abs()
            bias = finite.amax(-1).expand(reach.shape)
        reach = reach + bias
        return reach, (8 + self.drawn.D**0.5) * EPS * reach


def contiguous(prepared: Prepared) -> Prepared:
    """The same numbers as a backend would have written them."""

    def dense(half: Any, *names: str) -> Any:
        held = {name: getattr(half, name) for name in names}
        return replace(half, **{k: x if x is None else x.contiguous() for k, x in held.items()})

    return Prepared(
        dense(prepared.queries, "lse_shift", "pooled", "similarity"),
        dense(prepared.keys, "pooled", "similarity"),
    )


def largest_of(x: Tensor) -> Tensor:
    """The largest finite |x| of each head, fp64 `[B, H, 1, 1]`."""
    return x.double().nan_to_num(0.0, 0.0, 0.0).abs().amax((-1, -2), keepdim=True)


def shifted(case: Case, sign: float) -> Recipe:
    """The recipe with its threshold moved as far as rounding may move scores."""
    drift = case.drift[case.drift < PRECISE]
    by = sign * (1e-5 + 2 * (float(drift.max()) if drift.numel() else 0.0))
    each = heads_of(case.recipe.pv_skip, case.drawn.Hq, none=math.inf)
    moved = tuple(None if x == math.inf else max(x + by, 1e-9) for x in each)
    return replace(case.recipe, pv_skip=moved)
