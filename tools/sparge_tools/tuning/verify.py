"""Check an allocation end to end on held-out inputs, and scale it until its target is met."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparge import KeepMass, Profile, accelerate
from sparge.values.profile import HeadSettings, LayerSettings, fingerprint

from .allocate import Option, allocate
from .model_tracer import Inputs, inputs_digest
from .output_state import OutputState
from .scored_layers import Levels, ScoredLayer, TunedModel

CHECKS = 7
"""Allocations that are run on the held-out inputs at most."""
CLOSE = 0.04
"""A target is used up well enough within this share of it."""
LEAST, MOST, TRIES = 1e-3, 1e4, 40
"""The sums of changes that are tried, against the one to begin with, and how many of them."""


@dataclass(frozen=True)
class Checked:
    """One allocation on the held-out inputs. settings: with measured densities and errors."""

    options: Mapping[str, int]
    settings: Mapping[str, LayerSettings]
    figures: Mapping[str, Any]
    density: float


@dataclass
class Verifier:
    """Runs allocations on held-out inputs; dense outputs are kept in memory, results in the state.

    layers: what `score_layers` found; levels: theirs, numbered from 1 on as options, of which 0
    is the layer's own dense attention.
    """

    tuned: TunedModel
    held_out: Sequence[Inputs]
    layers: Mapping[str, ScoredLayer]
    levels: Levels
    state: OutputState
    step: Callable[[str], None] = lambda what: None
    _dense: dict[str, Any] = field(default_factory=dict)

    def check(self, options: Mapping[str, int]) -> Checked:
        """The options of every layer, by number, run on every held-out input."""
        settings = {name: self.settings_of(name, options[name]) for name in self.layers}
        profile = Profile(settings, fingerprint(self.tuned.model), None, default=self.tuned.recipe)
        each = self._on_every_input(json.dumps(profile.to_dict()["layers"]), profile=profile)
        measured = {name: _measured(settings[name], name, each) for name in settings}
        checked = self._summary(each)
        return replace(checked, options=dict(options), settings=measured)

    def everything_kept(self) -> Checked:
        """Nothing skipped: what the precision alone does."""
        recipe = replace(self.tuned.recipe, keep=KeepMass(1.0))
        return self._summary(self._on_every_input("everything kept", recipe=recipe))

    def settings_of(self, name: str, option: int) -> LayerSettings:
        masses = self.levels[name][max(option - 1, 0)].masses
        settings = self.tuned.settings(masses, is_causal=self.layers[name].is_causal)
        return settings if option else replace(settings, heads=(HeadSettings(),) * len(masses))

    def _on_every_input(self, which: str, **given: Any) -> list[dict[str, Any]]:
        choice = hashlib.sha256(which.encode()).hexdigest()[:12]
        each = []
        for one in self.held_out:
            key = f"check {choice} {inputs_digest(one)[:12]}"
            found = self.state.get(key)
            each.append(self.state.put(key, self._run(one, given)) if found is None else found)
        return each

    def _run(self, given: Inputs, settings: Mapping[str, Any]) -> dict[str, Any]:
        model, measure, digest = self.tuned.model, self.tuned.measure, inputs_digest(given)
        if digest not in self._dense:
            self._dense[digest] = measure.run(given)
        backend = next(iter(self.layers.values())).backend
        chosen: dict[str, Any] = {"layers": self.layers.__contains__, "backend": backend}
        with accelerate(model, measure_error=True, **chosen, **settings) as handle:
            sparse = measure.run(given)
            layers = [each for each in handle.report().layers if each.name in self.layers]
        heads = {
            each.name: [list(each.density_by_head), list(each.error_by_head or ())]
            for each in layers
        }
        kept, allowed = sum(each.kept for each in layers), sum(each.allowed for each in layers)
        parts = measure.parts(self._dense[digest], sparse, given)
        return {"density": kept / max(allowed, 1), "parts": parts, "heads": heads}

    def _summary(self, each: Sequence[Mapping[str, Any]]) -> Checked:
        figures = self.tuned.measure.figures([part for one in each for part in one["parts"]])
        density = sum(one["density"] for one in each) / len(each)
        judged = self.tuned.measure.judged(figures)
        self.step(f"density {density:.3f}: {judged.mean:.5f} ± {judged.error:.5f}")
        return Checked({}, {}, figures, density)


def _measured(
    settings: LayerSettings, name: str, each: Sequence[Mapping[str, Any]]
) -> LayerSettings:
    """The settings with the density and the error of every head over the held-out inputs."""
    runs = [one["heads"][name] for one in each if one["heads"][name][0]]
    heads = settings.heads
    if runs:
        density = [sum(numbers) / len(runs) for numbers in zip(*(d for d, _ in runs), strict=True)]
        error = [max(numbers) for numbers in zip(*(e for _, e in runs), strict=True)]
        heads = tuple(
            head if head.is_dense else replace(head, density=round(d, 4), error=round(e, 5))
            for head, d, e in zip(heads, density, error, strict=True)
        )
    return replace(settings, heads=heads, inputs=len(each))


def scale_to_target(
    options: Mapping[str, Sequence[Option]],
    check: Callable[[Mapping[str, int]], Checked],
    figure: Callable[[Checked], float],
    *,
    target: float,
    first: float,
) -> Checked | None:
    """The sparsest allocation found whose measured figure is at most the target; None without one.

    first: the sum of changes to begin with. Changes do not add up exactly, so the sum allowed is
    scaled by what was measured, between one that met the target and one that did not.
    """
    best: Checked | None = None
    met, missed, allowed = 0.0, math.inf, first
    known: dict[tuple[int, ...], Checked] = {}
    # An allocation that was checked before costs nothing; a small model has few of them.
    for _ in range(TRIES):
        chosen = allocate(options, allowed)
        key = tuple(chosen.values())
        if key not in known:
            if len(known) == CHECKS:
                break
            known[key] = check(chosen)
        found = known[key]
        value = figure(found)
        if value <= target:
            met = allowed
            best = found if best is None or found.density < best.density else best
            if value >= (1.0 - CLOSE) * target:
                break
        else:
            missed = allowed
        ratio = (1.0 - CLOSE / 2) * target / max(value, 1e-12)
        allowed *= min(max(ratio, 0.1), 4.0)
        if not met < allowed < missed:
            allowed = math.sqrt(met * missed) if met else missed / 4
        if allowed < LEAST * first or allowed > MOST * first:
            break
    return best
