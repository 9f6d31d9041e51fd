"""Tune a model to a target of its own output: divergence or perplexity of a language model, or the
change of a denoiser's output in every band of the noise level.

Each layer gets the error that buys the most sparsity for what it does to the output. An allocation
is checked end to end on held-out inputs, and scaled until it meets the target; what the profile
promises is what was measured there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sparge import DEFAULT, KeepMass, Profile, Recipe, __version__, accelerate
from sparge.models import Layers
from sparge.routing import AUTO
from sparge.values.profile import HeadSettings, LayerSettings, fingerprint

from .capture import BLOCKS, stamp
from .layer import NO_GAIN
from .levels import (
    Option,
    ScoredLayer,
    TunedModel,
    allocate,
    attention_layers,
    score_layers,
    settings_of,
)
from .output_measure import (
    KL,
    PERPLEXITY,
    RELATIVE_L2,
    DenoiserMeasure,
    LanguageMeasure,
    Measure,
    OutputState,
)
from .sensitivity import layer_options, measure_sensitivity
from .tracing import Inputs, evaluating, inputs_digest, timestep_of

CHECKS = 7
"""Allocations that are run on the held-out inputs at most."""
CLOSE = 0.04
"""A target is used up well enough within this share of it."""
LEAST, MOST, TRIES = 1e-3, 1e4, 40
"""The sums of changes that are tried, against the one to begin with, and how many of them."""


@dataclass(frozen=True)
class Checked:
    """One allocation on the held-out inputs. settings: with measured densities and errors.

    judged: of the figures, the mean that the target is for, and its standard error.
    """

    options: Mapping[str, int]
    settings: Mapping[str, LayerSettings]
    figures: Mapping[str, Any]
    density: float
    judged: tuple[float, float] = (math.nan, math.nan)

    @property
    def upper(self) -> float:
        """One standard error above the mean: what a target is compared with."""
        return sum(self.judged)


@dataclass
class Verifier:
    """Runs allocations on held-out inputs; dense outputs are kept in memory, results in the state.

    layers: what `score_layers` found; their levels are numbered from 1 on as options, of which 0
    is the layer's own dense attention.
    """

    tuned: TunedModel
    held_out: Sequence[Inputs]
    layers: Mapping[str, ScoredLayer]
    _dense: dict[str, Any] = field(default_factory=dict)

    def check(self, options: Mapping[str, int]) -> Checked:
        """The options of every layer, by number, run on every held-out input."""
        settings = {name: self.settings_of(name, options[name]) for name in self.layers}
        profile = Profile(settings, fingerprint(self.tuned.model), None, default=self.tuned.recipe)
        each = self._on_every_input(json.dumps(profile.to_dict()["layers"]), profile=profile)
        measured = {name: _measured(settings[name], name, each) for name in settings}
        return replace(self._summary(each), options=dict(options), settings=measured)

    def everything_kept(self) -> Checked:
        """Nothing skipped: what the precision alone does."""
        recipe = replace(self.tuned.recipe, keep=KeepMass(1.0))
        return self._summary(self._on_every_input("everything kept", recipe=recipe))

    def settings_of(self, name: str, option: int) -> LayerSettings:
        layer = self.layers[name]
        masses = layer.levels[max(option - 1, 0)].masses
        settings = settings_of(self.tuned.recipe, masses, is_causal=layer.is_causal)
        return settings if option else replace(settings, heads=(HeadSettings(),) * len(masses))

    def _on_every_input(self, which: str, **given: Any) -> list[dict[str, Any]]:
        choice = hashlib.sha256(which.encode()).hexdigest()[:12]
        return [
            self.tuned.state.once(
                f"check {choice} {inputs_digest(one)[:12]}", partial(self._run, one, given)
            )
            for one in self.held_out
        ]

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
        measure = self.tuned.measure
        figures = measure.figures([part for one in each for part in one["parts"]])
        density = sum(one["density"] for one in each) / len(each)
        mean, error = figures[measure.judged], figures[f"{measure.judged}_error"]
        self.tuned.step(f"density {density:.3f}: {mean:.5f} ± {error:.5f}")
        return Checked({}, {}, figures, density, (mean, error))


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


State = str | os.PathLike[str] | None
Step = Callable[[str], None]


class TargetNotMet(RuntimeError):  # noqa: N818 - reads as the answer it is
    """No sparse settings keep the output within the target; the message has the figures."""


def tune_output(
    model: nn.Module,
    inputs: Sequence[Inputs],
    held_out: Sequence[Inputs],
    *,
    max_kl: float | None = None,
    max_perplexity: float | None = None,
    recipe: Recipe = DEFAULT,
    layers: Layers = None,
    blocks: int = BLOCKS,
    backend: str = AUTO,
    name: str = "",
    about: Mapping[str, Any] | None = None,
    state: State = None,
    done: Step = lambda what: None,
) -> Profile:
    """The sparsest profile found whose output on held-out texts stays within a target.

    inputs, held_out: token ids `[1, L]` to calibrate on and to verify on; none may be in both.
    max_kl: bound of the mean KL(dense ‖ sparse) of the next-token distributions. max_perplexity:
    bound of the relative rise of perplexity, 0.005 is +0.5 %. Give one of them. Both are met with
    one standard error to spare. recipe: precision, predictor, sink and local window.
    about: for the profile's `calibration`. state: a file of all results so far; the same call, also
    with another target, resumes from it. done: called after every step, with what it was.

    Raises `TargetNotMet` if nothing sparse meets the target. Run the model in fp32: in bf16 every
    change of attention, however small, moves the output by the rounding of all later layers.
    """
    if (max_kl is None) == (max_perplexity is None):
        raise ValueError("give max_kl or max_perplexity, one of them")
    judge, target = (KL, max_kl) if max_perplexity is None else (PERPLEXITY, max_perplexity)
    check_target(judge, target)
    assert target is not None
    check_disjoint(inputs, held_out)
    tuned = _tuned_model(
        LanguageMeasure(model, judge),
        inputs,
        held_out,
        recipe,
        layers,
        blocks,
        backend,
        state,
        done,
    )
    with evaluating(model), torch.inference_mode():
        checked, how = tune_inputs(tuned, inputs, held_out, target)
    found = {"measure": judge, "target": target, **how}
    return make_profile(tuned, checked.settings, found, name=name, about=about)


def check_target(judge: str, target: Any) -> None:
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0.0 < target < 1.0:
        what = {KL: "max_kl", PERPLEXITY: "max_perplexity"}.get(judge, "max_change")
        raise ValueError(f"{what} must be a number greater than 0 and less than 1, got {target!r}")


def check_counts(name: str, given: Sequence[Any], held_out: Sequence[Any]) -> None:
    if not given or len(held_out) < 2:
        raise ValueError(
            f"{name} needs at least 1 and held_out at least 2, for a standard error; got "
            f"{len(given)} and {len(held_out)}"
        )


def check_disjoint(inputs: Sequence[Inputs], held_out: Sequence[Inputs]) -> None:
    check_counts("inputs", inputs, held_out)
    if {*map(inputs_digest, inputs)} & {*map(inputs_digest, held_out)}:
        raise ValueError("held_out must be other inputs than those to calibrate on; one is in both")


def _tuned_model(
    measure: Measure,
    inputs: Sequence[Inputs],
    held_out: Sequence[Inputs],
    recipe: Recipe,
    layers: Layers,
    blocks: int,
    backend: str,
    state: State,
    done: Step,
) -> TunedModel:
    """The model with its layers; opens the state of its results."""
    model, base = measure.model, replace(recipe, keep=KeepMass())
    names = attention_layers(model, layers)
    # All that a measured result depends on; the target is not among it.
    asked = {
        "model": fingerprint(model).weights,
        "dtype": next((str(p.dtype) for p in model.parameters()), ""),
        "layers": list(names),
        "recipe": base.to_dict(),
        "blocks": blocks,
        "backend": backend,
        "inputs": [inputs_digest(each) for each in inputs],
        "held_out": [inputs_digest(each) for each in held_out],
        "sparge": __version__,
    }
    known = OutputState(state, asked)
    return TunedModel(model, measure, names, base, backend, blocks, known, done)


def steps_in_all(layers: int, inputs: int) -> int:
    """How often `done` is called at most, for a progress bar."""
    return inputs + layers + CHECKS


def tune_inputs(
    tuned: TunedModel, inputs: Sequence[Inputs], held_out: Sequence[Inputs], target: float
) -> tuple[Checked, dict[str, Any]]:
    """Score, measure, allocate, verify and scale: the settings found, and how, for the profile."""
    layers = score_layers(tuned, inputs)
    sensitivities = measure_sensitivity(tuned, inputs[0], layers)
    options = layer_options(layers, sensitivities)
    verifier = Verifier(tuned, held_out, layers)
    first = tuned.measure.sum_for(target)
    best = scale_to_target(
        options, verifier.check, lambda found: found.upper, target=target, first=first
    )
    if best is None or best.density > NO_GAIN:
        raise TargetNotMet(_why_not(verifier, target, best))
    chosen = {
        name: layers[name].levels[i - 1].error if i else 0.0 for name, i in best.options.items()
    }
    provenance = {
        "held_out": {
            **best.figures,
            "density": best.density,
            "digests": [inputs_digest(each) for each in held_out],
        },
        "calibrated_on": [inputs_digest(each) for each in inputs],
        "sensitivity": {
            name: {
                "errors": [round(e, 5) for e in of.errors],
                "changes": [float(f"{change:.4g}") for change in of.changes],
                "chosen": round(chosen[name], 5),
            }
            for name, of in sensitivities.items()
        },
    }
    return best, provenance


def _why_not(verifier: Verifier, target: float, best: Checked | None) -> str:
    """The figures that stand against a target."""
    alone = verifier.everything_kept()
    (mean, error), precision = alone.judged, verifier.tuned.recipe.precision
    met = "" if best is None else f"; it is met at density {best.density:.3f} at the least"
    way_out = f"raise the target, or take another precision than {precision!r}"
    if alone.upper <= target / 2:
        way_out = "raise the target, or verify on more held-out text"
    return (
        f"the target {target:g} cannot be met by sparse attention on the held-out inputs{met}. "
        f"With everything kept, precision {precision!r} alone gives {mean:.3g} ± {error:.2g}. "
        f"{way_out}"
    )


def make_profile(
    tuned: TunedModel,
    settings: Mapping[str, LayerSettings],
    output: Mapping[str, Any],
    *,
    name: str,
    about: Mapping[str, Any] | None,
) -> Profile:
    dtype = next((str(p.dtype).removeprefix("torch.") for p in tuned.model.parameters()), "")
    return Profile(
        layers={layer: settings.get(layer, LayerSettings()) for layer in tuned.names},
        model=fingerprint(tuned.model),
        bounds=None,
        default=tuned.recipe,
        name=name,
        **stamp(),
        calibration={**(about or {}), "dtype": dtype, "query_blocks": tuned.blocks},
        output=output,
    )


BANDS = ((0.0, 0.5), (0.5, 1.0))
Band = tuple[float, float]


def tune_denoiser(
    model: nn.Module,
    inputs: Sequence[Inputs],
    held_out: Sequence[Inputs],
    *,
    max_change: float,
    noise_levels: Sequence[float] | None = None,
    held_out_levels: Sequence[float] | None = None,
    bands: Sequence[Band] = BANDS,
    recipe: Recipe = DEFAULT,
    layers: Layers = None,
    blocks: int = BLOCKS,
    backend: str = AUTO,
    name: str = "",
    about: Mapping[str, Any] | None = None,
    state: State = None,
    done: Step = lambda what: None,
) -> Profile:
    """The sparsest profile found whose output changes by at most max_change in every noise band.

    The change is relative L2 against the dense output, its mean over the held-out inputs of a band,
    with one standard error to spare. inputs, held_out: the model's keyword arguments; noise_levels,
    held_out_levels: the share of noise in each, 0 to 1; None takes the mean of an argument
    `timestep`. bands: `[low, high)`; each needs an input to calibrate on and two held out.
    The rest is as in `tune_output`. Noise levels outside of all bands keep dense attention. Run the
    model inside `handle.context(noise_level=...)`.

    Raises `TargetNotMet`, naming the band, if nothing sparse meets the target there.
    """
    check_target(RELATIVE_L2, max_change)
    check_disjoint(inputs, held_out)
    mine = _by_band(inputs, levels_of_noise(inputs, noise_levels, "noise_levels"), bands)
    others = _by_band(
        held_out, levels_of_noise(held_out, held_out_levels, "held_out_levels"), bands
    )
    for band in bands:
        if not mine[band] or len(others[band]) < 2:
            raise ValueError(
                f"bands need one input and two held-out inputs each; noise {band[0]:g} to "
                f"{band[1]:g} has {len(mine[band])} and {len(others[band])}"
            )
    tuned = _tuned_model(
        DenoiserMeasure(model), inputs, held_out, recipe, layers, blocks, backend, state, done
    )
    checked: dict[Band, Checked] = {}
    told_bands = []
    with evaluating(model), torch.inference_mode():
        for band in bands:
            try:
                found = tune_inputs(tuned, mine[band], others[band], max_change)
            except TargetNotMet as why:
                told = f"noise {band[0]:g} to {band[1]:g}: {why}"
                raise TargetNotMet(told) from None
            checked[band] = found[0]
            told_bands.append({"noise": list(band), **found[1]})
    output = {"measure": RELATIVE_L2, "target": max_change, "bands": told_bands}
    settings = {layer: _banded(layer, checked) for layer in tuned.names}
    return make_profile(tuned, settings, output, name=name, about=about)


def levels_of_noise(
    inputs: Sequence[Inputs], levels: Sequence[float] | None, argument: str
) -> list[float]:
    """A noise level for each input, as given or as its timestep says."""
    if levels is None:
        stated = [timestep_of(given) for given in inputs]
        levels = [level for level in stated if level is not None]
        if len(levels) < len(stated):
            raise ValueError(f"{argument} must be given: the inputs have no argument timestep")
    if len(levels) != len(inputs):
        raise ValueError(
            f"{argument} needs one for each of {len(inputs)} inputs, got {len(levels)}"
        )
    wrong = [level for level in levels if not 0.0 <= level <= 1.0]
    if wrong:
        raise ValueError(
            f"{argument} must be in [0, 1], got {wrong[0]:g}; for a timestep divide it by the "
            "number of training timesteps"
        )
    return list(levels)


def _by_band(
    inputs: Sequence[Inputs], levels: Sequence[float], bands: Sequence[Band]
) -> dict[Band, list[Inputs]]:
    """The inputs of every band; a level of no band is refused, since nothing would use it."""
    LayerSettings(bands=tuple(LayerSettings(noise=band) for band in bands))  # checks them
    found: dict[Band, list[Inputs]] = {band: [] for band in bands}
    for given, level in zip(inputs, levels, strict=True):
        at = [band for band in bands if band[0] <= level < band[1] or level == band[1] == 1.0]
        if not at:
            raise ValueError(f"bands must hold every noise level of the inputs, none has {level:g}")
        found[at[0]].append(given)
    return found


def _banded(layer: str, checked: Mapping[Band, Checked]) -> LayerSettings:
    """Settings by band; where the bands leave noise levels out, dense attention there."""
    found = {band: of.settings[layer] for band, of in checked.items() if layer in of.settings}
    if not found:
        return LayerSettings()
    each = tuple(replace(settings, noise=band) for band, settings in found.items())
    covered = sum(high - low for low, high in found)
    if covered > 1.0 - 1e-9:
        return LayerSettings(bands=each)
    n = len(each[0].heads)
    return replace(each[0], heads=(HeadSettings(),) * n, noise=None, inputs=0, bands=each)
