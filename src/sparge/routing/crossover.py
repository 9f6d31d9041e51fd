"""What dense attention and a backend cost on a machine, and which is faster for a call.

    dense:  call + element · pairs that torch computes
    ours:   call + token · rows of Q, K and V + element · (pairs sampled by the plan + pairs kept
            + pairs of queries and pooled entries)

Seconds, for each dtype, head dim 64 and 128, and way of computing: measured by calibration.py, kept
by cost_file.py, and estimated by each backend until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone

import torch

from ..rules.error_budget import MEASURED_ROWS, surveyed_rows
from ..values.backend import (
    DENSE_LSE,
    DENSE_WAY,
    DTYPES,
    ESTIMATED,
    HEAD_DIMS,
    MEASURED,
    Estimate,
    UnitCosts,
    name_of,
)
from ..values.blockplan import BlockPlan
from ..values.call import BLOCK_K, BLOCK_Q, ROW_GROUP, Call
from ..values.recipe import KeepAll, KeepError, KeepFraction, Recipe, heads_of
from ..values.stages import KeptLimit, raised_key_heads

MOST_NOISE, MOST_BUSY = 1.5, 0.15
"""Beyond either, a measurement is made again later. A program on one of two cores takes 0.37 of
them and leaves the noise as it was; a quiet machine has 0.03 (LAB.md)."""
CLEARLY = 0.97
"""Ours is taken where its predicted time is below this share of dense attention's."""
FEW_BLOCKS = 8
"""A row of so few blocks keeps nearly all of them under `KeepMass`: each holds some of the mass."""

MASKED = 1.5
"""A mask of the caller's makes our pairs this much dearer than dense attention's, where it has a
number for each pair (measured at 1.5, fp32 and bf16, AVX2). One that hides whole keys costs less,
but the mask's shape is unknown here; assume the expensive case."""


