"""A pipeline run twice from the same noise: with its own attention, and with sparge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparge import Profile, Recipe, Schedule, accelerate
from sparge.models import Handle
from sparge.models.site import site_of
from sparge.routing import AUTO
from sparge.support.turns import timer

from .media import frames_of
from .picture_metrics import METRICS, compare_pictures
from .result import Pair, Renders

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
    runs: dict[str, Rendered] = {}
    report = None
    # The order alternates from pair to pair, so that neither always runs on the warmer machine.
    for way in ("sparse", "dense") if sparse_first else ("dense", "sparse"):
        done(f"{way}, seed {seed}: {caption}")
        if way == "dense":
            runs[way] = render(pipe, arguments, seed)
            continue
        with settings.accelerate(pipe) as handle:
            runs[way] = render(pipe, arguments, seed)
            report = handle.report()
    assert report is not None
    dense, sparse = runs["dense"], runs["sparse"]
    figures: dict[str, float] = {}
    missing: dict[str, str] = {}
    if why := dense.why_no_frames or sparse.why_no_frames:
        missing[PICTURES] = why
    else:
        figures |= compare_pictures(dense.frames, sparse.frames)
    if why := dense.why_no_latents:
        missing["latent_errors"] = why
    errors = latent_errors(dense.latents, sparse.latents)
    if errors:
        figures["latent_error"] = errors[-1]
    shown = PICTURES not in missing
    return Pair(
        caption=caption,
        seed=seed,
        dense_seconds=dense.seconds,
        sparse_seconds=sparse.seconds,
        figures=figures,
        report=report,
        dense=dense.frames if shown else None,
        sparse=sparse.frames if shown else None,
        latent_errors=errors,
        missing=missing,
    )


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

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].detach().float().cpu())
        return tensors

    def keep_old(step: int, timestep: Any, given: Tensor) -> None:
        latents.append(given.detach().float().cpu())

    if STEP_END in takes and "latents" in getattr(pipe, "_callback_tensor_inputs", ["latents"]):
        return {STEP_END: keep}, ""
    if STEP_END_OLD in takes and f"{STEP_END_OLD}_steps" in takes:
        return {STEP_END_OLD: keep_old, f"{STEP_END_OLD}_steps": 1}, ""
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
