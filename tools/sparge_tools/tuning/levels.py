"""Levels of sparsity of each layer of a model: for each, the masses of its heads.

Each head is scored once on some query blocks, which gives the squared error of its output and the
blocks kept at every mass. Squared errors add up over heads, so a level spends one error on all
heads of the layer together, where it saves most: greedy on the convex hull of each part's options.
Parts (layers, or the heads of one) are independent, and the changes that they cause add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparge import Backend, Recipe, accelerate
from sparge.models import Layers
from sparge.routing import AUTO, DENSE
from sparge.values.profile import RECIPE_FIELDS, HeadSettings, LayerSettings
from sparge.values.recipe import heads_of

from .capture import BLOCKS, Capture, backend_for, captures_of
from .layer import MASSES as SEARCHED
from .layer import CaptureScorer, LayerScorer, ScoredHead, kept_sets
from .output_measure import Measure, OutputState
from .tracing import Inputs, inputs_digest


@dataclass(frozen=True)
class Option:
    """One way to run a part: the blocks that it keeps, and the change that it causes."""

    kept: float
    change: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.kept < math.inf and 0.0 <= self.change < math.inf):
            raise ValueError(f"kept and change must be finite and at least 0, got {self}")


def hull(options: Sequence[Option]) -> list[int]:
    """Indices of the options that are worth taking, from the least change to the fewest blocks.

    The change bought by each block saved rises along them: they are the lower convex hull.
    """
    order = sorted(range(len(options)), key=lambda i: (options[i].change, options[i].kept))
    found: list[int] = []
    for i in order:
        if found and options[i].kept >= options[found[-1]].kept:
            continue  # more change for nothing
        while len(found) > 1 and _rate(options, found[-2], found[-1]) >= _rate(
            options, found[-1], i
        ):
            found.pop()
        found.append(i)
    return found


def _rate(options: Sequence[Option], a: int, b: int) -> float:
    """The change for each block saved between two options."""
    return (options[b].change - options[a].change) / (options[a].kept - options[b].kept)


Parts = Mapping[Any, Sequence[Option]]


def allocate(parts: Parts, target: float) -> dict[Any, int]:
    """The option of each part: as few blocks as steps from the cheapest on reach within the target.

    The sum of the changes is at most the target, unless the least possible change exceeds it. A
    larger target contains every step of a smaller one, so it never keeps more blocks.
    """
    return next(allocations(parts, [target]))[0]


def allocations(parts: Parts, targets: Iterable[float]) -> Iterator[tuple[dict[Any, int], float]]:
    """`allocate` for ascending targets, each with the sum of its changes."""
    chosen, steps = {}, []
    for part, options in parts.items():
        if not options:
            raise ValueError(f"every part needs at least one option, {part!r} has none")
        corners = hull(options)
        chosen[part] = corners[0]
        for a, b in pairwise(corners):
            change = options[b].change - options[a].change
            steps.append((_rate(options, a, b), part, b, change))
    # A stable sort keeps the steps of one part in order, since their rates rise.
    steps.sort(key=lambda step: step[0])
    spent, done = sum(parts[part][i].change for part, i in chosen.items()), 0
    for target in targets:
        while done < len(steps) and spent + steps[done][-1] <= target:
            _, part, option, change = steps[done]
            chosen[part] = option
            spent += change
            done += 1
        yield dict(chosen), spent


MASSES = (*SEARCHED, 1.0)
"""The last one keeps everything: its error is that of the precision alone."""
ERRORS = (*(round(0.01 * 2 ** (i / 3), 4) for i in range(19)), math.inf)
"""Relative errors (L2) of a layer's attention, 0.01 to 0.64, each of them a level; the last level
is the sparsest there is."""


@dataclass(frozen=True)
class Level:
    """error: relative L2 of the layer's attention, as scored. masses: of each head. density: of
    the scored query blocks."""

    error: float
    masses: tuple[float, ...]
    density: float


@dataclass(frozen=True)
class HeadCurves:
    """Sums over the scored blocks: wrong and kept `[heads][masses]`, right and allowed `[heads]`.

    wrong: squared error of the output at each of `MASSES`; right: the squared output.
    """

    wrong: Any
    kept: Any
    right: Any
    allowed: Any

    def __add__(self, other: HeadCurves) -> HeadCurves:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return HeadCurves(*(torch.tensor(x, dtype=torch.float64).sum(0).tolist() for x in pairs))


def curves_of(captures: Sequence[Capture], recipe: Recipe, backend: Backend) -> HeadCurves:
    """The curves of all heads of a layer on some captures."""
    recipe = replace(recipe, local_blocks=recipe.window(captures[0].is_causal))
    masses = torch.tensor(MASSES, dtype=torch.float64)
    with torch.no_grad():
        scorer = LayerScorer([CaptureScorer(each, recipe, backend) for each in captures])
        similarity = heads_of(recipe.min_similarity, captures[0].Hq, none=-1.0)
        heads = [
            [_curve(one, recipe.predictor, similarity[h], masses) for one in scorer.head(h)]
            for h in range(captures[0].Hq)
        ]
    sums = [[torch.stack(x).sum(0).tolist() for x in zip(*each, strict=True)] for each in heads]
    return HeadCurves(*(list(x) for x in zip(*sums, strict=True)))


def _curve(
    head: ScoredHead, predictor: str, similarity: float, masses: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = kept_sets(head, predictor, [similarity], masses)[:, 0]
    wrong = torch.zeros(len(masses), dtype=torch.float64)
    right = torch.zeros((), dtype=torch.float64)
    for block, own in zip(head.blocks, kept, strict=True):
        wrong += block.errors(own).square_().sum((1, 2)).double().cpu()
        right += block.truth.square().sum().double().cpu()
    return wrong, kept.sum((0, 2)).double().cpu(), right, head.may.sum().double().cpu()


def levels_of(curves: HeadCurves, errors: Sequence[float] = ERRORS) -> list[Level]:
    """A level for each error that sparser settings reach, the first of them with everything kept.

    The error of 8 bits is in the curves; what a level adds to it counts.
    """
    options = [
        [Option(k, max(w - wrong[-1], 0.0)) for k, w in zip(kept, wrong, strict=True)]
        for kept, wrong in zip(curves.kept, curves.wrong, strict=True)
    ]
    right, allowed = sum(curves.right), sum(curves.allowed)
    levels = [Level(0.0, (1.0,) * len(options), 1.0)]
    for chosen, spent in allocations(dict(enumerate(options)), [e**2 * right for e in errors]):
        masses = tuple(MASSES[i] for i in chosen.values())
        if masses != levels[-1].masses:
            kept = sum(options[h][i].kept for h, i in chosen.items())
            levels.append(Level((spent / right) ** 0.5, masses, kept / max(allowed, 1)))
    return levels


@dataclass(frozen=True)
class TunedModel:
    """What measuring a model needs: itself, its attention layers, and what runs in them.

    recipe: all but how much is kept. backend: the name of a sparse one, or AUTO to choose it.
    state: results so far. step: called after every step, with what it was.
    """

    model: nn.Module
    measure: Measure
    names: tuple[str, ...]
    recipe: Recipe
    backend: str = AUTO
    blocks: int = BLOCKS
    state: OutputState = field(default_factory=OutputState)
    step: Callable[[str], None] = lambda what: None


def settings_of(recipe: Recipe, masses: Sequence[float], *, is_causal: bool) -> LayerSettings:
    """A recipe as the settings of one layer, with a mass for each head."""
    fields = {name: getattr(recipe, name) for name in RECIPE_FIELDS}
    fields["local_blocks"] = recipe.window(is_causal)
    similarity, pv_skip = (
        value if isinstance(value, tuple) else (value,) * len(masses)
        for value in (recipe.min_similarity, recipe.pv_skip)
    )
    heads = tuple(HeadSettings(*each) for each in zip(masses, similarity, pv_skip, strict=True))
    return LayerSettings(heads=heads, **fields)


def attention_layers(model: nn.Module, layers: Layers = None) -> tuple[str, ...]:
    """The names of the attention modules to tune."""
    with accelerate(model, backend=DENSE, layers=layers) as handle:
        return tuple(each.name for each in handle.report().layers if each.recipe is not None)


@dataclass(frozen=True)
class ScoredLayer:
    """The curves of a layer's heads, and how its attention is called. backend: a sparse one."""

    curves: HeadCurves
    is_causal: bool
    backend: str

    def __add__(self, other: ScoredLayer) -> ScoredLayer:
        return replace(self, curves=self.curves + other.curves)

    @cached_property
    def levels(self) -> list[Level]:
        return levels_of(self.curves)