@dataclass(frozen=True)
class Crossover:
    """costs: by `name_of(dtype, D, way)`. key: what they hold for.

    date, took: when it was measured and how many seconds that took. noise: the median time of a
    turn over the fastest; 1 on a quiet machine. busy: the share of the cores that other programs
    took meanwhile. estimated_by: where numbers that were not measured come from.
    """

    costs: Mapping[str, UnitCosts]
    key: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    took: float = 0.0
    noise: float = 1.0
    busy: float = 0.0
    measured: bool = False
    estimated_by: str = "built-in estimate, nothing was measured"

    @property
    def disturbance(self) -> float:
        """How much other programs disturbed the measurement, as a share of what is tolerated."""
        return max(self.noise / MOST_NOISE, self.busy / MOST_BUSY)

    @property
    def steady(self) -> bool:
        """Whether the machine was quiet enough for the numbers to be kept for good."""
        return self.disturbance <= 1.0

    def is_outdated(self, retry_after: timedelta | None) -> bool:
        """Whether it was measured on a busy machine, longer ago than this; a date that cannot be
        read is."""
        if self.steady or retry_after is None:
            return False
        try:
            return datetime.now(timezone.utc) - datetime.fromisoformat(self.date) > retry_after
        except (ValueError, TypeError):
            return True

    @property
    def source(self) -> str:
        return MEASURED if self.measured else ESTIMATED

    @property
    def words(self) -> str:
        """Where the numbers come from, for messages."""
        if not self.measured:
            return self.estimated_by
        return "measured on this machine" + ("" if self.steady else " while it was busy")

    def predict_dense(self, call: Call) -> float:
        cost = self._cost(DENSE_LSE if call.return_lse else DENSE_WAY, call)
        # backends/dense.py: torch skips the upper half of a plain diagonal only.
        skips = call.is_causal and not (call.return_lse or call.has_mask or call.offset)
        pairs = allowed_pairs(call) if skips else call.Lq * call.Lk
        return cost.call + cost.element * call.B * call.Hq * pairs

    def predict_prepare(self, call: Call) -> float:
        """All that comes before our attention: statistics, codes, prediction and selection."""
        cost = self._cost(call.recipe.precision, call)
        passes = 4 if call.recipe.pools else 2  # pooling is one more over K and V
        tokens = call.B * (call.Hq * call.Lq + passes * call.Hk * call.Lk)
        pairs = call.B * call.Hq * block_pairs(call) * _sampled_share(call)
        return cost.call + cost.token * tokens + cost.element * pairs

    def predict_attend(
        self, call: Call, kept_share: float, allowed_share: float | None = None
    ) -> float:
        """Our attention alone; shares of all blocks, those never allowed included. Without
        `allowed_share` nothing is skipped."""
        skips = allowed_share is not None and kept_share < allowed_share
        computed = kept_share + (pooled_share(call.recipe) * (allowed_share or 0.0) if skips else 0)
        pairs = call.B * call.Hq * call.Lq * call.Lk * computed
        dearer = MASKED if call.has_mask else 1.0
        return self._cost(call.recipe.precision, call).element * pairs * dearer

    def predict_sparse(self, call: Call, density: float) -> float:
        allowed = block_pairs(call) / (call.Lq * call.Lk)
        return self.predict_prepare(call) + self.predict_attend(call, density * allowed, allowed)

    def predict_in_pack(self, call: Call) -> float:
        """Our attention of one packed sequence that keeps every block, less `cost_of_call`, which a
        pack pays once. Rows are computed 16 at a time and keys 64 at a time, however few."""
        rows = replace(
            call,
            Lq=-(call.Lq // -ROW_GROUP) * ROW_GROUP,
            Lk=-(call.Lk // -BLOCK_K) * BLOCK_K,
        )
        return self.predict_sparse(rows, 1.0) - self.cost_of_call(rows)

    def cost_of_call(self, call: Call) -> float:
        """What a call of ours costs besides its rows and pairs."""
        return self._cost(call.recipe.precision, call).call

    def knows(self, call: Call) -> bool:
        """Whether it has the costs of a call: of a card, not all of them may be measured."""
        return all(name in self.costs for name in costs_of(call))

    def estimate(self, call: Call, density: float, *, why: str = "") -> Estimate:
        """Before there is a plan. why: where the density comes from, if it is not expected."""
        ours, dense = self.predict_sparse(call, density), self.predict_dense(call)
        reason = (
            f"predicted {ours * 1e3:.2f} ms at density {density:.2f}{why and f' ({why})'}, dense "
            f"attention {dense * 1e3:.2f} ms"
        )
        return self._answer(ours < CLEARLY * dense, reason)

    def estimate_plan(self, call: Call, plan: BlockPlan) -> Estimate:
        """Once there is a plan: attention alone, since what came before is paid for."""
        blocks = plan.indices.numel()
        dearer = 0.0
        if call.recipe.quantized and any(raised := raised_key_heads(plan, call.Hk)):
            heads = torch.tensor(raised).repeat_interleave(call.Hq // call.Hk)
            slow = int(plan.counts[:, heads].sum()) / blocks
            own = replace(call, recipe=replace(call.recipe, precision=call.own_precision))
            dearer = self.predict_attend(own, slow) - self.predict_attend(call, slow)
        return self.estimate_kept(
            call, int(plan.counts.sum()), int(plan.allowed.sum()), blocks, dearer
        )

    def estimate_kept(
        self, call: Call, kept: int, allowed: int, blocks: int, dearer: float = 0.0
    ) -> Estimate:
        """`estimate_plan` of a plan that keeps `kept` of `blocks` blocks. dearer: seconds that some
        heads cost more than the recipe says."""
        share, whole_share = kept / blocks, allowed / blocks
        dense = self.predict_dense(call)
        ours = self.predict_attend(call, share, whole_share) + dearer
        whole = self.predict_attend(call, whole_share)
        # Without a block that may be attended there is nothing to be faster at.
        limit = CLEARLY * dense / whole - pooled_share(call.recipe) if whole else 0.0
        density = kept / allowed if allowed else 1.0
        reason = (
            f"the plan keeps {density:.0%} of the blocks; dense attention is faster from "
            f"{max(limit, 0.0):.0%}"
        )
        return self._answer(ours < CLEARLY * dense, reason)

    def kept_limit(self, call: Call) -> KeptLimit:
        """How many blocks a plan may keep for `estimate_plan` to find it faster; a hair more, so
        that whatever is beyond the limit is beyond it there, too, however either is rounded."""
        blocks = call.B * call.Hq * call.n_q * call.n_k
        most = CLEARLY * self.predict_dense(call) / self.predict_attend(call, 1.0) * blocks
        raised = 1.0
        if call.measures_error and call.recipe.quantized:
            own = replace(call, recipe=replace(call.recipe, precision=call.own_precision))
            raised = self.predict_attend(own, 1.0) / self.predict_attend(call, 1.0)
        # 0 would be no limit.
        return KeptLimit(max(most * (1 + 1e-9), 1e-9), pooled_share(call.recipe), raised)

    def _answer(self, faster: bool, reason: str) -> Estimate:
        return Estimate(faster, f"{reason} ({self.words})", self.source)

    def _cost(self, way: str, call: Call) -> UnitCosts:
        """Linear in the head dim, and never less than half of what 64 cost: softmax remains."""
        dims = _dims_of(call)
        if len(dims) == 1:
            return self.costs[name_of(DTYPES[call.dtype], dims[0], way)]
        low, high = (self.costs[name_of(DTYPES[call.dtype], D, way)] for D in HEAD_DIMS)
        along = ((call.D + call.Dv) / 2 - HEAD_DIMS[0]) / (HEAD_DIMS[1] - HEAD_DIMS[0])
        both = zip(vars(low).values(), vars(high).values(), strict=True)
        return UnitCosts(*(max(a + (b - a) * along, a / 2) for a, b in both))


def _dims_of(call: Call) -> tuple[int, ...]:
    """Head dims whose costs tell those of a call: its own, if that is one of them."""
    mean = (call.D + call.Dv) / 2
    return tuple(D for D in HEAD_DIMS if mean == D) or HEAD_DIMS


def costs_of(call: Call) -> tuple[str, ...]:
    """Names of the costs that a prediction for a call reads."""
    ways = (DENSE_LSE if call.return_lse else DENSE_WAY, call.recipe.precision)
    dtype = DTYPES.get(call.dtype, "")
    return tuple(name_of(dtype, D, way) for D in _dims_of(call) for way in ways)


def allowed_pairs(call: Call) -> int:
    """Query-key pairs on or below the diagonal of one head, or all."""
    if not call.is_causal:
        return call.Lq * call.Lk

    def of_first(rows: int) -> int:
        """1 + 2 + … + rows, none more than Lk."""
        growing = min(max(rows, 0), call.Lk)
        return growing * (growing + 1) // 2 + (max(rows, 0) - growing) * call.Lk

    return of_first(call.Lq + call.offset) - of_first(call.offset)


def block_pairs(call: Call) -> int:
    """Pairs in the blocks that one head may attend: ours computes those of the diagonal whole."""
    if not call.is_causal:
        return call.Lq * call.Lk
    return min(allowed_pairs(call) + call.Lq * (BLOCK_Q // 2), call.Lq * call.Lk)


def pooled_share(recipe: Recipe) -> float:
    """Pooled entries / allowed keys, as far as they are computed: 64 entries at a time, most of
    which have some of a skipped block, so about all of them."""
    return 1.0 / recipe.pool_group if recipe.pools else 0.0


def expected_density(call: Call, long_row: float) -> float:
    """Kept blocks / allowed blocks, before there is a plan. long_row: what `KeepMass` and
    `KeepError` are expected to keep of a long row."""
    keep = call.recipe.keep
    if isinstance(keep, KeepAll):
        return 1.0
    if isinstance(keep, KeepFraction):
        return _mean(heads_of(keep.fraction, call.Hq, none=1.0))
    row_blocks = block_pairs(call) / (call.Lq * BLOCK_K)
    few = min(1.0, FEW_BLOCKS / max(row_blocks, 1.0))
    if isinstance(keep, KeepError):
        masses = [1.0 - error for error in heads_of(keep.max_error, call.Hq, none=0.0)]
    else:
        masses = heads_of(keep.mass, call.Hq, none=1.0)
    of_long_rows = few + (1 - few) * long_row
    # No more of the blocks than of the mass are needed, as the heaviest come first.
    return _mean(min(mass, of_long_rows) if mass < 1 else 1.0 for mass in masses)


def _sampled_share(call: Call) -> float:
    """Rows that are scored exactly, of all rows: those that predict, and those that `KeepError`
    surveys and measures. Surveyed rows are about as dear as kept ones, measured ones four times."""
    recipe = call.recipe
    if isinstance(recipe.keep, KeepAll) or recipe.predictor == "mean":
        return 0.0
    rows = min(recipe.sample_rows, BLOCK_Q) / BLOCK_Q
    if isinstance(recipe.keep, KeepError):
        rows += (surveyed_rows(call.n_q) + 4 * MEASURED_ROWS) / call.Lq
    return rows


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)
