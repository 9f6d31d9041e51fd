"""Tune one layer: score every head, search its settings, take the better predictor, run them.

The kept query blocks of a head are scored once, for every setting that the search tries. For each
of them and key block j, with weights p of the run's own (8-bit) scores:

    outputs[j] = Σ_{k in j} p_k · v_k    [rows, Dv]        sums[j] = Σ_{k in j} p_k    [rows]

The output over any set of key blocks is Σ outputs / Σ sums. The kernels differ from this a little
(16-bit weights, a running maximum), so the settings that are found are run before they count.

Settings are tried from the sparsest on, so nothing is assumed of how the error changes with a
setting. A setting is dropped as soon as its error so far exceeds the bound for the whole input:
most of them after a block or two of the first input.

Each head then has a ladder of settings, sparsest first: all heads run theirs together, those that
exceed the bound on any input step on to a safer one, and a head whose ladder ends stays dense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparge import BLOCK_K, BLOCK_Q, DEFAULT, Backend, KeepMass, QTensor, Recipe
from sparge.routing import AUTO
from sparge.rules.forced_blocks import forced_blocks
from sparge.values.call import ROW_GROUP, in_blocks, n_blocks, sampled_rows
from sparge.values.profile import RECIPE_FIELDS, HeadSettings, LayerSettings
from sparge.values.stages import working
from sparge.values.tokenmask import EXCLUDED

from .capture import (
    Capture,
    backend_for,
    call_of,
    exact_output,
    keys_seen,
    prepare_capture,
    run_captured,
)

MOST_BYTES = 1 << 30
"""Limit of what is held at once. A head above it is scored on fewer groups of rows; a layer above
it has its heads scored again when they are needed again."""


@dataclass(frozen=True)
class ScoredBlock:
    """One kept query block of one head, over the `n` key blocks that it sees.

    outputs `[n, rows, Dv]`, sums and maxima (natural log) `[n, rows]`, truth `[rows, Dv]`.
    """

    outputs: Tensor
    sums: Tensor
    maxima: Tensor
    truth: Tensor

    def only(self, kept: Tensor) -> ScoredBlock:
        """Over some of the key blocks."""
        kept = kept[: len(self.sums)]
        return ScoredBlock(self.outputs[kept], self.sums[kept], self.maxima[kept], self.truth)

    def errors(self, kept: Tensor) -> Tensor:
        """Output - truth `[sets, rows, Dv]`, for each set of kept key blocks `[sets, n_k]`."""
        chosen = kept[:, : len(self.sums)].to(self.sums.dtype)
        return _errors(chosen, self.outputs, self.sums, self.truth)


@dataclass(frozen=True)
class ScoredHead:
    """One head on one input, as the search reads it.

    right: Σ|truth| over all scored rows. mean, rows: P̂ without a judge, and of the sampled rows;
    they, may and forced are `[blocks, n_k]`; q_similarity `[blocks]`, k_similarity `[n_k]`.
    """

    blocks: tuple[ScoredBlock, ...]
    right: float
    mean: Tensor
    rows: Tensor
    may: Tensor
    forced: Tensor
    q_similarity: Tensor
    k_similarity: Tensor


class CaptureScorer:
    """One capture, ready to be scored head by head."""

    def __init__(self, capture: Capture, recipe: Recipe, backend: Backend) -> None:
        self.capture, self.recipe = capture, recipe
        self.exact = exact_output(capture)
        # Has the stages compute the block statistics; the numbers to attend with are the same.
        judged = replace(
            recipe,
            keep=KeepMass(),
            predictor="mean",
            min_similarity=-1.0,
            sample_rows=Recipe.sample_rows,  # "mean" samples none, and refuses another number
        )
        prepared = prepare_capture(capture, judged, backend)
        queries, keys = prepared.queries, prepared.keys
        self.q, self.k, self.v = (self._numbers(x) for x in (queries.rows, keys.key, keys.value))
        assert queries.similarity is not None
        assert keys.similarity is not None
        self.q_similarity, self.k_similarity = queries.similarity[0], keys.similarity[0]
        unjudged = replace(judged, min_similarity=None)
        each = [
            backend.stages().predict(
                call_of(capture, unjudged, i),
                replace(prepared, queries=queries.blocks(i, i + 1)),
                capture.tokens(i),
            )
            for i in range(len(capture.starts))
        ]
        self.mean = torch.cat(each, dim=2)[0]

    def _numbers(self, x: Tensor | QTensor) -> Tensor:
        """What the kernels compute with, `[H, L, D]`."""
        if isinstance(x, QTensor):
            return x.dequantize()[0]
        return working(x, "exact" if self.recipe.precision == "exact" else "half")[0]

    def score(self, h: int, thin: int = 1) -> ScoredHead:
        """One head; of the groups of rows every `thin`-th is scored."""
        each = [self._block(h, i, thin) for i in range(len(self.capture.starts))]
        blocks, rows, may, forced = zip(*each, strict=True)
        right = sum(float(block.truth.abs().sum(dtype=torch.float64)) for block in blocks)
        return ScoredHead(
            blocks=blocks,
            right=right,
            mean=self.mean[h],
            rows=torch.stack(rows).float(),
            may=torch.stack(may),
            forced=torch.stack(forced),
            q_similarity=self.q_similarity[h],
            k_similarity=self.k_similarity[h // self.capture.group],
        )

    def _block(self, h: int, i: int, thin: int) -> tuple[ScoredBlock, Tensor, Tensor, Tensor]:
        """The block; for every key block `[n_k]` the mass that its sampled rows give, and whether
        it may be attended and is forced."""
        capture, tokens = self.capture, self.capture.tokens(i)
        rows, stop = capture.rows(i), keys_seen(tokens)
        kv = h // capture.group
        scores = (self.q[h, rows] @ self.k[kv, :stop].mT) * capture.scale
        allowed, bias = tokens.region(0, h, slice(0, tokens.Lq), slice(0, stop), scores.device)
        scores = scores if bias is None else scores + bias.to(scores.dtype)
        scores = scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top.masked_fill_(top == -math.inf, 0.0)).exp_()
        by_block = split_blocks(weights, -1, BLOCK_K)
        sums = by_block.sum(-1)
        sampled = sums[sampled_rows(len(sums), self.recipe.sample_rows)]
        total = sampled.sum(-1, keepdim=True)
        mass = torch.where(total > 0, sampled / total, 0.0).sum(0) / (total > 0).sum().clamp(min=1)
        n_k = n_blocks(tokens.Lk, BLOCK_K)
        whole_mass = mass.new_zeros(n_k)
        whole_mass[: len(mass)] = mass
        group = torch.arange(len(sums), device=sums.device) // ROW_GROUP
        # Other groups in every block, so that all places of a block are seen; at least one.
        first = i % thin % n_blocks(len(sums), ROW_GROUP)
        chosen = (group % thin == first).nonzero().squeeze(1) if thin > 1 else slice(None)
        by_block = by_block[chosen]
        outputs = by_block.transpose(0, 1) @ split_blocks(self.v[kv, :stop], -2, BLOCK_K)
        maxima = split_blocks(scores, -1, BLOCK_K, fill=-math.inf).amax(-1)[chosen]
        truth = self.exact[h, rows][chosen]
        block = ScoredBlock(outputs, sums[chosen].T.contiguous(), maxima.T.contiguous(), truth)
        kinds = tokens.block_kinds(scores.device)
        may = kinds[0, h if kinds.shape[1] > 1 else 0, 0] != EXCLUDED
        return block, whole_mass, may, forced_blocks(tokens, self.recipe, scores.device)[0]


def split_blocks(x: Tensor, dim: int, block: int, *, fill: float = 0.0) -> Tensor:
    """`in_blocks`, without its copy where there is no tail."""
    if x.shape[dim] % block == 0:
        return x.unflatten(dim, (-1, block))
    return in_blocks(x, dim, block, fill=fill)


class LayerScorer:
    """The heads of a layer on every input, held in memory as far as `MOST_BYTES` allows."""

    def __init__(self, scorers: Sequence[CaptureScorer]) -> None:
        self.scorers = scorers
        captures = [scorer.capture for scorer in scorers]
        sizes = [c.query.shape[2] * c.key.shape[2] * c.value.shape[3] for c in captures]
        of_a_head = 4 * sum(sizes) // BLOCK_K
        self.thin = min(max(1, -(-of_a_head // MOST_BYTES)), BLOCK_Q // ROW_GROUP)
        self._held: dict[int, list[ScoredHead]] = {}
        self._room = MOST_BYTES // of_a_head
        self._times = [0] * captures[0].Hq

    @property
    def scored(self) -> int:
        """How often the whole layer was scored."""
        return max(self._times)

    def head(self, h: int) -> list[ScoredHead]:
        found = self._held.get(h)
        if found is None:
            self._times[h] += 1
            found = [scorer.score(h, self.thin) for scorer in self.scorers]
            if len(self._held) < self._room:
                self._held[h] = found
        return found


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
            wrong += _wrong(block.errors(own[alive]))
            fits = wrong <= bound * head.right
            alive, worst, wrong = alive[fits], worst[fits], wrong[fits]
        # A head that gives nothing at all has nothing to get wrong.
        worst = torch.maximum(worst, wrong / head.right if head.right else wrong)
    return alive, worst


def _errors(kept: Tensor, outputs: Tensor, sums: Tensor, truth: Tensor) -> Tensor:
    """Output - truth for each set of kept blocks, `[…, sets, rows, Dv]`; rows without mass are 0.

    kept `[…, sets, n]`, outputs `[…, n, rows, Dv]`, sums `[…, n, rows]`, truth `[…, rows, Dv]`.
    """
    row_sum = kept @ sums
    out = (kept @ outputs.flatten(-2)).unflatten(-1, truth.shape[-2:])
    out /= row_sum.masked_fill_(row_sum == 0, 1.0).unsqueeze(-1)
    return out.sub_(truth.unsqueeze(-3))


def _wrong(errors: Tensor) -> Tensor:
    """Σ|error| of each set."""
    # fp32 adds a row of an output well enough; asked for fp64, torch would copy all of it first.
    return errors.abs_().sum(-1).double().sum(-1)


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
            # All groups of rows at once; the tail of a last group is zeros, which are right.
            outputs = split_blocks(block.outputs, -2, ROW_GROUP).transpose(0, 1)
            sums = split_blocks(block.sums, -1, ROW_GROUP).transpose(0, 1)
            truth = split_blocks(block.truth, -2, ROW_GROUP)
            run = (~skip).to(sums.dtype).permute(2, 0, 1)
            wrong += _wrong(_errors(run, outputs, sums, truth)).sum(0)
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


PREDICTORS = ("mean", "blend")
COST_OF_ROWS = 0.01
"""Cost of the exact rows of "blend", in density; "mean" is taken where it is as good."""
Ladder = Sequence[HeadSettings]


@dataclass(frozen=True)
class TunedLayer:
    """evaluations: of attention on one input, scored or run, for each head of the layer."""

    settings: LayerSettings = field(default_factory=LayerSettings)
    evaluations: int = 0
    seconds: float = 0.0


def tune_layer(
    captures: Sequence[Capture],
    *,
    l1: float,
    l2: float | None,
    base: Recipe = DEFAULT,
    predictors: Sequence[str] = PREDICTORS,
    backend: str = AUTO,
) -> TunedLayer:
    """The settings of one layer from its captures, one for each calibration input.

    base: precision, sink, local window, protected and sampled rows, and what skipped blocks
    contribute; what it keeps is tuned. Scores take skipped blocks as dropped, also where runs pool
    them: settings found so are safe, and sparser ones may exist.
    """
    base = replace(base, local_blocks=base.window(captures[0].is_causal))
    engine = backend_for(captures[0], base, backend)
    with torch.no_grad():
        scorers = [CaptureScorer(capture, base, engine) for capture in captures]
        scored, heads = LayerScorer(scorers), range(captures[0].Hq)
        ladders: dict[str, list[Ladder]] = {name: [] for name in predictors}
        for h in heads:
            for name in predictors:
                ladders[name].append(find_ladder(scored.head(h), name, l1))
        predictor = min(predictors, key=lambda name: _cost(name, ladders[name]))
        runner = Runner(scorers, base, predictor, engine)
        found = climb(runner, ladders[predictor], l1)
        if l2 is not None:
            with_pv: list[Ladder] = [
                () if found[h].is_dense else find_pv_ladder(scored.head(h), predictor, found[h], l2)
                for h in heads
            ]
            found = climb(runner, with_pv, l2, otherwise=found)
    digits = {"density": 4, "pv_skipped": 4, "error": 5}
    settings = replace(
        runner.layer,
        heads=tuple(
            replace(head, **{name: round(getattr(head, name), n) for name, n in digits.items()})
            for head in found
        ),
        inputs=len(captures),
        rows=sum(capture.query.shape[2] for capture in captures),
    )
    return TunedLayer(settings, len(captures) * (scored.scored + runner.runs))


class Runner:
    """Runs settings, one per head, on every input, and counts how often."""

    def __init__(
        self, scorers: Sequence[CaptureScorer], base: Recipe, predictor: str, backend: Backend
    ) -> None:
        self.scorers, self.backend, self.runs = scorers, backend, 0
        fields = {name: getattr(base, name) for name in RECIPE_FIELDS}
        self.layer = LayerSettings(**{**fields, "predictor": predictor})

    def run(self, settings: Ladder) -> list[HeadSettings]:
        """The settings with their measured error, of the worst input, and their densities."""
        self.runs += 1
        recipe = self.layer.recipe_with(settings)
        each = [
            run_captured(scorer.capture, recipe, scorer.exact, backend=self.backend)
            for scorer in self.scorers
        ]
        # NaN meets no bound.
        error = torch.stack([m.error for m in each]).nan_to_num(nan=torch.inf).amax(0).tolist()
        kept, allowed, skips, groups = (
            torch.stack([getattr(m, name) for m in each]).sum(0).tolist()
            for name in ("kept", "allowed", "pv_skips", "pv_groups")
        )
        measured = zip(settings, error, kept, allowed, skips, groups, strict=True)
        return [
            replace(setting, error=e, density=k / max(a, 1), pv_skipped=s / max(g, 1))
            for setting, e, k, a, s, g in measured
        ]


def climb(
    runner: Runner, ladders: Sequence[Ladder], bound: float, otherwise: Ladder | None = None
) -> list[HeadSettings]:
    """Run every head's first setting, and safer ones until each holds the bound on every input.

    otherwise: measured settings that a head without a bounded one goes back to; without them such
    a head is dense, and is run so too.
    """
    left = [list(ladder) for ladder in ladders]
    done: list[HeadSettings | None] = [None] * len(left)
    if otherwise is not None:
        done = [None if ladder else back for ladder, back in zip(left, otherwise, strict=True)]
    while any(result is None for result in done):
        settings = [
            result or (ladder[0] if ladder else HeadSettings())
            for result, ladder in zip(done, left, strict=True)
        ]
        for h, result in enumerate(runner.run(settings)):
            if done[h] is not None:
                continue
            if not left[h] or result.error <= bound:
                done[h] = result
                continue
            # Expect the next run to exceed its score by as much as this one did.
            more = max(result.error - left[h][0].error, 0.0)
            left[h] = [setting for setting in left[h][1:] if setting.error + more <= bound]
            if not left[h] and otherwise is not None:
                done[h] = otherwise[h]
    return [result for result in done if result is not None]


def _cost(predictor: str, ladders: Sequence[Ladder]) -> float:
    density = [ladder[0].density if ladder else 1.0 for ladder in ladders]
    rows = COST_OF_ROWS if predictor == "blend" else 0.0
    return sum(density) / len(density) + rows