def score_layers(tuned: TunedModel, inputs: Sequence[Inputs]) -> dict[str, ScoredLayer]:
    """Every layer that the inputs reach, scored on all of them."""
    found: dict[str, ScoredLayer] = {}
    for given in inputs:
        digest = inputs_digest(given)[:12]
        one = tuned.state.once(f"curves {digest}", partial(_score, tuned, given))
        tuned.step(f"scored input {digest}")
        for name, data in one.items():
            layer = ScoredLayer(**{**data, "curves": HeadCurves(**data["curves"])})
            found[name] = found[name] + layer if name in found else layer
    return found


def _score(tuned: TunedModel, given: Inputs) -> dict[str, Any]:
    found: dict[str, ScoredLayer] = {}

    def tap(name: str, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> None:
        captures = captures_of(query, key, value, facts, blocks=tuned.blocks)
        engine = backend_for(captures[0], tuned.recipe, tuned.backend)
        curves = curves_of(captures, tuned.recipe, engine)
        layer = ScoredLayer(curves, captures[0].is_causal, engine.name)
        found[name] = found[name] + layer if name in found else layer

    chosen = {*tuned.names}
    with accelerate(tuned.model, backend=DENSE, layers=chosen.__contains__) as handle:
        for name in tuned.names:
            handle.tap(name, partial(tap, name))
        tuned.measure.run(given)
    if not found:
        raise ValueError(
            f"inputs must be longer than one token: no attention of "
            f"{type(tuned.model).__name__} ran through sparge"
        )
    return {name: asdict(layer) for name, layer in found.items()}
