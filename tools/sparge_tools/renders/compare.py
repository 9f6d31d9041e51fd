"""A pipeline or a module of the zoo run twice, with its own attention and with sparge: the pairs of
renders from the same noise, and how they differ.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparge import VISION, Profile, Recipe, Schedule, accelerate
from sparge.models import Handle, Report
from sparge.models.site import site_of
from sparge.routing import AUTO
from sparge.support.turns import timer

from ..zoo import ZooModule
from .pictures import LOWER_IS_BETTER, METRICS, compare_pictures, frames_of, mean_of

FORMAT = "sparge.renders/1"
ERRORS = (*LOWER_IS_BETTER, "latent_error", "relative_l2", "largest_error")
"""Figures of which less is better."""


@dataclass(frozen=True, eq=False)
class Pair:
    """One input, computed by the model's own attention and with sparge, from the same noise.

    figures: how the results differ, by name; an infinite psnr is of equal pictures.
    latent_errors: relative L2 of the latents after each step. dense, sparse: the pictures, uint8
    `[T, H, W, 3]`; None where there are none. missing: what could not be measured, and why.
    report: of the sparse run.
    """

    caption: str
    seed: int | None
    dense_seconds: float
    sparse_seconds: float
    figures: Mapping[str, float]
    report: Report
    dense: Any = None
    sparse: Any = None
    latent_errors: tuple[float, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_identical(self) -> bool | None:
        """Whether all pixels are equal; None without pictures."""
        return None if self.dense is None else bool((self.dense == self.sparse).all())

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.sparse_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the pictures. An infinite psnr becomes null in JSON; `is_identical`
        tells it from one that is missing."""
        return {
            "caption": self.caption,
            "seed": self.seed,
            "dense_seconds": self.dense_seconds,
            "sparse_seconds": self.sparse_seconds,
            "speedup": self.speedup,
            "density": self.report.density,
            "sparse_density": self.report.sparse_density,
            "figures": dict(self.figures),
            "is_identical": self.is_identical,
            "frames": None if self.dense is None else len(self.dense),
            "latent_errors": list(self.latent_errors),
            "missing": dict(self.missing),
            "fallbacks": dict(self.report.fallbacks),
            "steps": step_densities(self.report),
        }


@dataclass(frozen=True, eq=False)
class Renders:
    """The pairs of one model with one setting. metric: the figure that decides."""

    model: str
    about: str
    metric: str
    pairs: tuple[Pair, ...]
    settings: Mapping[str, Any]

    def values(self, figure: str) -> list[float]:
        return [pair.figures[figure] for pair in self.pairs if figure in pair.figures]

    def mean(self, figure: str) -> float | None:
        """Over the pairs that have it; None if none has. See `mean_of` for infinite ones."""
        values = self.values(figure)
        return mean_of(values) if values else None

    def worst(self, figure: str) -> float | None:
        """Of one pair."""
        values = self.values(figure)
        if not values:
            return None
        return max(values) if figure.removesuffix("_worst") in ERRORS else min(values)

    @property
    def figures(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair.figures))

    @property
    def density(self) -> float:
        return sum(pair.report.density for pair in self.pairs) / len(self.pairs)

    @property
    def sparse_density(self) -> float:
        """Of the calls that ran sparse."""
        return sum(pair.report.sparse_density for pair in self.pairs) / len(self.pairs)

    @property
    def speedup(self) -> float:
        """The median over pairs."""
        return median(pair.speedup for pair in self.pairs)

    @property
    def fallbacks(self) -> dict[str, int]:
        return dict(sum((Counter(pair.report.fallbacks) for pair in self.pairs), Counter()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "about": self.about,
            "metric": self.metric,
            "settings": dict(self.settings),
            "density": self.density,
            "sparse_density": self.sparse_density,
            "speedup": self.speedup,
            "figures": {
                name: {"mean": self.mean(name), "worst": self.worst(name)} for name in self.figures
            },
            "notes": list(dict.fromkeys(note for p in self.pairs for note in p.report.notes)),
            "pairs": [pair.to_dict() for pair in self.pairs],
        }


def step_densities(report: Report) -> dict[str, Any]:
    """Density by layer × step, and by layer × step × head where a step ran sparse."""
    steps = sorted({each.step for layer in report.layers for each in layer.by_step})
    noise: dict[int, float | None] = {}
    layers: list[list[float | None]] = []
    heads: list[list[list[float] | None]] = []
    for layer in report.layers:
        at = {each.step: each for each in layer.by_step}
        noise |= {step: each.noise_level for step, each in at.items()}
        layers.append([round(at[s].density, 4) if s in at else None for s in steps])
        heads.append([_rounded(at[s].density_by_head) if s in at else None for s in steps])
    return {
        "steps": steps,
        "noise_levels": [noise[step] for step in steps],
        "layers": [layer.name for layer in report.layers],
        "density": layers,
        "density_by_head": heads,
        "density_by_step": list(report.density_by_step.values()),
    }


def _rounded(values: Sequence[float]) -> list[float] | None:
    return [round(value, 4) for value in values] or None


def decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.2f}"


