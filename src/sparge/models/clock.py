"""Where in a diffusion run a model is: set once per step, followed by every site.

The alternative, to ask in every call, would break compiled graphs: they would be traced again for
every step, or leave the graph to ask. A clock is turned outside of them, between two steps, and
changes attributes that graphs compare: they hold one variant for each recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..values.recipe import Recipe
from ..values.schedule import Context, Schedule
from .site import RecipeOf, Site

NO_POSITION = (
    "its schedule does not know the step: call the pipeline, or the model inside "
    "handle.context(progress=…, noise_level=…)"
)
BY_SCHEDULE = "its schedule keeps this part of the run dense"
DENSE_LAYER = "its schedule keeps this layer dense"


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
            return tuple(each for _, _, each in bands if each is not None)
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
