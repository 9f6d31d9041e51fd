"""Tune a diffusers pipeline to a bound on its renders: PSNR against its own dense run.

What is searched is how much every head keeps, and which share of the run, from pure noise on, stays
dense. The result is verified on held-out seeds; what the profile promises is what was measured
there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparge import VISION, KeepMass, Profile, Recipe, Schedule, __version__
from sparge.models import Layers
from sparge.routing import AUTO
from sparge.support.cpuinfo import cpu_name
from sparge.values.profile import RECIPE_FIELDS, HeadSettings, LayerSettings, fingerprint

from ..renders.compare import Prompt, Settings, checked_call, plain, quiet_bars, refuse_accelerated
from ..renders.media import LATENT
from .model_tracer import inputs_digest
from .output_state import OutputState
from .output_target import State, Step, TargetNotMet
from .pipeline_tracer import chosen_layers
from .render_search import PSNR, Level, Renderer, Verified, search_levels
from .search import NO_GAIN

MASSES = (0.99, 0.97, 0.95, 0.92, 0.88, 0.82, 0.75, 0.65, 0.5)
DENSE_FIRST = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
CHECKS = 4
"""Levels that are run on the held-out seeds at most."""


def tune_renders(
    pipe: Any,
    prompts: Sequence[Prompt],
    *,
    min_psnr: float,
    seeds: Sequence[int] = (0, 1),
    held_out: Sequence[int] = (1000, 1001, 1002),
    call: Mapping[str, Any] | None = None,
    recipe: Recipe = VISION,
    masses: Sequence[float] = MASSES,
    dense_first: Sequence[float] = DENSE_FIRST,
    order: str | None = None,
    layers: Layers = None,
    backend: str = AUTO,
    name: str = "",
    about: Mapping[str, Any] | None = None,
    state: State = None,
    done: Step = lambda what: None,
) -> Profile:
    """The sparsest profile found whose renders of held-out seeds have at least `min_psnr` dB.

    PSNR is against the pipeline's own dense render from the same noise, its mean over the held-out
    seeds of all prompts, with one standard error to spare; equal pictures count as 100 dB.
    seeds, held_out: to search and to verify on; none may be in both. recipe: precision, predictor
    and what is always kept. masses, dense_first: the values that are tried. call to backend: as in
    `compare_renders`. about: for the profile's `calibration`. state: a file of all results so far;
    the same call, also with another bound, resumes from it. done: called after every sparse render,
    with what it was.

    A profile belongs to its schedule (`schedule_of`), which `accelerate(pipe, profile=profile)`
    applies with it. Raises `TargetNotMet` if nothing sparse meets the bound.
    """
    check_psnr(min_psnr)
    _check_seeds(seeds, held_out)
    shares = _distinct(_ladder("dense_first", dense_first), (call or {}).get("num_inference_steps"))
    ladders = _ladder("masses", masses, least=0.0)[::-1], shares
    if (call or {}).get("output_type") == LATENT:
        raise ValueError("min_psnr needs pictures: output_type must not be 'latent'")
    given = checked_call(pipe, prompts, [*seeds, *held_out], call or {})
    refuse_accelerated(pipe)
    names, model = chosen_layers(pipe, layers)
    base = replace(recipe, keep=KeepMass())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    asked = {
        "model": fingerprint(model).weights,
        "dtype": dtype,
        "prompts": [inputs_digest(each.arguments) for each in given],
        "recipe": base.to_dict(),
        "order": order,
        "layers": list(names),
        "backend": backend,
        "sparge": __version__,
    }
    kept = OutputState(None if state is None else Path(state), asked)
    how = Settings(order=order, layers=layers, backend=backend)
    renderer = Renderer(pipe, given, base, how, kept, done)
    with quiet_bars(pipe), torch.no_grad():
        tried = search_levels(
            lambda mass, share: renderer.level(mass, share, seeds), *ladders, target=min_psnr
        )
        met = sorted((each for each in tried if each.psnr >= min_psnr), key=lambda x: x.density)
        checked = []
        for level in [each for each in met if each.density <= NO_GAIN][:CHECKS]:
            profile = make_profile(pipe, model, names, base, level.mass, name=name)
            verified = renderer.verify(profile, level, held_out)
            checked.append(verified)
            if verified.least >= min_psnr:
                origin = {
                    **(about or {}),
                    "schedule": Schedule(dense_first=level.dense_first).to_dict(),
                    **({} if order is None else {"order": order}),
                    "prompts": [each.caption for each in given],
                    "call": plain(call or {}),
                    "dtype": dtype,
                }
                output = {
                    "measure": PSNR,
                    "target": min_psnr,
                    "held_out": {**verified.figures, "seeds": list(held_out)},
                    "calibrated_on": {"seeds": list(seeds), "levels": [vars(x) for x in tried]},
                }
                settings = {
                    layer: of if of.heads else _with_figures(profile.default, layer, verified)
                    for layer, of in profile.layers.items()
                }
                return replace(profile, layers=settings, calibration=origin, output=output)
    raise TargetNotMet(_why_not(min_psnr, tried, met, checked))


def schedule_of(profile: Profile) -> Schedule | None:
    """The schedule that a profile of a pipeline was tuned with; None where it names none."""
    return profile.schedule


def check_psnr(min_psnr: Any) -> None:
    number = isinstance(min_psnr, int | float) and not isinstance(min_psnr, bool)
    if not number or not 0.0 < min_psnr < 100.0:
        raise ValueError(f"min_psnr must be a number of dB between 0 and 100, got {min_psnr!r}")


def _check_seeds(seeds: Sequence[int], held_out: Sequence[int]) -> None:
    if not seeds or len(held_out) < 2:
        raise ValueError(
            f"seeds needs at least 1 and held_out at least 2, for a standard error; got "
            f"{len(seeds)} and {len(held_out)}"
        )
    if both := {*seeds} & {*held_out}:
        raise ValueError(f"held_out must be other seeds than those to search on; {both} is in both")


def _ladder(name: str, values: Sequence[float], least: float = -1.0) -> list[float]:
    """Ascending, without repetitions."""
    if not values or not all(least < value < 1.0 and value >= 0.0 for value in values):
        raise ValueError(f"{name} must be numbers between 0 and 1, got {list(values)}")
    return sorted({*values})


def _distinct(shares: Sequence[float], steps: Any) -> list[float]:
    """Of shares that leave the same steps dense, the largest; all where steps are not known."""
    if not isinstance(steps, int):
        return list(shares)
    return list({math.ceil(share * steps - 1e-9): share for share in shares}.values())


def make_profile(
    pipe: Any, model: nn.Module, names: Sequence[str], base: Recipe, mass: float, *, name: str
) -> Profile:
    """The same settings in every layer; layers that were not chosen stay dense."""
    made = replace(base, keep=KeepMass(mass))
    settings = {
        each: LayerSettings() if each in names else LayerSettings(heads=(HeadSettings(),))
        for each in chosen_layers(pipe)[0]
    }
    return Profile(
        layers=settings,
        model=fingerprint(model),
        bounds=None,
        default=made,  # of all layers without settings of their own
        name=name,
        version=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    )


def _with_figures(recipe: Recipe, layer: str, verified: Verified) -> LayerSettings:
    """The recipe as settings of a layer, with what was measured of each head.

    A layer that never ran sparse has none: it runs the default recipe, and is routed by its cost.
    """
    density = verified.density.get(layer, ())
    n = len(density)
    if not n:
        return LayerSettings()
    assert isinstance(recipe.keep, KeepMass)
    fields: dict[str, Any] = {each: getattr(recipe, each) for each in RECIPE_FIELDS}
    fields["local_blocks"] = recipe.window(is_causal=False)
    values = (recipe.keep.mass, recipe.min_similarity, recipe.pv_skip)
    each = zip(
        *(value if isinstance(value, tuple) else (value,) * n for value in values),
        density,
        verified.error.get(layer, (0.0,) * n),
        strict=True,
    )
    heads = tuple(
        HeadSettings(mass, similarity, skip, density=kept, error=error)
        for mass, similarity, skip, kept, error in each
    )
    return LayerSettings(heads=heads, **fields)


def _why_not(
    target: float,
    tried: Sequence[Level],
    met: Sequence[Level],
    checked: Sequence[Verified],
) -> str:
    """The figures that stand against a bound."""
    way_out = "lower the bound, or take another precision"
    if checked:
        each = [(one.figures[PSNR], one.figures["psnr_error"]) for one in checked]
        told = ", ".join(f"{mean:.2f} ± {error:.2f} dB" for mean, error in each)
        return (
            f"{target:g} dB are met on the calibration seeds, but held-out ones have {told}; "
            f"{way_out}, or give more seeds"
        )
    if met:
        return (
            f"{target:g} dB are met at density {met[0].density:.3f} at the least, which gains "
            f"nothing; {way_out}"
        )
    best = max(tried, key=lambda level: level.psnr)
    return (
        f"{target:g} dB cannot be met by sparse attention: the best of {len(tried)} levels, "
        f"{best.words}, has {best.psnr:.2f} dB at density {best.density:.3f}; {way_out}"
    )
