"""Adapters: one for each kind of model. Adding a framework is writing one and registering it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ..support.errors import Unsupported
from .clock import Clock
from .site import Site


@dataclass(frozen=True)
class Found:
    """The attention modules of a model by name, and the parts that stay as they are, with why."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    left_alone: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of the arguments of `accelerate`: recipe, schedule, order."""
    pipeline: Any = None


@dataclass(frozen=True)
class Attached:
    """The way back of an attached model.

    clock: set where sites follow one. notes: what a report should say beside its figures.
    """

    undo: Callable[[], None]
    clock: Clock | None = None
    notes: Callable[[], Sequence[str]] = tuple


class Adapter(Protocol):
    """Connects the models of one framework.

    A module of `find` gets a `Site`. From `attach` on, its attention runs through `site.attend`, or
    is reported to `site.note_own`. An adapter that has an attribute `options` takes those arguments
    of `accelerate` as well, by name, in `attach`: of "schedule", "order", "grid", "protect_text"
    and "cross_attention"; `find` is given the last of them if it is True.
    """

    @property
    def name(self) -> str: ...

    def find(self, model: Any, **options: Any) -> Found | str:
        """The attention modules of a model, at least one; or why this adapter cannot take it."""

    def attach(
        self, found: Found, sites: Mapping[str, Site], **options: Any
    ) -> Attached | Callable[[], None]:
        """Route the attention of each module through its site; returns the way back.

        An error leaves the model unchanged. The way back is copied and pickled with the model.
        """


_BUILT_IN = {
    "transformers": f"{__package__}.transformers.adapter",
    "diffusers": f"{__package__}.diffusers.adapter",
    "torch": f"{__package__}.modules",
}
"""By framework; the adapter is imported only once the framework is. The last takes any module."""
_registered: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter) -> None:
    """Let `sparge.accelerate` ask this adapter too, before the built-in ones."""
    if adapter.name in _BUILT_IN or adapter.name in _registered:
        raise ValueError(f"name must be free, got {adapter.name!r}, which is an adapter already")
    _registered[adapter.name] = adapter


def unregister_adapter(name: str) -> None:
    del _registered[name]


def find_adapter(model: Any, *, cross_attention: bool = False) -> tuple[Adapter, Found]:
    """The first adapter that takes a model; Unsupported names each with its reason."""
    if not callable(model):
        raise TypeError(
            f"model must be a module or a pipeline, got {type(model).__name__}; to compute "
            "attention itself call sparge.attention"
        )
    reasons = {}
    for name in (*_registered, *_BUILT_IN):
        if name not in _registered and sys.modules.get(name) is None:
            reasons[name] = f"{name} is not imported, so this is none of its models"
            continue
        adapter = _registered.get(name) or importlib.import_module(_BUILT_IN[name]).ADAPTER
        takes_cross = cross_attention and "cross_attention" in getattr(adapter, "options", ())
        found = adapter.find(model, cross_attention=True) if takes_cross else adapter.find(model)
        if isinstance(found, Found):
            return adapter, found
        reasons[name] = found
    raise Unsupported(
        f"{type(model).__name__} has no attention that an adapter can replace:",
        reasons,
        "call sparge.attention from the model's own code, or register an adapter for it",
    )