Result = TypeVar("Result")
Prompt = str | Mapping[str, Any]
"""A prompt, or other arguments of the pipeline, such as `{"class_labels": [7]}`."""
STEP_END, STEP_END_OLD = "callback_on_step_end", "callback"
PICTURES = ", ".join(METRICS)
NO_CALLBACK = "this pipeline has no callback at the end of a step that is given the latents"


@dataclass(frozen=True)
class Settings:
    """The options of `sparge.accelerate` for the sparse runs; see there."""

    recipe: Recipe | None = None
    profile: Profile | None = None
    schedule: Schedule | None = None
    order: str | None = None
    grid: Any = None
    layers: Any = None
    backend: str = AUTO
    measure_error: bool = False

    def accelerate(self, model: Any) -> Handle:
        return accelerate(model, **vars(self))

    def to_dict(self) -> dict[str, Any]:
        """For documents; what is None is the default of `accelerate`."""
        return {
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
            "profile": None if self.profile is None else self.profile.name or "given",
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
            "order": self.order,
            "backend": self.backend,
        }


@dataclass(frozen=True)
class Given:
    """One prompt: a name for it, and all arguments of the pipeline but noise and callbacks."""

    caption: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """One run. frames: None where there are no pictures, and `why_no_frames`."""

    seconds: float
    frames: Any
    why_no_frames: str
    latents: list[Tensor] = field(default_factory=list)
    why_no_latents: str = ""


def compare_renders(
    pipe: Any,
    prompts: Sequence[Prompt],
    *,
    seeds: Sequence[int] = (0,),
    call: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    profile: Profile | None = None,
    schedule: Schedule | None = None,
    order: str | None = None,
    layers: Any = None,
    backend: str = AUTO,
    warm_up: bool = True,
    name: str = "",
    done: Callable[[str], None] = lambda what: None,
) -> Renders:
    """Run a diffusers pipeline on every prompt and seed, dense and sparse, and compare.

    Dense runs are those of the plain pipeline, with its own kernels. call: arguments of every call,
    such as `num_inference_steps`, `height` and `output_type`. recipe to backend: as in
    `sparge.accelerate`. warm_up: run both for two steps first, not timed. done: called before each
    run, with what it is.

    Raises ValueError for arguments that the pipeline does not take, and for one that is accelerated
    already. Latents or pictures that a pipeline does not give are `missing` in its pairs, with why.
    """
    settings = Settings(recipe, profile, schedule, order, None, layers, backend)
    given = checked_call(pipe, prompts, seeds, call or {})
    refuse_accelerated(pipe)
    with quiet_bars(pipe), torch.no_grad():
        if warm_up:
            done("warming up")
            run_warm_up(pipe, given[0].arguments, settings)
        pairs = []
        for i, (each, seed) in enumerate((each, seed) for each in given for seed in seeds):
            pairs.append(_compare(pipe, each, seed, settings, done, sparse_first=i % 2 == 1))
    told = {**settings.to_dict(), "call": plain(call or {}), "seeds": list(seeds)}
    about = "renders against this pipeline's own dense run, from the same noise"
    return Renders(name or type(pipe).__name__, about, "psnr", tuple(pairs), told)


