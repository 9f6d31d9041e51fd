"""`sparge.accelerate` for transformers: one model is changed, and can be put back.

The configs of the model are replaced by copies first, because other models may share them; the
implementation's name is set on the copies, and each attention module gets a `Site`.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..check import check_recipe
from ..dispatch import AUTO, DENSE, backends
from ..errors import Unsupported
from ..profile import Profile
from ..recipe import DEFAULT, Recipe
from . import transformers as adapter
from .parts import (
    NO_INTERFACE,
    attention_modules,
    chosen_of,
    heads_of_module,
    left_alone_of,
    model_of,
    named,
)
from .report import Report
from .sites import Site, Tap

_HANDLE = "_sparge_handle"

Implementations = list[tuple[PreTrainedConfig, str | None]]


class Handle:
    """An accelerated model: what it did, and the way back.

    A copy of an accelerated model (deepcopy, pickle) is accelerated too, with a handle of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | None,
        sites: list[tuple[nn.Module, Site]],
        implementations: Implementations,
        left_alone: dict[str, str],
    ) -> None:
        self.model, self.recipe, self.left_alone = model, recipe, left_alone
        self._sites, self._implementations = sites, implementations
        self.active = True
        self._hold()

    def _hold(self) -> None:
        for _, site in self._sites:
            site.holder = weakref.ref(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hold()

    def report(self) -> Report:
        """What ran in every attention module since the start or the last `reset()`."""
        layers = tuple(site.report() for _, site in self._sites)
        return Report(layers, self.recipe, dict(self.left_alone))

    def reset(self) -> None:
        """Forget what was counted."""
        for _, site in self._sites:
            site.reset()

    def tap(self, name: str, callback: Tap | None) -> None:
        """Let a function see the tensors of a layer's calls of `sparge.attention`; None ends it."""
        sites = {site.name: site for _, site in self._sites}
        if name not in sites:
            some = ", ".join(list(sites)[:3])
            raise ValueError(f"there is no layer {name!r} here; there are {some}, …")
        sites[name].tap = callback

    def remove(self) -> None:
        """Give the model its own attention back; harmless to repeat. The report stays."""
        if not self.active:
            return
        self.active = False
        _give_back(self._implementations)
        for module, site in self._sites:
            site.close()
            if vars(module).get(adapter.SITE) is site:
                delattr(module, adapter.SITE)
        if vars(self.model).get(_HANDLE) is self:
            delattr(self.model, _HANDLE)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        return f"<sparge on {type(self.model).__name__}: {len(self._sites)} layers, {state}>"


def accelerate_transformers(
    model: Any,
    recipe: Recipe | None,
    *,
    profile: Any | str | os.PathLike[str] | None,
    backend: str,
    layers: Iterable[str] | Callable[[str], bool] | None,
    measure_error: bool,
    force: bool,
) -> Handle:
    model = model_of(model)
    if recipe is not None and profile is not None:
        raise ValueError("give a recipe or a profile, not both; a profile has a recipe per layer")
    check_backend(backend)
    left_alone = left_alone_of(model)
    names = attention_modules(model, left_alone)
    if not names:
        raise Unsupported(
            f"{type(model).__name__} has no attention that can be given another:",
            named(left_alone, model) or {type(model).__name__: NO_INTERFACE},
            "call sparge.attention from the model's own code",
        )
    wanted = chosen_of(names, layers)
    asked_for = {name: module for name, module in names.items() if name in wanted}
    recipes = _recipes_of(model, asked_for, recipe, profile, force=force)
    for old in _replaced(names):
        old.remove()
    implementations = _take_over(model, names, left_alone)
    sites = []
    for name, module in names.items():
        asked = name in wanted
        site = Site(
            name,
            recipes[name] if asked else None,
            own=_own_of(module, implementations),
            eager=adapter.eager_of(module),
            backend=backend,
            measure_error=measure_error,
            left_out="the profile leaves this layer dense" if asked else "not among `layers`",
        )
        setattr(module, adapter.SITE, site)
        site.open()
        sites.append((module, site))
    one = None if profile is not None else recipe or DEFAULT
    handle = Handle(model, one, sites, implementations, named(left_alone, model))
    setattr(model, _HANDLE, handle)  # it lives as long as the model
    return handle


def check_backend(backend: str) -> None:
    known = (AUTO, DENSE, *(each.name for each in backends()))
    if backend not in known:
        raise ValueError(f"unknown backend {backend!r}; there are {', '.join(known)}")


def _replaced(names: dict[str, nn.Module]) -> list[Handle]:
    """The handles that a new one for these modules takes the place of."""
    sites = [vars(module).get(adapter.SITE) for module in names.values()]
    holders = [site.holder() for site in sites if site is not None and site.holder is not None]
    handles = list({id(each): each for each in holders if each is not None}.values())
    for handle in handles:
        if not {id(module) for module, _ in handle._sites} <= {id(m) for m in names.values()}:
            raise ValueError(
                f"{handle!r} covers more than this part of the model; remove() it first, or choose "
                "by `layers` on the whole"
            )
    return handles


def _recipes_of(
    model: nn.Module,
    names: dict[str, nn.Module],
    recipe: Recipe | None,
    profile: Any,
    *,
    force: bool,
) -> dict[str, Recipe | None]:
    if profile is not None:
        tuned = Profile.load(profile) if isinstance(profile, str | os.PathLike) else profile
        if not isinstance(tuned, Profile):
            raise TypeError(
                f"profile must be a sparge.Profile or its file, got {type(profile).__name__}"
            )
        tuned.check(model, force=force)
        return {name: tuned.recipe_for(name) for name in names}
    chosen: Any = DEFAULT if recipe is None else recipe
    if not isinstance(chosen, Recipe):
        check_recipe(chosen, 1)  # which says what is wrong with it
    for name, module in names.items():
        heads = heads_of_module(module)
        if heads is not None:  # otherwise the first call says it
            try:
                check_recipe(chosen, heads)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return dict.fromkeys(names, chosen)


def _take_over(
    model: nn.Module, names: dict[str, nn.Module], left_alone: dict[str, str]
) -> Implementations:
    """Own copies of all configs with our name set, and what stood there before."""
    memo: dict[int, Any] = {}
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                own = copy.deepcopy(value, memo)
                setattr(module, attribute, own)
                for each in _with_parts(own):
                    configs[id(each)] = each
    before = [(config, _before(config, names.values())) for config in configs.values()]
    try:
        with _without_warnings():
            for name, part in model.named_modules():
                if isinstance(part, PreTrainedModel) and name not in left_alone:
                    part.set_attn_implementation(adapter.NAME)
        for module in names.values():  # attention outside of any transformers model
            module.config._attn_implementation_internal = adapter.NAME  # type: ignore[union-attr]
    except BaseException:
        _give_back(before)
        raise
    return before


def _give_back(implementations: Implementations) -> None:
    for config, implementation in implementations:
        if config._attn_implementation == adapter.NAME:  # otherwise it was changed since, by choice
            config._attn_implementation_internal = implementation


def _before(config: PreTrainedConfig, modules: Iterable[nn.Module]) -> str | None:
    """What a config says; of a part copied out of an accelerated model, what it said once."""
    name: str | None = config._attn_implementation
    if name == adapter.NAME:
        for module in modules:
            site = vars(module).get(adapter.SITE)
            if site is not None and getattr(module, "config", None) is config:
                return str(site.own)
    return name


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _with_parts(part)


def _own_of(module: nn.Module, before: Implementations) -> str:
    """The implementation that a module had; others than eager and SDPA have masks of their own."""
    mine = getattr(module, "config", None)
    name = next((name for config, name in before if config is mine), None)
    return name if name in (adapter.EAGER, adapter.SDPA) else adapter.own_by_class(type(mine))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Parts that cannot change are in the report; transformers need not say it on the console."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
