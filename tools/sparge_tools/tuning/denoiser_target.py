"""Tune a denoiser to a target of its own output, in every band of the noise level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparge import DEFAULT, Profile, Recipe
from sparge.routing import AUTO
from sparge.values.profile import HeadSettings, LayerSettings

from .capture import BLOCKS
from .model_tracer import Inputs, as_arguments
from .output_measure import RELATIVE_L2, DenoiserMeasure, evaluating
from .output_state import OutputState
from .output_target import (
    OutputResult,
    State,
    Step,
    TargetNotMet,
    check_disjoint,
    check_target,
    make_profile,
    request_of,
    tune_inputs,
)
from .scored_layers import Layers, TunedModel, attention_layers, base_recipe

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
    tuned = TunedModel(
        model,
        DenoiserMeasure(model),
        attention_layers(model, layers),
        base_recipe(recipe),
        backend,
        blocks,
    )
    kept = OutputState(None if state is None else Path(state), request_of(tuned, inputs, held_out))
    results: dict[Band, OutputResult] = {}
    with evaluating(model), torch.inference_mode():
        for band in bands:
            try:
                results[band] = tune_inputs(tuned, mine[band], others[band], max_change, kept, done)
            except TargetNotMet as why:
                told = f"noise {band[0]:g} to {band[1]:g}: {why}"
                raise TargetNotMet(told) from None
    told_bands = [{"noise": list(band), **of.provenance} for band, of in results.items()]
    output = {"measure": RELATIVE_L2, "target": max_change, "bands": told_bands}
    settings = {layer: _banded(layer, results) for layer in tuned.names}
    return make_profile(tuned, settings, output, name=name, about=about)


def levels_of_noise(
    inputs: Sequence[Inputs], levels: Sequence[float] | None, argument: str
) -> list[float]:
    """A noise level for each input, as given or as its timestep says."""
    if levels is None:
        stated = [as_arguments(given).get("timestep") for given in inputs]
        if any(level is None for level in stated):
            raise ValueError(f"{argument} must be given: the inputs have no argument timestep")
        levels = [float(torch.as_tensor(x, dtype=torch.float64).mean()) for x in stated]
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


def _banded(layer: str, results: Mapping[Band, OutputResult]) -> LayerSettings:
    """Settings by band; where the bands leave noise levels out, dense attention there."""
    found = {
        band: of.checked.settings[layer]
        for band, of in results.items()
        if layer in of.checked.settings
    }
    if not found:
        return LayerSettings()
    each = tuple(replace(settings, noise=band) for band, settings in found.items())
    covered = sum(high - low for low, high in found)
    if covered > 1.0 - 1e-9:
        return LayerSettings(bands=each)
    n = len(each[0].heads)
    return replace(each[0], heads=(HeadSettings(),) * n, noise=None, inputs=0, bands=each)
