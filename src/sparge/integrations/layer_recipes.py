"""Which layers of a model are accelerated, and with which recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from ..check import check_recipe
from ..profile import Profile
from ..recipe import DEFAULT, Recipe
from .adapters import Found
from .context import Context
from .site import RecipeOf

Layers = Iterable[str] | Callable[[str], bool] | None


def chosen_layers(names: Iterable[str], layers: Layers) -> set[str]:
    """The names that `layers` chooses; a pattern or a function without any is refused."""
    if layers is None:
        return set(names)
    some = ", ".join(list(names)[:3])
    if callable(layers):
        chosen = {name for name in names if layers(name)}
        missing = [] if chosen else [getattr(layers, "__name__", repr(layers))]
    elif isinstance(layers, Iterable):
        patterns = [layers] if isinstance(layers, str) else list(layers)
        found = {p: {name for name in names if fnmatchcase(name, p)} for p in patterns}
        chosen = set().union(*found.values())
        missing = [pattern for pattern in patterns if not found[pattern]] if patterns else ["[]"]
    else:
        raise TypeError(f"layers must be names or a function of a name, got {layers!r}")
    if missing:
        raise ValueError(f"layers {missing} match no attention module; there are {some}, …")
    return chosen


def recipes_for(
    found: Found, names: Sequence[str], recipe: Any, profile: Any, *, force: bool
) -> Mapping[str, Recipe | RecipeOf | None]:
    """The recipe of each of these layers, checked against the model."""
    if recipe is not None and profile is not None:
        raise ValueError("give a recipe or a profile, not both; a profile has a recipe per layer")
    if profile is not None:
        return _recipes_of_profile(found.model, names, profile, force=force)
    recipe = DEFAULT if recipe is None else recipe
    if isinstance(recipe, type) or not callable(recipe):
        for name in names:
            heads = _heads_of(found.modules[name])
            if heads is not None or not isinstance(recipe, Recipe):
                try:
                    check_recipe(recipe, heads or 1)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
    return dict.fromkeys(names, recipe)


def _recipes_of_profile(
    model: nn.Module, names: Sequence[str], profile: Any, *, force: bool
) -> Mapping[str, Recipe | RecipeOf | None]:
    tuned = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
    if not isinstance(tuned, Profile):
        raise TypeError(
            f"profile must be a sparge.Profile or its file, got {type(profile).__name__}"
        )
    tuned.check(model, force=force)
    banded = {name for name in names if name in tuned.layers and tuned.layers[name].bands}
    return {
        name: partial(_at_noise_level, tuned, name) if name in banded else tuned.recipe_for(name)
        for name in names
    }


def _at_noise_level(profile: Profile, layer: str, context: Context) -> Recipe | None:
    return profile.recipe_for(layer, noise=context.noise_level)


def _heads_of(module: nn.Module) -> int | None:
    """Query heads of an attention module, where it says them."""
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if isinstance(number := getattr(module, name, None), int):
            return number
    number = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return number if isinstance(number, int) else None
