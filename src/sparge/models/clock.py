"""Where in a diffusion run a model is: set once per step, followed by every site.

A clock is turned outside of compiled graphs, between two steps, and changes attributes that graphs
compare: they hold one variant for each recipe. Asking in every call would trace them for each step.

In a pipeline its scheduler turns it: `set_timesteps` begins a run and `step` ends a step.
Image-to-image runs begin later: `set_begin_index` says where, or the timestep of the first
`scale_model_input`. Those that a scheduler has are replaced on the instance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..values.recipe import Recipe
from ..values.schedule import Context, Schedule
from .replacement import Replacement
from .site import RecipeOf, Site

NO_POSITION = (
    "its schedule does not know the step: call the pipeline, or the model inside "
    "handle.context(progress=…, noise_level=…)"
)
BY_SCHEDULE = "its schedule keeps this part of the run dense"
DENSE_LAYER = "its schedule keeps this layer dense"
BEGINS, STEPS = "set_timesteps", "step"
SETS_BEGIN, SCALES = "set_begin_index", "scale_model_input"


@dataclass(frozen=True)
class Scheduled:
    """The recipe of a site by its schedule: a function of the context."""

    schedule: Schedule
    recipe: Recipe | RecipeOf | None
    dense_layer: bool = False

    def __call__(self, context: Context) -> Recipe | None:
        position = self.schedule.position(context)
        if self.dense_layer or position is None:
            return None
        given = self.recipe(context) if callable(self.recipe) else self.recipe
        return self.schedule.recipe_at(position, given)

    def why_dense(self, context: Context) -> str:
        if self.dense_layer:
            return DENSE_LAYER
        return BY_SCHEDULE if self.schedule.position(context) is not None else NO_POSITION


def known_recipes(recipe: Recipe | RecipeOf | None) -> tuple[Recipe, ...]:
    """The recipes that a site may come to use; those of a function are not known."""
    if isinstance(recipe, Scheduled):
        if recipe.dense_layer:
            return ()
        if bands := recipe.schedule.bands:
            return tuple(banded for _, _, banded in bands if banded is not None)
        return known_recipes(recipe.recipe)
    return (recipe,) if isinstance(recipe, Recipe) else ()


class Clock:
    """The context of one handle, and who follows it."""

    def __init__(self, sites: Iterable[Site], followers: Iterable[Callable[[], None]] = ()) -> None:
        self.sites, self.followers = list(sites), list(followers)
        self.turn_to(Context())

    def turn_to(self, context: Context) -> None:
        self.context = context
        for site in self.sites:
            site.turn_to(context)
            if isinstance(site.recipe, Scheduled):
                site.left_out = site.recipe.why_dense(context)
        for follow in self.followers:
            follow()

    @contextmanager
    def inside(self, context: Context) -> Iterator[None]:
        before = self.context
        self.turn_to(context)
        try:
            yield
        finally:
            self.turn_to(before)


def schedule_recipes(
    recipes: dict[str, Recipe | RecipeOf | None], schedule: Schedule
) -> dict[str, Recipe | RecipeOf | None]:
    """The recipe of every layer by a schedule; layers are counted by the block they are in."""
    blocks = list(dict.fromkeys(map(_block_of, recipes)))
    if schedule.dense_first_layers + schedule.dense_last_layers > len(blocks):
        raise ValueError(
            f"dense_first_layers and dense_last_layers must be at most {len(blocks)} together, the "
            f"number of blocks; got {schedule.dense_first_layers} and {schedule.dense_last_layers}"
        )
    return {
        name: recipe
        and Scheduled(
            schedule, recipe, schedule.is_dense_layer(blocks.index(_block_of(name)), len(blocks))
        )
        for name, recipe in recipes.items()
    }


def _block_of(name: str) -> str:
    """The innermost numbered part that a module is in, itself included; or the part around it."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts) or name.rpartition(".")[0]


class SchedulerClock:
    """Turns a clock by a scheduler's steps, until `stop()`."""

    def __init__(self, scheduler: Any, clock: Clock) -> None:
        self.scheduler, self.clock, self.done, self.begin = scheduler, clock, 0, 0
        names = [name for name in (SETS_BEGIN, SCALES) if hasattr(scheduler, name)]
        self.watched = [_Watched(self, name) for name in (BEGINS, STEPS, *names)]
        for method in self.watched:
            method.install()

    def stop(self) -> None:
        for method in self.watched:
            method.restore()
        self.clock.turn_to(Context())

    def note(self, name: str, timestep: Any) -> None:
        if name == BEGINS:
            self.done, self.begin = 0, 0
        elif name == STEPS:
            self.done += 1
        elif self.done:
            return  # a run has begun where it has
        index = getattr(self.scheduler, "begin_index", None)
        if index is not None:
            self.begin = index
        elif name == SCALES:
            self.begin = _index_of(self.scheduler, timestep)
        self.clock.turn_to(context_of(self.scheduler, self.begin, self.done))


class _Watched(Replacement):
    """A method of a scheduler, after each call of which its clock is turned."""

    def __init__(self, turner: SchedulerClock, name: str) -> None:
        super().__init__(turner.scheduler, name)
        self.turner = turner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.method()(*args, **kwargs)
        if self.active:
            self.turner.note(self.name, args[1] if len(args) > 1 else kwargs.get("timestep"))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A pipeline may copy its scheduler for another modality, which must not turn the clock.
        copied = memo.get(id(self.owner), self.owner)
        if copied is self.owner:
            return self
        before = copy.deepcopy(self.before, memo)
        return before or getattr(type(copied), self.name).__get__(copied)


def _index_of(scheduler: Any, timestep: Any) -> int:
    """Where a timestep stands in the run; 0 if it does not."""
    if timestep is None:
        return 0
    at = float(timestep)
    return next((i for i, step in enumerate(scheduler.timesteps) if float(step) == at), 0)


def context_of(scheduler: Any, begin: int, done: int) -> Context:
    """The context of the step that follows `done` steps of a run; empty where none follows.

    begin: the index of the first step of the run. Shares are of the steps that it takes.
    """
    timesteps, at = getattr(scheduler, "timesteps", None), begin + done
    if timesteps is None or at >= len(timesteps):
        return Context()
    progress = done / (len(timesteps) - begin)
    return Context(noise_level=noise_level(scheduler, at), step=done, progress=progress)


def noise_level(scheduler: Any, at: int) -> float | None:
    """Share of noise at a step: timestep / training timesteps, the sigma of flow matching."""
    config = scheduler.config
    sigma_data = getattr(config, "sigma_data", None)
    if sigma_data is not None and len(sigmas := getattr(scheduler, "sigmas", ())) > at:
        sigma = float(sigmas[at])  # its timesteps are logarithms of sigma
        level = sigma / (sigma + sigma_data)
    elif training := getattr(config, "num_train_timesteps", None):
        level = float(scheduler.timesteps[at]) / training
    else:
        return None
    return float(min(max(level, 0.0), 1.0))
