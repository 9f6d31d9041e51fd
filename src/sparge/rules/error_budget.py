"""The error as the knob: the steps of `KeepError`, the rows it checks, and the step it takes.

    step s      keeps what KeepMass(1 - MISSING[s]) keeps; behind the last, everything. The steps do
                not depend on the budget.
    surveyed    a few rows of each query block, scored in the call's precision: the mass that each
                step drops from them
    measured    some of these, completed with V: the error of every third step, exact rows against
                rows as they are computed
    error(s)    error per dropped mass, on measured rows, x dropped mass on surveyed rows
                + what quantization adds, on measured rows; both at the measured step next to s
    taken       the sparsest step of which, and of all denser ones, an upper bound of the error is
                within the budget

Rows with large errors may be rare. So a part of the rows is taken from those that differ most from
their query block, blocks whose rows disagree have more of them, and rows are measured that drop
much. Weights undo the imbalance. Where quantization alone takes most of the budget, the heads of
that key head run in the caller's own precision.

Nothing but the comparison with the budget depends on the budget, so a larger one never keeps more.
Two things do depend on it, and `_sparsest` undoes them: small budgets survey more rows, and
precision is raised below a threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.device_constants import constant
from ..support.ordered_sums import fold_sum
from ..values.call import BLOCK_Q, n_blocks, sampled_rows
from ..values.recipe import KeepError, heads_of

MISSING = (
    *(0.5 * 2 ** (-i / 6) for i in range(40)),
    *(0.5 * 2 ** (-40 / 6 - i / 3) for i in range(17)),
)
"""1 - mass of each step: 0.5 … 0.00012, falling by a sixth of an octave, then by a third."""
N_STEPS = len(MISSING)
MEASURED_STEPS = tuple(range(1, N_STEPS, 3))
"""Steps that measured rows look at. The error per dropped mass and what quantization adds vary
slowly: a step takes those of the measured step next to it."""
NEXT_MEASURED = tuple(min(step // 3, len(MEASURED_STEPS) - 1) for step in range(N_STEPS))
SMALL_BUDGET = 0.03
"""Budgets below this survey twice the rows, up to the most of a query block."""
ROWS_BY_BLOCKS = ((8, 16, 32), (32, 4, 8), (None, 2, 4))
"""Up to so many query blocks, each has so many surveyed rows, and so many at most."""
MANY_BLOCKS = 64
"""Query blocks up to which each has surveyed rows; beyond, one of every `n_q // MANY_BLOCKS`."""
DISAGREES = 0.5
"""A query block disagrees if its rows' distances from their mean hold more than this share of their
squares. It has twice the rows."""
FAR_SHARE = 16
"""One row of 16 of a query block, those farthest from its mean, are a stratum of their own."""
MEASURED_ROWS = 64
"""Measured rows of a head."""
PHASE = 0.4837
"""Where in its share of the chances each measured row is drawn: not at a fraction that equal
weights could tie with."""
STRATA = 8
"""Measured rows are spread over strata of equal size, of rows that drop little to rows that drop
much: concentrated rows and flat ones differ in size and error."""
REFERENCE = 0.03
"""Measured rows are drawn by what they drop at the step whose rows drop this much on average."""
Z = 1.28
TAIL = 0.75
"""The bound: Z standard errors, and TAIL rows more like the worst one at twice the missing mass."""
LEAN = 0.52
"""reported = estimate + LEAN · (bound − estimate); small samples of rare errors are biased low
(LAB.md)."""
RESOLVED = 0.27
"""A step is not taken where its estimate may be off by more than this share of the error: by the
surveyed rows as in the bound, and by the error per mass."""
LEAST_ERROR = 0.0015
"""Errors below this need not be resolved."""
RAISE_FROM = 0.8
"""Quantization alone may take this share of the budget before the precision is raised."""
PRIOR = 0.01
"""Dropped mass by which the error per mass of one step leans on that of all sparse steps."""
LEAST_RATE, SPARSE_RATE, MOST_RATE = 0.05, 3.0, 4.0
"""Error per mass: of all sparse steps at least and at most, of one step at most."""
SPARSE_STEPS = sum(MISSING[step] >= 0.01 for step in MEASURED_STEPS)
"""Of the measured steps."""
SPARSER = tuple(max(sum(other >= 2 * missing for other in MISSING) - 1, 0) for missing in MISSING)
"""The last step with at least twice the missing mass of each step."""
NUMBERS = (
    Z, TAIL, LEAN, RESOLVED, LEAST_ERROR, RAISE_FROM, SMALL_BUDGET, PRIOR, LEAST_RATE, SPARSE_RATE,
    MOST_RATE, DISAGREES, REFERENCE, PHASE, SPARSE_STEPS, STRATA, MEASURED_ROWS, MANY_BLOCKS,
    FAR_SHARE,
)  # fmt: skip
"""In the order of `BudgetRules` in csrc/work.h."""
_MASK32 = 0xFFFFFFFF


@lru_cache(maxsize=1)
def step_masses() -> tuple[float, ...]:
    """The mass of every step, rising."""
    return tuple(1.0 - missing for missing in MISSING)


@dataclass(frozen=True)
class SurveyedRows:
    """rows int64 `[B, Hq, n]`, -1 in places that are not used; weights fp64 `[2, B, Hq, n]`, which
    add up to 1: of the rows that every budget has, and of all rows."""

    rows: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Survey:
    """What each step drops, for both kinds of weights, `[2, B, Hq, S]` fp64: the mean, its standard
    error, and the largest weight x mass of a row. dropped fp32 `[B, Hq, n, S]`: of each row."""

    dropped: Tensor
    mean: Tensor
    deviation: Tensor
    heaviest: Tensor


def summarize(surveyed: SurveyedRows, dropped: Tensor) -> Survey:
    """The survey of dropped masses `[B, Hq, n, S]`."""
    weights, mass = surveyed.weights[..., None], dropped.double()
    weighted = torch.where(weights > 0, weights * mass, 0.0)
    mean = fold_sum(weighted, dim=-2)
    off = torch.where(weights > 0, weights * (mass - mean.unsqueeze(-2)), 0.0)
    return Survey(dropped, mean, fold_sum(off.square(), dim=-2).sqrt(), weighted.amax(-2))


@dataclass(frozen=True)
class Measured:
    """Of measured rows `[B, Hq, m]`, sums over the channels, fp64: |kept - all| of each measured
    step, both as computed; |kept as computed - all exactly|, the last one for everything kept;
    |all exactly|; their weights, and what each measured step drops from them."""

    skipping: Tensor
    total: Tensor
    whole: Tensor
    weights: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class Decision:
    """Of every head `[B, Hq]`: the step, N_STEPS for everything; the error and its upper bound;
    `[Hk]`: whether the heads of a key head run in the caller's own precision."""

    step: Tensor
    error: Tensor
    bound: Tensor
    raised: Tensor

    @property
    def measured(self) -> Tensor:
        """As a plan holds it, `[3, B, Hq]`."""
        Hq = self.step.shape[1]
        raised = self.raised.repeat_interleave(Hq // len(self.raised)).double()
        return torch.stack([self.error, self.bound, raised.expand_as(self.error)])


def surveyed_rows(n_q: int) -> int:
    """At most, of one head."""
    return len(_checked_blocks(n_q)) * rows_of_blocks(n_q)[1]


def rows_of_blocks(n_q: int) -> tuple[int, int]:
    """Surveyed rows of a query block, and the most of one."""
    return next((rows, most) for up_to, rows, most in ROWS_BY_BLOCKS if not n_q > (up_to or n_q))


# -- rows --------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """What follows from the length alone, for each of n checked query blocks: its first row; places
    that may be checked `[n, 128]`; how many of them are far ones, and how many are not; far ranks
    and places `[n, 128]` in pseudo-random order, places that may not be checked last."""

    starts: Tensor
    may: Tensor
    n_far: Tensor
    n_near: Tensor
    far_ranks: Tensor
    near_places: Tensor


def _hash(x: int) -> int:
    """A mixed 32-bit integer: no lattice."""
    x = (x ^ 61 ^ (x >> 16)) * 0x9E3779B1 & _MASK32
    x = (x ^ (x >> 15)) * 0x85EBCA6B & _MASK32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK32
    return x ^ (x >> 16)


def _checked_blocks(n_q: int) -> list[int]:
    """All query blocks, or one of every few."""
    apart = max(1, n_q // MANY_BLOCKS)
    firsts = range(0, n_q - apart + 1, apart)
    return [min(first + _hash(first) % apart, n_q - 1) for first in firsts]


@lru_cache(maxsize=64)
def checked_places(Lq: int, sample_rows: int) -> _Places:
    n_q = n_blocks(Lq, BLOCK_Q)
    blocks = _checked_blocks(n_q)
    most_far = rows_of_blocks(n_q)[1] // 4
    may = torch.zeros(len(blocks), BLOCK_Q, dtype=torch.bool)
    n_far, n_near, far_ranks, near_places = [], [], [], []
    for i, i_q in enumerate(blocks):
        valid = min(BLOCK_Q, Lq - i_q * BLOCK_Q)
        sampled = set(sampled_rows(valid, sample_rows))
        open_places = [p for p in range(valid) if p not in sampled] or list(range(valid))
        may[i, open_places] = True
        shut = [p for p in range(BLOCK_Q) if p not in set(open_places)]
        first_row = i_q * BLOCK_Q + 1
        near_places.append(sorted(open_places, key=lambda p: _hash(first_row + p)) + shut)
        far = max(1, len(open_places) // FAR_SHARE)
        n_far.append(far)
        n_near.append(len(open_places) - far)
        first = _hash(i_q ^ 0x5BD1E995)
        far_ranks.append([(first + j * max(1, far // most_far)) % far for j in range(most_far)])
    return _Places(
        torch.tensor(blocks) * BLOCK_Q,
        may,
        torch.tensor(n_far),
        torch.tensor(n_near),
        torch.tensor(far_ranks),
        torch.tensor(near_places),
    )


@lru_cache(maxsize=64)
def _places_on(Lq: int, sample_rows: int, device: torch.device) -> _Places:
    """Copied to a device once, so that a later call waits for nothing."""
    with torch.inference_mode(False):
        return _Places(*(x.to(device) for x in checked_places(Lq, sample_rows)))


def choose_rows(
    deviation: Tensor, energy: Tensor, keep: KeepError, sample_rows: int
) -> SurveyedRows:
    """The rows to survey. `deviation [B, Hq, Lq]`: squared distance of each query from the mean of
    its block; `energy [B, Hq, n_q]`: sum of the squares of the block's queries; fp32."""
    B, Hq, Lq = deviation.shape
    n_q, device = energy.shape[2], deviation.device
    starts, may, n_far, n_near, far_ranks, near_places = _places_on(Lq, sample_rows, device)
    rows, most = rows_of_blocks(n_q)
    blocks = starts // BLOCK_Q
    padded = F.pad(deviation, (0, n_q * BLOCK_Q - Lq)).unflatten(2, (n_q, BLOCK_Q))
    far_off = padded[:, :, blocks].nan_to_num(torch.inf, torch.inf)  # not finite: farthest of all
    spread = far_off.masked_fill(~may, 0.0).double().sum(-1)
    disagrees = ~(spread <= DISAGREES * energy[:, :, blocks].double())
    sorted_far = far_off.masked_fill(~may, -1.0).sort(dim=-1, descending=True, stable=True).indices
    is_far = (torch.arange(BLOCK_Q, device=device) < n_far[:, None]).expand_as(sorted_far)
    far = torch.zeros_like(is_far).scatter(-1, sorted_far, is_far)
    most_far = max(1, most // 4)
    most_near = most - most_far
    of_far = sorted_far.gather(-1, far_ranks[:, :most_far].expand(B, Hq, -1, -1))
    # Far places go behind all others, which keep their order.
    near = near_places.expand_as(far_off)
    order = torch.arange(BLOCK_Q, device=device) + BLOCK_Q * far.gather(-1, near).long()
    of_near = near.gather(-1, order.argsort(-1)[..., :most_near])
    chosen = torch.cat([of_far, of_near], -1) + starts[:, None]
    base = torch.where(disagrees, min(2 * rows, most), rows)
    budget = constant(tuple(heads_of(keep.max_error, Hq)), torch.float32, device)[:, None]
    every = torch.where(budget < SMALL_BUDGET, (2 * base).clamp(max=most), base)
    of_kinds = [_weights(n, n_far, n_near, most_far, most_near) for n in (base, every)]
    weights = torch.stack(of_kinds).flatten(-2)
    used = (weights > 0).any(0)
    # Added one after another, as the native twin does: rows are drawn by these weights.
    whole = weights.cumsum(-1)[..., -1:]
    return SurveyedRows(torch.where(used, chosen.flatten(-2), -1), weights / whole)


def _weights(n: Tensor, n_far: Tensor, n_near: Tensor, most_far: int, most_near: int) -> Tensor:
    """Rows that each place stands for, `[B, Hq, blocks, places]`, 0 if it is not used."""
    parts = []
    of_far = (n // 4).clamp(min=1).minimum(n_far)
    of_near = (n - of_far).minimum(n_near)
    for used, most, held in ((of_far, most_far, n_far), (of_near, most_near, n_near)):
        slots = torch.arange(most, device=n.device)
        rows_each = held.double() / used.clamp(min=1)
        parts.append(torch.where(slots < used[..., None], rows_each[..., None], 0.0))
    return torch.cat(parts, -1)


def draw_measured(surveyed: SurveyedRows, survey: Survey) -> tuple[Tensor, Tensor, Tensor]:
    """`(rows, weights, dropped)` of the rows to measure, `[B, Hq, m]` and `[B, Hq, m, measured
    steps]`.

    Half of the chances go by a row's weight alone, half also by what it drops; less than half where
    no step drops as much as REFERENCE. Only rows that every budget surveys are drawn, so that all
    budgets measure the same.
    """
    weights, mean, dropped = surveyed.weights[0], survey.mean[0], survey.dropped
    at = (mean - REFERENCE).abs().nan_to_num(torch.inf).argmin(-1, keepdim=True)
    own = dropped.gather(-1, at[..., None, :].expand(*dropped.shape[:3], 1))[..., 0].double()
    mean = mean.gather(-1, at)
    share = 0.5 * (mean / REFERENCE).clamp(max=1.0)
    mixed = torch.where(mean > 0, 1.0 - share + share * own / mean, 1.0).nan_to_num(1.0)
    n = own.shape[-1]
    # Places by stratum, and by position within each; those that only small budgets survey last.
    drops = torch.where(weights > 0, own.nan_to_num(torch.inf), torch.inf)
    rank = drops.sort(dim=-1, stable=True).indices.argsort(-1)
    stratum = rank * STRATA // (weights > 0).sum(-1, True).clamp(min=1)
    order = (stratum * n + torch.arange(n, device=own.device)).argsort(-1)
    chance = (weights * mixed).gather(-1, order).cumsum(-1)
    shares = (torch.arange(MEASURED_ROWS, device=dropped.device).double() + PHASE) / MEASURED_ROWS
    at_chance = shares * chance[..., -1:]
    places = order.gather(-1, torch.searchsorted(chance, at_chance).clamp(max=n - 1))
    places = places.sort(-1).values
    share = 1.0 / mixed.gather(-1, places)
    dropped = dropped.index_select(-1, constant(MEASURED_STEPS, torch.int64, dropped.device))
    of_places = places[..., None].expand(*places.shape, dropped.shape[-1])
    rows, dropped = surveyed.rows.gather(-1, places), dropped.gather(-2, of_places)
    return rows, share / share.sum(-1, True), dropped


# -- the step --------------------------------------------------------------------------------------


def decide(
    survey: Survey, measured: Measured, keep: KeepError, Hk: int, *, may_raise: bool
) -> Decision:
    """The step of every head. A head with nothing to measure, or nothing finite, keeps all.

    may_raise: the precision is one of 8 bits.
    """
    B, Hq = measured.whole.shape[:2]
    budget = constant(tuple(heads_of(keep.max_error, Hq)), torch.float64, measured.whole.device)
    budget = budget.expand(B, Hq)
    mean = _weighted(measured, measured.whole[..., None])
    skipping = _weighted(measured, measured.skipping) / mean
    total = _weighted(measured, measured.total) / mean
    quantized = total[..., -1:]
    of_rows = measured.total[..., -1] / mean
    noise = (measured.weights * (of_rows - quantized)).square().sum(-1, True).sqrt()
    dropped = _weighted(measured, measured.dropped)
    rate = _error_per_mass(skipping, dropped)
    off = measured.skipping / mean[..., None] - rate.unsqueeze(-2) * measured.dropped
    rate_noise = (measured.weights[..., None] * off).square().sum(-2).sqrt() / (dropped + PRIOR)
    added = (total[..., :-1] - skipping).clamp(min=0.0)
    next_measured = constant(NEXT_MEASURED, torch.int64, mean.device)
    rate, rate_noise, added = (x[..., next_measured] for x in (rate, rate_noise, added))
    curves = _Curves.of(survey, rate, rate_noise, torch.cat([added, quantized], -1), noise)
    # Where precision is raised: below this budget, for all heads of a key head.
    threshold = ((quantized + noise)[..., 0] / RAISE_FROM).nan_to_num(0.0) * may_raise
    lowest = threshold.amax(0).unflatten(0, (Hk, -1))
    raised = (budget[0].unflatten(0, (Hk, -1)) < lowest).any(-1)
    group = Hq // Hk
    above = lowest.amax(-1).repeat_interleave(group).expand(B, Hq)
    of_head = raised.repeat_interleave(group).expand(B, Hq)
    step = _sparsest(curves, budget, of_head, above)
    found = (x.gather(-1, step[..., None])[..., 0] for x in curves.at(budget, of_head)[:2])
    error, bound = (x.nan_to_num(0.0, 0.0) for x in found)  # 0 where nothing finite was measured
    return Decision(step, error, bound, raised)


def _sparsest(curves: _Curves, budget: Tensor, raised: Tensor, above: Tensor) -> Tensor:
    """The densest step that this budget or any larger one takes.

    Between the two budgets at which something else than the comparison changes, the step falls as
    the budget grows; so it is enough to look at these two.
    """
    step = curves.sparsest(budget, raised)
    edge = torch.full_like(budget, SMALL_BUDGET)
    at_edge = curves.sparsest(edge, raised & (edge < above))
    step = torch.where(budget < edge, torch.maximum(step, at_edge), step)
    at_above = curves.sparsest(torch.maximum(above, budget), torch.zeros_like(raised))
    return torch.where(raised, torch.maximum(step, at_above), step)


@dataclass(frozen=True)
class _Curves:
    """Error of every step, everything last, for both kinds of weights, `[2, B, Hq, S + 1]`: by
    skipping alone, its upper bound, and how far off the estimate may be; what quantization adds to
    the first two, `[B, Hq, S + 1]`, and to the bound, `[B, Hq, 1]`."""

    error: Tensor
    bound: Tensor
    doubt: Tensor
    added: Tensor
    noise: Tensor

    @classmethod
    def of(
        cls, survey: Survey, rate: Tensor, rate_noise: Tensor, added: Tensor, noise: Tensor
    ) -> _Curves:
        """rate, rate_noise: the error per mass of each step, and how far off that may be."""
        mean, sparser = survey.mean, constant(SPARSER, torch.int64, survey.mean.device)
        heaviest = survey.heaviest[..., sparser]
        bound = rate * (mean + Z * survey.deviation + TAIL * heaviest)
        plain = rate * mean
        error = plain + LEAN * (bound - plain)
        doubt = ((bound - plain).square() + (Z * mean * rate_noise).square()).sqrt()
        error, bound, doubt = (F.pad(x, (0, 1)) for x in (error, bound, doubt))
        return cls(error, bound, doubt, added, noise)

    def at(self, budget: Tensor, raised: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Error, bound and doubt of every step, `[B, Hq, S + 1]`, by the rows that budgets of this
        size survey; nothing is added to heads that are raised."""
        small, kept = (budget < SMALL_BUDGET)[..., None], ~raised[..., None]
        curves = (self.error, self.bound, self.doubt)
        error, bound, doubt = (torch.where(small, every, base) for base, every in curves)
        added, noise = (torch.where(kept, x, 0.0) for x in (self.added, self.noise))
        return error + added, bound + added + noise, doubt

    def sparsest(self, budget: Tensor, raised: Tensor) -> Tensor:
        """The sparsest step such that it and all denser ones are within the budget; from there on
        the sparsest whose error is known well enough."""
        error, bound, doubt = self.at(budget, raised)
        n = bound.shape[-1] - 1
        fits = (bound <= budget[..., None])[..., :n]
        first = n - fits.flip(-1).cumprod(-1).sum(-1)
        steps = torch.arange(n + 1, device=budget.device)
        good = (steps >= first[..., None]) & (doubt <= RESOLVED * error.clamp(min=LEAST_ERROR))
        good[..., n] = True
        return torch.where(good, steps, n).amin(-1)


def _weighted(measured: Measured, x: Tensor) -> Tensor:
    """Mean over the measured rows, `[B, Hq, m, …]` to `[B, Hq, …]`."""
    return (measured.weights[..., None] * x).sum(-2)


def _error_per_mass(skipping: Tensor, mass: Tensor) -> Tensor:
    """Of each measured step; where measured rows drop next to nothing, that of all sparse steps."""
    sparse = slice(0, SPARSE_STEPS)
    whole = skipping[..., sparse].sum(-1, True) / mass[..., sparse].sum(-1, True).clamp(min=1e-9)
    whole = whole.clamp(LEAST_RATE, SPARSE_RATE)
    return ((skipping + whole * PRIOR) / (mass + PRIOR)).clamp(max=MOST_RATE)
