"""Which layers of a model are accelerated, and with which recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..check import check_recipe
from ..profile import Profile
from ..recipe import DEFAULT, Recipe
from .adapters import Found
from .context import Context
from .site import RecipeOf

Layers = Iterable[str] | Callable[[str], bool] | None


@dataclass(frozen=True)
class _BandedRecipe:
    """The recipe of a layer whose profile has noise bands."""

    profile: Profile
    layer: str

    def __call__(self, context: Context) -> Recipe | None:
        return self.profile.recipe_for(self.layer, noise=context.noise_level)


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


def recipes_of_profile(
    found: Found, names: Iterable[str], profile: Any, *, force: bool
) -> Mapping[str, Recipe | RecipeOf | None]:
    tuned = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
    if not isinstance(tuned, Profile):
        raise TypeError(
            f"profile must be a sparge.Profile or its file, got {type(profile).__name__}"
        )
    tuned.check(found.model, force=force)
    return {
        name: _BandedRecipe(tuned, name)
        if name in tuned.layers and tuned.layers[name].bands
        else tuned.recipe_for(name)
        for name in names
    }


def check_heads(modules: Mapping[str, nn.Module], recipe: Any) -> None:
    """Refuse what is no recipe, or has other numbers of heads than one of the modules."""
    if not isinstance(recipe, Recipe):
        check_recipe(recipe, 1)  # raises with the reason
    for name, module in modules.items():
        heads = heads_of_module(module)
        if heads is not None:  # otherwise the first call checks it
            try:
                check_recipe(recipe, heads)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def heads_of_module(module: nn.Module) -> int | None:
    """Query heads of an attention module, where it says them."""
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if isinstance(number := getattr(module, name, None), int):
            return number
    number = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return number if isinstance(number, int) else None


def recipes_for(
    found: Found,
    names: Iterable[str],
    recipe: Recipe | RecipeOf | None,
    profile: Any,
    *,
    force: bool,
) -> Mapping[str, Recipe | RecipeOf | None]:
    """The recipe of each layer, checked against the model."""
    if recipe is not None and profile is not None:
        raise ValueError("give a recipe or a profile, not both; a profile has a recipe per layer")
    if profile is not None:
        return recipes_of_profile(found, names, profile, force=force)
    chosen: Any = DEFAULT if recipe is None else recipe
    if isinstance(chosen, type) or not callable(chosen):
        check_heads({name: found.modules[name] for name in names}, chosen)
    return dict.fromkeys(names, chosen)
