"""The step that each head takes under an error budget: the rules of budget.py, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..support.device_constants import constant
from ..values.recipe import KeepError, heads_of
from .error_budget import (
    LEAN,
    LEAST_ERROR,
    LEAST_RATE,
    MOST_RATE,
    NEXT_MEASURED,
    PRIOR,
    RAISE_FROM,
    RESOLVED,
    SMALL_BUDGET,
    SPARSE_RATE,
    SPARSE_STEPS,
    SPARSER,
    TAIL,
    Decision,
    Measured,
    Survey,
    Z,
)


def decide(
    survey: Survey, measured: Measured, keep: KeepError, Hk: int, *, may_raise: bool
) -> Decision:
    """The step of every head. A head with nothing to measure, or nothing finite, keeps all.

    may_raise: the precision is one of 8 bits.
    """
    B, Hq = measured.whole.shape[:2]
    numbers = tuple(heads_of(keep.max_error, Hq))
    budget = constant(numbers, torch.float64, measured.whole.device).expand(B, Hq)
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
    facts = zip(survey.mean, survey.deviation, survey.heaviest, strict=True)
    curves = [_Curves.of(*each, rate, rate_noise, added, quantized, noise) for each in facts]
    # Where precision is raised: below this budget, for all heads of a key head.
    threshold = ((quantized + noise)[..., 0] / RAISE_FROM).nan_to_num(0.0) * may_raise
    lowest = threshold.amax(0).unflatten(0, (Hk, -1))
    raised = (budget[0].unflatten(0, (Hk, -1)) < lowest).any(-1)
    group = Hq // Hk
    above = lowest.amax(-1).repeat_interleave(group).expand(B, Hq)
    of_head = raised.repeat_interleave(group).expand(B, Hq)
    step = _sparsest(curves, budget, of_head, above)
    error, bound = _at(curves, budget, of_head, step)
    return Decision(step, error, bound, raised)


def _sparsest(curves: list[_Curves], budget: Tensor, raised: Tensor, above: Tensor) -> Tensor:
    """The densest step that this budget or any larger one takes.

    Between the two budgets at which something else than the comparison changes, the step falls as
    the budget grows; so it is enough to look at these two.
    """
    step = _step(curves, budget, raised)
    edge = torch.full_like(budget, SMALL_BUDGET)
    at_edge = _step(curves, edge, raised & (edge < above))
    step = torch.where(budget < edge, torch.maximum(step, at_edge), step)
    at_above = _step(curves, torch.maximum(above, budget), torch.zeros_like(raised))
    return torch.where(raised, torch.maximum(step, at_above), step)


def _step(curves: list[_Curves], budget: Tensor, raised: Tensor) -> Tensor:
    found = [own.sparsest(budget, raised) for own in curves]
    return torch.where(budget < SMALL_BUDGET, found[1], found[0])


def _at(
    curves: list[_Curves], budget: Tensor, raised: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    found = [own.at(step, raised) for own in curves]
    small = budget < SMALL_BUDGET
    error, bound = (torch.where(small, b, a) for a, b in zip(*found, strict=True))
    return error, bound


@dataclass(frozen=True)
class _Curves:
    """Error of every step, everything last, `[B, Hq, S + 1]`: by skipping alone, its upper bound,
    how far off the estimate may be, and what quantization adds to both."""

    error: Tensor
    bound: Tensor
    doubt: Tensor
    added: Tensor
    noise: Tensor

    @classmethod
    def of(
        cls,
        mean: Tensor,
        deviation: Tensor,
        heaviest: Tensor,
        rate: Tensor,
        rate_noise: Tensor,
        added: Tensor,
        quantized: Tensor,
        noise: Tensor,
    ) -> _Curves:
        next_measured = constant(NEXT_MEASURED, torch.int64, mean.device)
        sparser = constant(SPARSER, torch.int64, mean.device)
        rate, rate_noise, added = (x[..., next_measured] for x in (rate, rate_noise, added))
        bound = rate * (mean + Z * deviation + TAIL * heaviest[..., sparser])
        plain = rate * mean
        error = plain + LEAN * (bound - plain)
        doubt = ((bound - plain).square() + (Z * mean * rate_noise).square()).sqrt()
        none = torch.zeros_like(error[..., :1])
        return cls(
            torch.cat([error, none], -1),
            torch.cat([bound, none], -1),
            torch.cat([doubt, none], -1),
            torch.cat([added, quantized], -1),
            noise,
        )

    def sparsest(self, budget: Tensor, raised: Tensor) -> Tensor:
        """The sparsest step such that it and all denser ones are within the budget; from there on
        the sparsest whose error is known well enough."""
        kept = ~raised[..., None]
        added = torch.where(kept, self.added, 0.0)
        bound = self.bound + added + torch.where(kept, self.noise, 0.0)
        n = bound.shape[-1] - 1
        fits = (bound <= budget[..., None])[..., :n]
        first = n - fits.flip(-1).cumprod(-1).sum(-1)
        known = self.doubt <= RESOLVED * (self.error + added).clamp(min=LEAST_ERROR)
        steps = torch.arange(n + 1, device=budget.device)
        good = (steps >= first[..., None]) & known
        good[..., n] = True
        return torch.where(good, steps, n).amin(-1)

    def at(self, step: Tensor, raised: Tensor) -> tuple[Tensor, Tensor]:
        """`(error, bound)` of a step of each head; 0 where nothing finite was measured."""
        kept = ~raised[..., None]
        added = torch.where(kept, self.added, 0.0)
        noise = torch.where(kept, self.noise, 0.0)
        pick = step[..., None]
        error, bound = self.error + added, self.bound + added + noise
        return (
            error.gather(-1, pick)[..., 0].nan_to_num(0.0, 0.0),
            bound.gather(-1, pick)[..., 0].nan_to_num(0.0, 0.0),
        )


def _weighted(measured: Measured, x: Tensor) -> Tensor:
    """Mean over the measured rows, `[B, Hq, m, …]` to `[B, Hq, …]`."""
    return (measured.weights[..., None] * x).sum(-2)


def _error_per_mass(skipping: Tensor, mass: Tensor) -> Tensor:
    """Of each measured step; where measured rows drop next to nothing, that of all sparse steps."""
    sparse = slice(0, SPARSE_STEPS)
    whole = skipping[..., sparse].sum(-1, True) / mass[..., sparse].sum(-1, True).clamp(min=1e-9)
    whole = whole.clamp(LEAST_RATE, SPARSE_RATE)
    return ((skipping + whole * PRIOR) / (mass + PRIOR)).clamp(max=MOST_RATE)
