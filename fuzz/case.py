"""A drawn call with what the reference makes of it, and how far rounding may move that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from sparge.backends.reference.plan import BlockStatistics, block_statistics
from sparge.quantize import quantize
from torch import Tensor

import sparge
from sparge import BlockPlan, Recipe
from sparge.backends.reference.prepare import smooth_keys
from sparge.backends.reference.scores import working
from sparge.check import check_call
from sparge.dispatch.choose import get_backend
from sparge.execute import tokens_of
from sparge.geometry import BLOCK_K, BLOCK_Q
from sparge.qtensor import QTensor
from sparge.recipe import heads_of
from sparge.tokenmask import as_4d

from .draws import Drawn, tensors

EPS = 2.0**-24
PRECISE = 0.02


class WrongError(AssertionError):
    """What the native core gave cannot be."""


def need(ok: bool | Tensor, what: str, where: Tensor | None = None) -> None:
    if not bool(ok):
        places = "" if where is None else f" at {where.nonzero()[:3].tolist()}"
        raise WrongError(what + places)


@dataclass
class Case:
    """A drawn call with its tensors and what the reference makes of it."""

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
        self.tokens = tokens_of(self.call, self.mask)
        self.scale, self.recipe = self.call.scale, d.recipe
        options = {k: v for k, v in self.options.items() if k != "recipe"}
        self.plan = sparge.make_plan(
            self.q, self.k, value=self.v, recipe=self.recipe, backend="reference", **options
        )
        self.operands = quantize(
            self.q, self.k, self.v, scale=self.scale, precision=self.recipe.precision,
            backend=get_backend("reference"),
        )  # fmt: skip
        if self.operands.lse_shift is not None:
            shift = self.operands.lse_shift.contiguous()
            self.operands = replace(self.operands, lse_shift=shift)
        self.out, self.lse, self.skips = self.attend("reference", self.plan)
        self.reach, self.drift = self._drift()

    def attend(self, backend: str, plan: BlockPlan, recipe: Recipe | None = None):
        return get_backend(backend).stage("attend").attend(
            self.operands, plan, replace(self.tokens), scale=self.scale,
            recipe=recipe or self.recipe, dtype=self.q.dtype,
        )  # fmt: skip

    @cached_property
    def settled(self) -> Tensor:
        """Rows whose scores are far from overflow, in whatever order they are added up."""
        q = self.q.double().nan_to_num(0.0, 0.0, 0.0).abs().sum(-1)
        raw = q * self.heads(largest_of(self.k))[..., 0] * max(1.0, abs(self.scale))
        # The reference multiplies sums of codes with one scale before the other.
        fits = not self.recipe.quantized or largest_of(self.q).max() < 1e33
        return (raw < 1e36) & (self.reach < 1e36) & fits

    @cached_property
    def statistics(self) -> tuple[BlockStatistics, BlockStatistics]:
        smooth, _ = smooth_keys(self.k)
        return block_statistics(self.q, BLOCK_Q), block_statistics(smooth, BLOCK_K)

    @cached_property
    def skip_bounds(self) -> tuple[Tensor, Tensor]:
        """The fewest and the most row groups that the second filter may skip."""
        least, most = (
            self.attend("reference", self.plan, shifted(self, sign))[2] for sign in (1.0, -1.0)
        )
        return least, most

    def heads(self, x: Tensor) -> Tensor:
        """What key heads have, for query heads."""
        return x.repeat_interleave(self.drawn.group, 1)

    def _drift(self) -> tuple[Tensor, Tensor]:
        """`(largest sum of |q · k| terms, error of scores)` of each row, fp64 `[B, Hq, Lq]`."""
        parts = []
        for x in (self.operands.query, self.operands.key):
            x = x.dequantize() if isinstance(x, QTensor) else working(x, self.recipe.precision)
            parts.append(x.nan_to_num(0.0, 0.0, 0.0).double().abs())
        reach = (parts[0] @ self.heads(parts[1]).mT).amax(-1) * abs(self.scale)
        bias = 0.0
        if self.mask is not None and self.mask.dtype != torch.bool:
            finite = self.mask.double().nan_to_num(0.0, 0.0, 0.0).abs()
            bias = finite.amax(-1).expand(reach.shape)
        reach = reach + bias
        return reach, (8 + self.drawn.D**0.5) * EPS * reach


def largest_of(x: Tensor) -> Tensor:
    """The largest finite |x| of each head, fp64 `[B, H, 1, 1]`."""
    return x.double().nan_to_num(0.0, 0.0, 0.0).abs().amax((-1, -2), keepdim=True)


def shifted(case: Case, sign: float) -> Recipe:
    """The recipe with thresholds as far away as scores may drift."""
    drift = case.drift[case.drift < PRECISE]
    by = sign * (1e-5 + 2 * (float(drift.max()) if drift.numel() else 0.0))
    each = heads_of(case.recipe.pv_skip, case.drawn.Hq, none=math.inf)
    moved = tuple(None if x == math.inf else max(x + by, 1e-9) for x in each)
    return replace(case.recipe, pv_skip=moved)
