"""The model to tune, and the scores of its layers: what each head keeps and errs at every mass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from sparge import KeepMass, Recipe, accelerate
from sparge.routing import AUTO, DENSE
from sparge.values.profile import RECIPE_FIELDS, HeadSettings, LayerSettings

from .capture import BLOCKS, backend_for, captures_of
from .layer_levels import HeadCurves, Level, curves_of, levels_of
from .model_tracer import Inputs, inputs_digest
from .output_measure import Measure
from .output_state import OutputState

Levels = Mapping[str, Sequence[Level]]
Layers = Iterable[str] | Callable[[str], bool] | None


@dataclass(frozen=True)
class TunedModel:
    """What measuring a model needs: itself, its attention layers, and what runs in them.

    recipe: all but how much is kept. backend: the name of a sparse one, or AUTO to choose it.
    """

    model: nn.Module
    measure: Measure
    names: tuple[str, ...]
    recipe: Recipe
    backend: str = AUTO
    blocks: int = BLOCKS

    def settings(self, masses: Sequence[float], *, is_causal: bool) -> LayerSettings:
        """One layer with a mass for each head."""
        n, base = len(masses), self.recipe
        fields = {name: getattr(base, name) for name in RECIPE_FIELDS}
        fields["local_blocks"] = base.window(is_causal)
        similarity, pv_skip = (
            value if isinstance(value, tuple) else (value,) * n
            for value in (base.min_similarity, base.pv_skip)
        )
        heads = tuple(
            HeadSettings(mass, min_similarity, skip)
            for mass, min_similarity, skip in zip(masses, similarity, pv_skip, strict=True)
        )
        return LayerSettings(heads=heads, **fields)


def attention_layers(model: nn.Module, layers: Layers = None) -> tuple[str, ...]:
    """The names of the attention modules to tune."""
    with accelerate(model, backend=DENSE, layers=layers) as handle:
        return tuple(each.name for each in handle.report().layers if each.recipe is not None)


def base_recipe(recipe: Recipe) -> Recipe:
    """How much it keeps is what is tuned."""
    return replace(recipe, keep=KeepMass())


@dataclass(frozen=True)
class ScoredLayer:
    """The curves of a layer's heads, and how its attention is called. backend: a sparse one."""

    curves: HeadCurves
    is_causal: bool
    backend: str

    def __add__(self, other: ScoredLayer) -> ScoredLayer:
        return replace(self, curves=self.curves + other.curves)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "curves": vars(self.curves)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScoredLayer:
        return cls(**{**data, "curves": HeadCurves(**data["curves"])})


def score_layers(
    tuned: TunedModel, inputs: Sequence[Inputs], state: OutputState, step: Callable[[str], None]
) -> dict[str, ScoredLayer]:
    """Every layer that the inputs reach, scored on all of them."""
    found: dict[str, ScoredLayer] = {}
    for given in inputs:
        digest = inputs_digest(given)[:12]
        one = state.get(f"curves {digest}")
        if one is None:
            one = state.put(f"curves {digest}", _score(tuned, given))
        step(f"scored input {digest}")
        for name, data in one.items():
            layer = ScoredLayer.from_dict(data)
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
    return {name: layer.to_dict() for name, layer in found.items()}


def levels_of_layers(
    layers: Mapping[str, ScoredLayer], of: Callable[[HeadCurves], list[Level]] = levels_of
) -> Levels:
    """The levels of every layer from its curves, everything kept first."""
    return {name: of(layer.curves) for name, layer in layers.items()}