def _compare(
    pipe: Any,
    given: Given,
    seed: int,
    settings: Settings,
    done: Callable[[str], None],
    *,
    sparse_first: bool,
) -> Pair:
    caption, arguments = given.caption, given.arguments
    dense, sparse, report = _both_ways(
        lambda: render(pipe, arguments, seed),
        lambda: settings.accelerate(pipe),
        lambda way: done(f"{way}, seed {seed}: {caption}"),
        sparse_first=sparse_first,
    )
    figures: dict[str, float] = {}
    missing: dict[str, str] = {}
    pictures: tuple[Any, Any] = (None, None)
    if why := dense.why_no_frames or sparse.why_no_frames:
        missing[PICTURES] = why
    else:
        pictures = dense.frames, sparse.frames
        figures |= compare_pictures(*pictures)
    if why := dense.why_no_latents:
        missing["latent_errors"] = why
    errors = latent_errors(dense.latents, sparse.latents)
    if errors:
        figures["latent_error"] = errors[-1]
    seconds = dense.seconds, sparse.seconds
    return Pair(caption, seed, *seconds, figures, report, *pictures, errors, missing)


def _both_ways(
    run: Callable[[], Result],
    accelerated: Callable[[], Handle],
    say: Callable[[str], None],
    *,
    sparse_first: bool,
) -> tuple[Result, Result, Report]:
    """Results of a dense and of a sparse run, and the report of the sparse one.

    The order alternates from pair to pair, so that neither always runs on the warmer machine.
    """
    found: dict[str, Result] = {}
    for way in ("sparse", "dense") if sparse_first else ("dense", "sparse"):
        say(way)
        if way == "dense":
            found[way] = run()
        else:
            with accelerated() as handle:
                found[way], report = run(), handle.report()
    return found["dense"], found["sparse"], report


def render(pipe: Any, arguments: Mapping[str, Any], seed: int) -> Rendered:
    """Run a pipeline with a seed, as it is now, and keep its pictures and the latents of steps."""
    latents: list[Tensor] = []
    extra, why = _callback(pipe, latents)
    generator = torch.Generator("cpu").manual_seed(seed)
    given = {"output_type": "np", **arguments, **extra, "generator": generator}
    device: Any = getattr(pipe, "_execution_device", None) or getattr(pipe, "device", "cpu")
    seconds, output = timer(torch.device(device).type)(lambda: pipe(**given))
    frames, why_no_frames = frames_of(output, str(given["output_type"]))
    return Rendered(seconds, frames, why_no_frames, latents, why)


def _callback(pipe: Any, latents: list[Tensor]) -> tuple[dict[str, Any], str]:
    """Arguments with which a pipeline hands out its latents after each step; or why it cannot."""
    takes = parameters_of(pipe)

    def keep(*given: Any) -> Any:
        """The last argument: a dict of tensors, or of an older pipeline the latents."""
        last = given[-1]
        found: Tensor = last["latents"] if isinstance(last, dict) else last
        latents.append(found.detach().float().cpu())
        return last

    if STEP_END in takes and "latents" in getattr(pipe, "_callback_tensor_inputs", ["latents"]):
        return {STEP_END: keep}, ""
    if STEP_END_OLD in takes and f"{STEP_END_OLD}_steps" in takes:
        return {STEP_END_OLD: keep, f"{STEP_END_OLD}_steps": 1}, ""
    return {}, NO_CALLBACK


def latent_errors(dense: Sequence[Tensor], sparse: Sequence[Tensor]) -> tuple[float, ...]:
    """Relative L2 after each step."""
    found = []
    for one, other in zip(dense, sparse, strict=False):
        wrong, size = (other.double() - one.double()).norm().item(), one.double().norm().item()
        found.append(wrong / size if size else float(wrong > 0))
    return tuple(found)


def run_warm_up(pipe: Any, arguments: Mapping[str, Any], settings: Settings) -> None:
    """Two steps of each way: starts threads, and calibrates the machine if that is needed."""
    if not {"sigmas", "timesteps"} & {*arguments} and "num_inference_steps" in parameters_of(pipe):
        arguments = {**arguments, "num_inference_steps": 2}
    render(pipe, arguments, 0)
    with settings.accelerate(pipe):
        render(pipe, arguments, 0)


