"""`sparge.accelerate`: sparse attention inside other people's models, through one adapter each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from ..engine.check import check_recipe
from ..reorder import check_order
from ..routing import AUTO
from ..values.profile import Profile
from ..values.recipe import DEFAULT, VISION, Recipe
from ..values.schedule import Context, Schedule
from .adapters import Adapter, Attached, Found, find_adapter, register_adapter, unregister_adapter
from .clock import schedule_recipes
from .handle import Handle, replaced_handles
from .report import LayerReport, Report, StepReport
from .site import RecipeOf, Site, check_backend
from .tokens import Grid, GridOf, check_grid_option

__all__ = [
    "Adapter",
    "Attached",
    "Context",
    "Found",
    "Handle",
    "LayerReport",
    "Report",
    "Site",
    "StepReport",
    "accelerate",
    "register_adapter",
    "unregister_adapter",
]

Layers = Iterable[str] | Callable[[str], bool] | None
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
GridOption = Grid | tuple[int, int] | Sequence[Sequence[int]] | GridOf | None


def accelerate(
    model: Any,
    recipe: Recipe | RecipeOf | None = None,
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    backend: str = AUTO,
    layers: Layers = None,
    measure_error: bool = False,
    force: bool = False,
    schedule: Schedule | None = None,
    order: str | None = None,
    grid: GridOption = None,
    cross_attention: bool | None = None,
    protect_text: bool | None = None,
) -> Handle:
    """Let one model (or pipeline) compute its attention with sparge.

    recipe: how much to keep and in what precision, in every layer; None is `sparge.DEFAULT`, and
    `sparge.VISION` for image and video models. A function of the context
    (`handle.context(noise_level=…, step=…)`) returns a recipe for each call, or None for the
    model's own attention.
    profile: settings tuned per layer and head, a `sparge.Profile` or its file, instead of a recipe;
    with the schedule and the order that it was tuned with, where others are not given.
    layers: names of attention modules, with `*` and `?`, or a function of the name; others keep
    their own attention. measure_error: compute a few rows of every call exactly, for the report.
    force: use a profile that was tuned for another model anyway, with a warning.

    For image and video models: schedule: where in a run attention is sparse; None is
    `Schedule()` for a pipeline, which leaves the noisiest fifth dense, and every call for others.
    order: of visual tokens in attention, such as "hilbert" (the default) or "row". grid: `(T, H,
    W)` or `(H, W)` of the visual tokens where the model is not one whose tokens are known; or a
    list of grids, or a function from the number of tokens of a layer to its grid or None.
    cross_attention: True makes attention to other tokens (a text) sparse, too; dense by default.
    protect_text: False lets tokens that are not visual be skipped like others; kept by default.

    Returns a handle: `report()` says what ran, `remove()` puts the model back; it is a context
    manager too. A second call replaces the settings of the first. Raises `Unsupported` for a model
    that no adapter takes, with the reason of each.
    """
    adapter, found = find_adapter(model, cross_attention=bool(cross_attention))
    check_backend(backend)
    if recipe is not None and profile is not None:
        raise ValueError("give a recipe or a profile, not both; a profile has a recipe per layer")
    tuned = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
    if not isinstance(tuned, Profile | None):
        raise TypeError(
            f"profile must be a sparge.Profile or its file, got {type(profile).__name__}"
        )
    if tuned is not None and found.defaults:
        schedule = tuned.schedule if schedule is None else schedule
        order = tuned.calibration.get("order") if order is None else order
    given: dict[str, Any] = {"schedule": schedule, "order": order, "grid": grid}
    given |= {"cross_attention": cross_attention, "protect_text": protect_text}
    options = _options(adapter, found, given)
    names = choose_layers(list(found.modules), layers)
    recipes: dict[str, Recipe | RecipeOf | None]
    if tuned is not None:
        tuned.check(found.model, force=force)
        recipes = {name: _tuned_recipe(tuned, name) for name in names}
    else:
        usual = DEFAULT if grid is None else VISION
        recipe = found.defaults.get("recipe", usual) if recipe is None else recipe
        _check_heads({name: found.modules[name] for name in names}, recipe)
        recipes = dict.fromkeys(names, recipe)
    if (chosen := options.get("schedule")) is not None:
        recipes = schedule_recipes(recipes, chosen)
    for old in replaced_handles(found):
        old.remove()
    sites = {}
    for name in found.modules:
        why = "its settings leave it dense" if name in recipes else "not among `layers`"
        settings = (recipes.get(name), backend, measure_error)
        sites[name] = Site(name, *settings, left_out=why, follows_clock=bool(options))
    attached = adapter.attach(found, sites, **options)
    return Handle(found, recipe if isinstance(recipe, Recipe) else None, sites, attached)


def _options(adapter: Adapter, found: Found, given: dict[str, Any]) -> dict[str, Any]:
    """The options that an adapter takes, with its defaults; others must not be given."""
    takes: tuple[str, ...] = getattr(adapter, "options", ())
    for name, value in given.items():
        if value is not None and name not in takes:
            raise ValueError(
                f"{name} must be left out for {type(found.model).__name__}: the adapter of "
                f"{adapter.name} has no use for it"
            )
    schedule = given["schedule"]
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a sparge.Schedule, got {type(schedule).__name__}")
    if given["order"] is not None:
        check_order(given["order"])
    check_grid_option(given["grid"])
    chosen = {name: value for name, value in given.items() if value is not None}
    return {name: chosen.get(name, found.defaults.get(name)) for name in takes}


def choose_layers(names: list[str], layers: Layers) -> list[str]:
    """The names that `layers` chooses; a pattern or a function without any is refused."""
    if layers is None:
        return names
    if callable(layers):
        tests = {getattr(layers, "__name__", repr(layers)): layers}
    elif isinstance(layers, Iterable):
        patterns = [layers] if isinstance(layers, str) else list(layers)
        tests = {pattern: partial(fnmatchcase, pat=pattern) for pattern in patterns}
    else:
        raise TypeError(f"layers must be names or a function of a name, got {layers!r}")
    missing = [given for given, test in tests.items() if not any(map(test, names))]
    if missing or not tests:
        some = ", ".join(names[:3])
        raise ValueError(f"layers {missing} match no attention module; there are {some}, …")
    return [name for name in names if any(test(name) for test in tests.values())]


def _check_heads(modules: dict[str, nn.Module], recipe: Any) -> None:
    """Refuse a recipe with numbers for another number of heads, where a module says its own."""
    if callable(recipe) and not isinstance(recipe, type):
        return
    for name, module in modules.items():
        sizes = [getattr(module, n, None) for n in _HEADS]
        sizes.append(getattr(getattr(module, "config", None), "num_attention_heads", None))
        heads = next((size for size in sizes if isinstance(size, int)), None)
        if heads is not None or not isinstance(recipe, Recipe):
            try:
                check_recipe(recipe, heads or 1)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def _tuned_recipe(profile: Profile, name: str) -> Recipe | RecipeOf | None:
    layer = profile.layers.get(name)
    if layer is not None and layer.bands:
        return partial(_at_noise_level, profile, name)
    return profile.recipe_for(name)


def _at_noise_level(profile: Profile, layer: str, context: Context) -> Recipe | None:
    return profile.recipe_for(layer, noise=context.noise_level)
