"""The search of one head: the sparsest setting whose error stays within a bound on every input.

Settings are tried from the sparsest on, so nothing is assumed of how the error changes with a
setting. A setting is dropped as soon as its error so far exceeds the bound for the whole input:
most of them after a block or two of the first input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparge.values.geometry import ROW_GROUP
from sparge.values.profile import HeadSettings

from .score import ScoredBlock, ScoredHead, split_blocks

MASSES = (
    *(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.54, 0.58, 0.62, 0.65, 0.68),
    *(0.7, 0.72, 0.74, 0.76, 0.78, 0.8, 0.815, 0.83, 0.845, 0.86, 0.87, 0.88, 0.89, 0.9),
    *(0.905, 0.91, 0.915, 0.92, 0.925, 0.93, 0.935, 0.94, 0.945, 0.95, 0.955, 0.96),
    *(0.965, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.997, 0.998, 0.999, 0.9995),
)
SIMILARITIES = (None, *(i / 16 for i in range(1, 16)))
"""Below 0 the test is off, so there is nothing to try there."""
PV_SKIPS = (0.25, 0.5, 0.75, *(i / 2 for i in range(2, 13)), 7.0, 8.0, 9.0, 10.0, 12.0, 15.0)
NO_GAIN = 0.95
"""A head that would keep more than this stays dense."""
LEVELS = (1.0, 0.97, 0.93, 0.87, 0.75)
"""Of the bound: beside the sparsest setting, safer ones are found for when its run exceeds it."""
AT_ONCE = 32


def kept_sets(
    head: ScoredHead, predictor: str, similarities: Sequence[float | None], masses: Tensor
) -> Tensor:
    """What every setting keeps, bool `[blocks, similarities, masses, n_k]`."""
    p = {"mean": head.mean, "rows": head.rows}.get(predictor)
    p = (head.mean + head.rows) * 0.5 if p is None else p
    may, device = head.may, p.device
    least = torch.tensor([-1.0 if s is None else s for s in similarities], device=device)
    odd_columns = ~(head.k_similarity >= least[:, None])
    odd_rows = ~(head.q_similarity[:, None] >= least)
    # The similarity test takes columns out of the softmax; the others keep their order.
    trusted = may[:, None] & ~odd_columns
    chosen = keep_masses(p[:, None].expand_as(trusted), trusted, masses.to(device))
    # Also where the prediction is not finite.
    unknown = ~(torch.where(trusted, p[:, None], 0.0).sum(-1, keepdim=True) > 0)
    always = head.forced[:, None] | odd_columns | odd_rows[..., None] | unknown
    return (chosen | always[:, :, None]) & may[:, None, None]


def keep_masses(mass: Tensor, may: Tensor, masses: Tensor) -> Tensor:
    """The fewest blocks, largest first, whose mass reaches each of `masses` `[S]`, as `select`
    keeps them for one: bool `[..., S, n_k]` for mass and may `[..., n_k]`."""
    values, order = torch.where(may, mass, -1.0).sort(dim=-1, descending=True, stable=True)
    reached = values.clamp(min=0.0).double().cumsum(-1)[..., None, :]
    needed = (reached < masses[:, None] * reached[..., -1:]).sum(-1) + 1
    # A mass of 1 takes every block, however small the mass of the last ones.
    needed = torch.where(masses >= 1.0, mass.shape[-1], needed)
    return (order.argsort(-1)[..., None, :] < needed[..., None]) & may[..., None, :]


def find_ladder(scored: Sequence[ScoredHead], predictor: str, l1: float) -> list[HeadSettings]:
    """The sparsest setting whose error is at most l1 on every head, then safer ones; maybe none."""
    similarities = SIMILARITIES if predictor == "mean" else (None,)
    masses = torch.tensor(MASSES, dtype=torch.float64)
    kept = [kept_sets(head, predictor, similarities, masses) for head in scored]
    allowed = sum(int(head.may.sum()) for head in scored)
    counts = torch.stack([k.sum((0, 3)) for k in kept]).sum(0)
    density = (counts.double() / allowed).flatten()
    # Masses that keep the same are one setting; the largest stands for them, as the safest.
    last = torch.ones_like(counts, dtype=torch.bool)
    last[:, :-1] = counts[:, :-1] != counts[:, 1:]
    order = density.argsort(stable=True)
    order = order[last.flatten()[order] & (density[order] <= NO_GAIN)]
    flat = [k.flatten(1, 2) for k in kept]
    ladder: list[HeadSettings] = []
    levels = [level * l1 for level in LEVELS]
    for some in order.split(AT_ONCE):
        fits, errors = within(scored, [k[:, some] for k in flat], levels[0])
        for i, error in zip(some[fits].tolist(), errors.tolist(), strict=True):
            if not levels or error > levels[0]:
                continue
            while levels and error <= levels[0]:
                levels.pop(0)
            mass, similarity = MASSES[i % len(MASSES)], similarities[i // len(MASSES)]
            ladder.append(HeadSettings(mass, similarity, error=error, density=float(density[i])))
        if not levels:
            break
    return ladder


def within(
    scored: Sequence[ScoredHead], kept: Sequence[Tensor], bound: float
) -> tuple[Tensor, Tensor]:
    """`(which, error)`: settings whose error is at most the bound on every head, and the largest.

    kept `[blocks, settings, n_k]` for each head.
    """
    alive = torch.arange(kept[0].shape[1], device=kept[0].device)
    worst = torch.zeros_like(alive, dtype=torch.float64)
    for head, sets in zip(scored, kept, strict=True):
        wrong = torch.zeros_like(worst)
        for block, own in zip(head.blocks, sets, strict=True):
            if not len(alive):
                return alive, worst
            chosen = own[alive, : len(block.sums)].to(block.sums.dtype)
            wrong += _wrong(chosen, block.outputs, block.sums, block.truth)
            fits = wrong <= bound * head.right
            alive, worst, wrong = alive[fits], worst[fits], wrong[fits]
        # A head that gives nothing at all has nothing to get wrong.
        worst = torch.maximum(worst, wrong / head.right if head.right else wrong)
    return alive, worst


def _wrong(kept: Tensor, outputs: Tensor, sums: Tensor, truth: Tensor) -> Tensor:
    """Σ|output - truth| for each set of kept blocks, `[…, sets]`; rows without mass are zeros.

    kept `[…, sets, n]`, outputs `[…, n, rows, Dv]`, sums `[…, n, rows]`, truth `[…, rows, Dv]`.
    """
    row_sum = kept @ sums
    out = (kept @ outputs.flatten(-2)).unflatten(-1, truth.shape[-2:])
    out /= row_sum.masked_fill_(row_sum == 0, 1.0).unsqueeze(-1)
    # fp32 adds a row of an output well enough; asked for fp64, torch would copy all of it first.
    return out.sub_(truth.unsqueeze(-3)).abs_().sum(-1).double().sum(-1)


def find_pv_ladder(
    scored: Sequence[ScoredHead], predictor: str, setting: HeadSettings, l2: float
) -> list[HeadSettings]:
    """The second filter on top of a setting: the most skipping within l2, then safer ones."""
    device = scored[0].may.device
    errors, skipped = torch.zeros((2, len(PV_SKIPS)), dtype=torch.float64, device=device).unbind()
    groups = 0
    masses = torch.tensor([setting.mass], dtype=torch.float64)
    for head in scored:
        kept = kept_sets(head, predictor, [setting.min_similarity], masses)[:, 0, 0]
        wrong = torch.zeros_like(errors)
        for block, own in zip(head.blocks, kept, strict=True):
            block = block.only(own)
            skip = pv_skips(block.maxima, PV_SKIPS)
            wrong += _wrong_with_pv(block, skip)
            skipped += skip.sum((1, 2))
            groups += skip[0].numel()
        errors = torch.maximum(errors, wrong / head.right if head.right else wrong)
    ladder: list[HeadSettings] = []
    for level in LEVELS[:3]:
        i = next((i for i, e in enumerate(errors.tolist()) if e <= level * l2), None)
        if i is None or not float(skipped[i]):
            break
        share = float(skipped[i]) / groups
        one = replace(setting, pv_skip=PV_SKIPS[i], error=float(errors[i]), pv_skipped=share)
        if one not in ladder:
            ladder.append(one)
    return ladder


def pv_skips(maxima: Tensor, thresholds: Sequence[float]) -> Tensor:
    """What the second filter skips, bool `[thresholds, n, groups]`.

    maxima `[n, rows]`: of each kept key block in ascending order, -inf where masked.
    """
    before = torch.full_like(maxima, -math.inf)
    before[1:] = maxima.cummax(0).values[:-1]
    # A row that has seen nothing yet skips nothing: -inf - -inf is NaN, which is no distance.
    gap = (before - maxima).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    nearest = split_blocks(gap, -1, ROW_GROUP, fill=math.inf).amin(-1)
    limit = torch.tensor(thresholds, dtype=gap.dtype, device=gap.device)[:, None, None]
    return nearest >= limit


def _wrong_with_pv(block: ScoredBlock, skip: Tensor) -> Tensor:
    """Σ|output - truth| for every threshold of the second filter; all groups of rows at once."""
    kept = (~skip).to(block.sums.dtype).permute(2, 0, 1)
    # The tail of a last group is rows of zeros, which are right as they are.
    outputs = split_blocks(block.outputs, -2, ROW_GROUP).transpose(0, 1)
    sums = split_blocks(block.sums, -1, ROW_GROUP).transpose(0, 1)
    return _wrong(kept, outputs, sums, split_blocks(block.truth, -2, ROW_GROUP)).sum(0)
