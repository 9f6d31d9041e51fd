"""Tune a diffusers pipeline to a bound on its renders: PSNR against its own dense run.

A level is a mass that every head keeps and a share of the run, from pure noise on, that stays
dense. Less mass and a shorter dense part can only make a render worse, so the levels that meet a
bound lie on one side of a staircase, which is walked once. The result is verified on held-out
seeds; what the profile promises is what was measured there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from sparge import VISION, KeepMass, Profile, Recipe, Schedule, __version__
from sparge.models import Layers
from sparge.routing import AUTO
from sparge.values.profile import HeadSettings, LayerSettings, fingerprint
from sparge.values.recipe import heads_of

from ..renders.compare import (
    Given,
    Prompt,
    Settings,
    checked_call,
    plain,
    quiet_bars,
    refuse_accelerated,
    render,
)
from ..renders.pictures import BEST_PSNR, LATENT, METRICS, compare_pictures, mean_of, psnr
from .capture import stamp
from .layer import NO_GAIN
from .levels import settings_of
from .output_measure import OutputState
from .output_target import State, Step, TargetNotMet, check_counts
from .tracing import chosen_layers, inputs_digest

PSNR = METRICS[0]


@dataclass(frozen=True)
class Level:
    """psnr, density: means over the renders that were searched on; density of whole runs."""

    mass: float
    dense_first: float
    psnr: float
    density: float

    @property
    def words(self) -> str:
        return f"mass {self.mass:g}, dense_first {self.dense_first:g}"


@dataclass(frozen=True)
class Verified:
    """A profile on held-out seeds. figures: means, standard error and the worst.

    density, error: of every head in the sparse part of a run, by layer; the error of the worst run.
    """

    figures: Mapping[str, float]
    density: Mapping[str, Sequence[float]]
    error: Mapping[str, Sequence[float]]

    @property
    def least(self) -> float:
        """The mean PSNR with one standard error to spare."""
        return self.figures[PSNR] - self.figures["psnr_error"]


def search_levels(
    evaluate: Callable[[float, float], Level],
    masses: Sequence[float],
    dense_first: Sequence[float],
    target: float,
) -> list[Level]:
    """All levels on the way along the staircase; those that meet the target are among them.

    masses: from dense to sparse. dense_first: from short to long.
    """
    tried: list[Level] = []
    i = j = 0
    while i < len(masses) and j < len(dense_first):
        best = min((each.density for each in tried if each.psnr >= target), default=1.0)
        if best <= dense_first[j]:
            break  # a run has at least the density of its dense part
        tried.append(evaluate(masses[i], dense_first[j]))
        if tried[-1].psnr >= target:
            i += 1
        else:
            j += 1
    return tried


@dataclass
class Renderer:
    """Renders with settings and compares with the dense renders, which are kept in memory.

    base: what a setting leaves as it is. state: holds the figures of every render so far.
    """

    pipe: Any
    given: Sequence[Given]
    base: Recipe
    settings: Settings
    state: OutputState
    step: Callable[[str], None]
    _dense: dict[tuple[int, int], Any] = field(default_factory=dict)

    def level(self, mass: float, dense_first: float, seeds: Sequence[int]) -> Level:
        """A level on every prompt and seed."""
        recipe = replace(self.base, keep=KeepMass(mass))
        settings = replace(self.settings, recipe=recipe, schedule=Schedule(dense_first=dense_first))
        words = f"mass {mass:g} dense_first {dense_first:g}"
        found = self._on_all(words, settings, seeds, figures=(PSNR,))
        level_psnr, density = (mean(each[of] for each in found) for of in (PSNR, "density"))
        return Level(mass, dense_first, level_psnr, density)

    def verify(self, profile: Profile, level: Level, seeds: Sequence[int]) -> Verified:
        """A profile as its users run it, on held-out seeds."""
        settings = replace(
            self.settings,
            profile=profile,
            schedule=Schedule(dense_first=level.dense_first),
            layers=None,
            measure_error=True,
        )
        found = self._on_all(f"profile of {level.words}", settings, seeds, figures=METRICS)
        each = [one[PSNR] for one in found]
        figures = {
            **{name: mean(one[name] for one in found) for name in METRICS},
            "psnr_error": stdev(each) / math.sqrt(len(each)),
            "psnr_worst": min(each),
            "density": mean(one["density"] for one in found),
            "renders": len(found),
        }
        density = _over_runs([one["heads"] for one in found], mean)
        return Verified(figures, density, _over_runs([one["errors"] for one in found], max))

    def _on_all(
        self, words: str, settings: Settings, seeds: Sequence[int], figures: Sequence[str]
    ) -> list[dict[str, Any]]:
        return [
            self.state.once(
                f"{words} prompt {i} seed {seed}",
                partial(self._measure, words, settings, i, seed, figures),
            )
            for i in range(len(self.given))
            for seed in seeds
        ]

    def _measure(
        self, words: str, settings: Settings, i: int, seed: int, figures: Sequence[str]
    ) -> dict[str, Any]:
        if (i, seed) not in self._dense:
            self._dense[i, seed] = self._frames(i, seed)
        dense = self._dense[i, seed]
        with settings.accelerate(self.pipe) as handle:
            sparse = self._frames(i, seed)
            report = handle.report()
        if tuple(figures) == (PSNR,):
            pairs = zip(dense, sparse, strict=True)
            told = {PSNR: mean_of([psnr(one, other) for one, other in pairs])}
        else:
            told = compare_pictures(dense, sparse)
        best = min(told[PSNR], BEST_PSNR)
        self.step(f"{words}, seed {seed}: {best:.2f} dB, {self.given[i].caption}")
        heads = {layer.name: layer.density_by_head for layer in report.layers}
        errors = {layer.name: layer.error_by_head for layer in report.layers}
        return {
            **{name: told[name] for name in figures},
            PSNR: best,
            "density": report.density,
            "heads": {layer: list(of) for layer, of in heads.items() if of},
            "errors": {layer: list(of) for layer, of in errors.items() if of},
        }

    def _frames(self, i: int, seed: int) -> Any:
        done = render(self.pipe, self.given[i].arguments, seed)
        if done.why_no_frames:
            raise ValueError(f"min_psnr needs pictures: {done.why_no_frames}")
        return done.frames


def _over_runs(
    runs: Sequence[Mapping[str, Sequence[float]]], of: Callable[[Sequence[float]], float]
) -> dict[str, list[float]]:
    """A figure of every head by layer, over the runs that have the layer."""
    names = dict.fromkeys(name for run in runs for name in run)
    each = {name: [run[name] for run in runs if name in run] for name in names}
    return {name: [of(head) for head in zip(*rows, strict=True)] for name, rows in each.items()}


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
    check_counts("seeds", seeds, held_out)
    if both := {*seeds} & {*held_out}:
        raise ValueError(f"held_out must be other seeds than those to search on; {both} is in both")
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
    kept = OutputState(state, asked)
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
        **stamp(),
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
    settings = settings_of(recipe, heads_of(recipe.keep.mass, n), is_causal=False)
    measured = zip(settings.heads, density, verified.error.get(layer, (0.0,) * n), strict=True)
    heads = tuple(replace(head, density=kept, error=error) for head, kept, error in measured)
    return replace(settings, heads=heads)


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
