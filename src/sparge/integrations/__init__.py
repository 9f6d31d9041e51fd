"""sparge inside other people's models: one thin adapter each, imported when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..dispatch import AUTO
from ..recipe import Recipe

if TYPE_CHECKING:
    from .handle import Handle


def accelerate(
    model: Any,
    recipe: Recipe | None = None,
    *,
    profile: Any | str | os.PathLike[str] | None = None,
    backend: str = AUTO,
    layers: Iterable[str] | Callable[[str], bool] | None = None,
    measure_error: bool = False,
    force: bool = False,
) -> Handle:
    """Let a transformers model (or pipeline) use sparge for its attention, this one alone.

    recipe: how much to keep and in what precision, in every layer; None is the default recipe.
    profile: settings tuned per layer and head, a `sparge.Profile` or its file, instead of a recipe.
    layers: names of attention modules, with `*` and `?`, or a function of the name; others keep
    their own attention. measure_error: compute a few rows of every call exactly, for the report.
    force: use a profile that was tuned for another model all the same, with a warning.

    Returns a handle: `report()` says what ran, `remove()` puts the model back; it is a context
    manager too. A second call replaces the settings of the first.
    """
    try:
        from .handle import accelerate_transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "sparge.accelerate needs transformers: pip install 'sparge[transformers]'",
            name="transformers",
        ) from None
    return accelerate_transformers(
        model,
        recipe,
        profile=profile,
        backend=backend,
        layers=layers,
        measure_error=measure_error,
        force=force,
    )
