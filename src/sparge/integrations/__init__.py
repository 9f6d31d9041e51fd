"""`sparge.accelerate`: sparse attention inside other people's models, through one adapter each."""

from __future__ import annotations

import os
from typing import Any

from ..dispatch import AUTO, DENSE, backends
from ..recipe import DEFAULT, Recipe
from .adapters import Adapter, Found, find_adapter, register_adapter, unregister_adapter
from .context import Context
from .handle import Handle, replaced_handles
from .layer_recipes import Layers, chosen_layers, recipes_for
from .report import LayerReport, Report
from .site import RecipeOf, Site

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


def accelerate(
    model: Any,
    recipe: Recipe | RecipeOf | None = None,
    *,
    profile: Any | str | os.PathLike[str] | None = None,
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
        raise ValueError(f"unknown backend {backend!r}; there are {', '.join(known)}")
    wanted = chosen_layers(found.modules, layers)
    in_order = [name for name in found.modules if name in wanted]
    recipes = recipes_for(found, in_order, recipe, profile, force=force)
    for old in replaced_handles(found):
        old.remove()
    sites = {
        name: Site(
            name,
            recipes.get(name),
            backend=backend,
            measure_error=measure_error,
            left_out="its settings leave it dense" if name in wanted else "not among `layers`",
        )
        for name in found.modules
    }
    undo = adapter.attach(found, sites)
    one = DEFAULT if recipe is None and profile is None else recipe
    return Handle(found, one if isinstance(one, Recipe) else None, sites, undo)