def checked_call(
    pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], call: Mapping[str, Any]
) -> list[Given]:
    """The arguments for every prompt; refuses what the pipeline does not take."""
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts must be a list of at least one prompt, got {prompts!r}")
    if not seeds:
        raise ValueError("seeds must have at least one seed, got none")
    takes = parameters_of(pipe)
    given = [{"prompt": each} if isinstance(each, str) else dict(each) for each in prompts]
    reserved = {"generator", STEP_END, STEP_END_OLD, "return_dict"}
    for name in dict.fromkeys(name for each in (*given, call) for name in each):
        if name in reserved:
            raise ValueError(f"{name} must be left out: comparing renders gives it itself")
        if name not in takes:
            known = ", ".join(each for each in takes if each not in reserved)
            raise ValueError(f"{type(pipe).__name__} takes no {name}; it takes {known}")
    return [Given(_caption(each), {**call, **each}) for each in given]


def parameters_of(pipe: Any) -> dict[str, inspect.Parameter]:
    """The arguments that a pipeline takes, by name."""
    return dict(inspect.signature(pipe.__call__).parameters)


def refuse_accelerated(model: Any) -> None:
    """Raise ValueError if the dense runs of a model or pipeline would not be its own."""
    parts = getattr(model, "components", {"": model}).values()
    for module in (m for part in parts if isinstance(part, nn.Module) for m in part.modules()):
        site = site_of(module)
        if site is not None and (handle := site.holder()) is not None:
            raise ValueError(f"{handle!r} is active; remove() it first: dense runs must be dense")


def _caption(prompt: Mapping[str, Any]) -> str:
    told = plain(prompt)
    return str(told.pop("prompt", "") or ", ".join(f"{name} {x}" for name, x in told.items()))


def plain(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a document: numbers and words as they are, tensors by their shape."""
    words = (str, int, float, bool, list, tuple, type(None))
    return {name: x if isinstance(x, words) else _shape(x) for name, x in call.items()}


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" {list(shape)}")


@contextmanager
def quiet_bars(pipe: Any) -> Iterator[None]:
    """Without the pipeline's own progress bar, which would be drawn over ours."""
    had = dict(getattr(pipe, "_progress_bar_config", {}))
    hide = getattr(pipe, "set_progress_bar_config", None)
    if hide is not None:
        hide(**{**had, "disable": True})
    try:
        yield
    finally:
        if hide is not None:
            hide(**{"disable": False, **had})


def compare_results(
    loaded: ZooModule,
    *,
    inputs: int = 4,
    seed: int = 0,
    recipe: Recipe | None = None,
    profile: Any = None,
    order: str | None = None,
    layers: Any = None,
    backend: str = AUTO,
    warm_up: bool = True,
    done: Callable[[str], None] = lambda what: None,
) -> Renders:
    """Run the task of a module on some inputs, dense and sparse, and compare by its own figures.

    loaded: of `zoo.load_module`. inputs, seed: how many inputs, and which. recipe to backend: as in
    `sparge.accelerate`; the grids of the module are given to it. Without a recipe and a profile
    the module runs `VISION`. done: called before each run.
    """
    task, model = loaded.task, loaded.model
    if recipe is None and profile is None:
        recipe = VISION
    given = task.inputs(inputs, seed)
    refuse_accelerated(model)
    settings = Settings(recipe, profile, None, order, loaded.grids, layers, backend)
    timed = timer(next(model.parameters()).device.type)
    pairs = []
    with torch.no_grad():
        if warm_up:
            done("warming up")
            task.run(model, given[0])
            with settings.accelerate(model):
                task.run(model, given[0])
        for i, each in enumerate(given):
            caption = task.caption(each)
            (dense_seconds, dense), (sparse_seconds, sparse), report = _both_ways(
                partial(timed, partial(task.run, model, each)),
                lambda: settings.accelerate(model),
                lambda way, caption=caption: done(f"{way}: {caption}"),  # type: ignore[misc]
                sparse_first=i % 2 == 1,
            )
            pictures = [task.picture(each, result) for result in (dense, sparse)]
            one, other = (None if picture is None else picture[None] for picture in pictures)
            seconds, figures = (dense_seconds, sparse_seconds), task.compare(dense, sparse)
            pairs.append(Pair(caption, None, *seconds, figures, report, one, other))
    told = {**settings.to_dict(), "inputs": inputs, "seed": seed}
    return Renders(loaded.name, task.about, task.metric, tuple(pairs), told)
