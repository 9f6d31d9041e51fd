"""What an operator asks for: recipe or profile, backend; from vLLM's configuration or environment.

vLLM's configuration (`additional_config={"sparge": {...}}`) takes precedence over the environment,
field by field. Both are read when a worker starts, and every mistake in them ends the start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from ...support.json_text import short
from ...values.backend import AUTO
from ...values.profile import Profile
from ...values.recipe import DEFAULT, Recipe

ENV_SERVE = "SPARGE_VLLM"
ENV_RECIPE = "SPARGE_VLLM_RECIPE"
ENV_PROFILE = "SPARGE_VLLM_PROFILE"
SECTION = "sparge"
"""The key of `additional_config` that holds the settings."""
FIELDS = ("recipe", "profile", "backend", "log_seconds")
LOG_SECONDS = 60.0

OWN_SUFFIX = ".attn"
"""vLLM's attention is a module of its own inside the one that a profile names."""
PREFIXES = (("language_model.model.", "model.language_model."),)
"""vLLM's name of a part of a model, and transformers' name of the same part."""


def asked_for() -> bool:
    """Whether `SPARGE_VLLM` asks to serve on the CPU; ValueError for other values than 0 and 1."""
    value = os.environ.get(ENV_SERVE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{ENV_SERVE} must be 1 (serve with sparge) or 0, got {value!r}")
    return value == "1"


@dataclass(frozen=True)
class ServingSettings:
    """What every layer of a worker is served by.

    recipe: of all layers, where there is no profile. backend: as in `sparge.attention`; `"auto"`
    leaves to vLLM's attention what that does faster. log_seconds: between two lines of the log.
    origin: where recipe or profile came from, for messages.
    """

    recipe: Recipe = DEFAULT
    profile: Profile | None = None
    backend: str = AUTO
    log_seconds: float = LOG_SECONDS
    origin: str = "the default recipe"

    def recipe_of(self, layer: str, *, first: int, heads: int, all_heads: int) -> Recipe | None:
        """The recipe of query heads `first` to `first + heads - 1` of a layer, None where it stays
        dense. layer: vLLM's name. Refuses a layer or a number of heads that the settings lack."""
        recipe: Recipe | None = self.recipe
        known = 0
        if self.profile is not None:
            name = profile_name(layer, self.profile.layers)
            known = len(self.profile.layers[name].heads)
            if known and known != all_heads:
                raise ValueError(
                    f"{self.origin} has {known} heads for {name}, and the model has {all_heads}; "
                    "tune a profile for this model"
                )
            recipe = self.profile.recipe_for(name, slice(first, first + heads) if known else None)
        if recipe is None:
            return None
        if not known:
            recipe = _rank_recipe(recipe, first, heads, all_heads, self.origin)
        _refuse_moving_ranges(recipe, f"{self.origin}, {layer}")
        return recipe


def profile_name(layer: str, names: Iterable[str]) -> str:
    """The name in a profile of a layer of vLLM's: `model.layers.3.self_attn.attn` is
    `model.layers.3.self_attn` there. Names match whole; ValueError says what is nearest."""
    known = list(names)
    tried = [layer, layer.removesuffix(OWN_SUFFIX)]
    for own, theirs in PREFIXES:
        tried += [theirs + name.removeprefix(own) for name in tried if name.startswith(own)]
    for name in tried:
        if name in known:
            return name
    near = get_close_matches(tried[1], known, n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(
        f"the profile must name every layer that vLLM serves; it has none of {tried}{hint}. "
        "Tune this model, or serve with a recipe"
    )


def read_settings(
    additional_config: Any, environ: Mapping[str, str] = os.environ
) -> ServingSettings:
    """The settings in force. ValueError says which source is wrong and what it must hold."""
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    where = f"additional_config[{SECTION!r}]"
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{where} must be an object with {', '.join(FIELDS)}; got {section!r}")
    if unknown := sorted(set(section) - set(FIELDS)):
        raise ValueError(f"{where} has unknown fields {unknown}; known are {', '.join(FIELDS)}")
    given = {f"{where}[{name!r}]": (name, section[name]) for name in FIELDS if name in section}
    chosen = {name for name, _ in given.values()} & {"recipe", "profile"}
    if not chosen:
        from_env = {ENV_RECIPE: "recipe", ENV_PROFILE: "profile"}
        given |= {env: (name, environ[env]) for env, name in from_env.items() if environ.get(env)}
    both = [source for source, (name, _) in given.items() if name in ("recipe", "profile")]
    if len(both) > 1:
        raise ValueError(f"{both[0]} and {both[1]} must not be given together; leave one of them")
    settings = ServingSettings()
    for source, (name, value) in given.items():
        settings = _with(settings, source, name, value)
    return settings


def _with(settings: ServingSettings, source: str, name: str, value: Any) -> ServingSettings:
    try:
        if name == "recipe":
            return replace(settings, recipe=_recipe(value), origin=f"the recipe of {source}")
        if name == "profile":
            _need(isinstance(value, str | os.PathLike), "a path", value)
            return replace(settings, profile=Profile.load(value), origin=f"the profile of {source}")
        if name == "backend":
            _need(isinstance(value, str) and bool(value), "the name of a backend", value)
            return replace(settings, backend=value)
        seconds = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        _need(seconds, "a number of seconds, 0 for no lines", value)
        return replace(settings, log_seconds=float(value))
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{source}: {error}") from None


def _need(holds: bool, needed: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"must be {needed}, got {short(value)}")


def _recipe(value: Any) -> Recipe:
    """From an object, a path, or JSON text (what a command line can pass)."""
    if isinstance(value, Mapping):
        return Recipe.from_dict(dict(value))
    _need(isinstance(value, str | os.PathLike), "a recipe's object or the path of its file", value)
    text = os.fspath(value)
    return Recipe.from_json(text) if text.lstrip().startswith("{") else Recipe.from_file(text)


def _rank_recipe(recipe: Recipe, first: int, heads: int, all_heads: int, origin: str) -> Recipe:
    """The heads of one tensor-parallel rank, of a recipe with numbers for all heads."""
    numbers = (*vars(recipe.keep).values(), recipe.min_similarity, recipe.pv_skip)
    lengths = {len(each) for each in numbers if isinstance(each, tuple)}
    if not lengths:
        return recipe
    if lengths != {all_heads}:
        came = " and ".join(map(str, sorted(lengths)))
        raise ValueError(
            f"{origin} has numbers for {came} heads, and the model has {all_heads}; give one "
            "number for all heads, or one per query head of the whole model"
        )
    return recipe.heads(first, first + heads)


def _refuse_moving_ranges(recipe: Recipe, where: str) -> None:
    """Ranges from the end would name other tokens in every chunk of a prompt."""
    moving = [each for each in recipe.protect if each[0] < 0 or (each[1] or 0) < 0]
    if moving:
        raise ValueError(
            f"{where}: protect must count from the start when serving, got "
            f"{json.dumps(moving[0])}; the end of a chunk is not the end of a prompt"
        )
