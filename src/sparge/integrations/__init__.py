"""`sparge.accelerate`: sparse attention inside other people's models, through one adapter each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from ..check import check_recipe
from ..dispatch import AUTO, DENSE, backends
from ..profile import Profile
from ..recipe import DEFAULT, Recipe
from .adapters import Adapter, Found, find_adapter, register_adapter, unregister_adapter
from .handle import Handle, replaced_handles
from .report import LayerReport, Report
from .site import Context, RecipeOf, Site

__all__ = [
    "Adapter",
    "Context",
    "Found",
    "Handle",
    "LayerReport",
    "Report",
    "Site",
    "accelerate",
    "register_adapter",
    "unregister_adapter",
]

Layers = Iterable[str] | Callable[[str], bool] | None


def accelerate(
    model: Any,
    recipe: Recipe | RecipeOf | None = None,
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    backend: str = AUTO,
    layers: Layers = None,
    measure_error: bool = False,
    force: bool = False,
) -> Handle:
    """Let one model (or pipeline) compute its attention with sparge.

    recipe: how much to keep and in what precision, in every layer; None is the default recipe. A
    function of the context (`handle.context(noise_level=…, step=…)`) returns a recipe for each
    call, or None for the model's own attention.
    profile: settings tuned per layer and head, a `sparge.Profile` or its file, instead of a recipe.
    layers: names of attention modules, with `*` and `?`, or a function of the name; others keep
    their own attention. measure_error: compute a few rows of every call exactly, for the report.
    force: use a profile that was tuned for another model anyway, with a warning.

    Returns a handle: `report()` says what ran, `remove()` puts the model back; it is a context
    manager too. A second call replaces the settings of the first. Raises `Unsupported` for a model
    that no adapter takes, with the reason of each.
    """
    adapter, found = find_adapter(model)
    known = (AUTO, DENSE, *(each.name for each in backends()))
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}; got {backend!r}")
    if recipe is not None and profile is not None:
        raise ValueError("give a recipe or a profile, not both; a profile has a recipe per layer")
    names = _chosen_layers(list(found.modules), layers)
    recipes: dict[str, Recipe | RecipeOf | None]
    if profile is not None:
        recipe, recipes = None, _recipes_of_profile(found.model, names, profile, force=force)
    else:
        recipe = DEFAULT if recipe is None else recipe
        _check_heads({name: found.modules[name] for name in names}, recipe)
        recipes = dict.fromkeys(names, recipe)
    for old in replaced_handles(found):
        old.remove()
    sites = {}
    for name in found.modules:
        why = "its settings leave it dense" if name in recipes else "not among `layers`"
        sites[name] = Site(name, recipes.get(name), backend, measure_error, left_out=why)
    undo = adapter.attach(found, sites)
    return Handle(found, recipe if isinstance(recipe, Recipe) else None, sites, undo)


def _chosen_layers(names: list[str], layers: Layers) -> list[str]:
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
    missing = [told for told, test in tests.items() if not any(map(test, names))]
    if missing or not tests:
        some = ", ".join(names[:3])
        raise ValueError(f"layers {missing} match no attention module; there are {some}, …")
    return [name for name in names if any(test(name) for test in tests.values())]


def _check_heads(modules: dict[str, nn.Module], recipe: Any) -> None:
    """Refuse a recipe with numbers for another number of heads, where a module says its own."""
    if callable(recipe) and not isinstance(recipe, type):
        return
    for name, module in modules.items():
        sizes = [getattr(module, n, None) for n in ("num_heads", "num_attention_heads", "n_heads")]
        sizes.append(getattr(getattr(module, "config", None), "num_attention_heads", None))
        heads = next((size for size in sizes if isinstance(size, int)), None)
        if heads is not None or not isinstance(recipe, Recipe):
            try:
                check_recipe(recipe, heads or 1)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def _recipes_of_profile(
    model: nn.Module, names: list[str], profile: Any, *, force: bool
) -> dict[str, Recipe | RecipeOf | None]:
    tuned = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
    if not isinstance(tuned, Profile):
        came = type(profile).__name__
        raise TypeError(f"profile must be a sparge.Profile or its file, got {came}")
    tuned.check(model, force=force)
    banded = {name for name, layer in tuned.layers.items() if layer.bands}
    return {
        name: partial(_at_noise_level, tuned, name) if name in banded else tuned.recipe_for(name)
        for name in names
    }


def _at_noise_level(profile: Profile, layer: str, context: Context) -> Recipe | None:
    return profile.recipe_for(layer, noise=context.noise_level)
