"""The handle of an accelerated model: its report, its context, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..values.recipe import Recipe
from ..values.schedule import Context
from .adapters import Attached, Found
from .report import Report
from .site import SITE, Site, Tap, inside, site_of

_HANDLE = "_sparge_handle"


class Handle:
    """An accelerated model: what it did, and the way back.

    A copy of an accelerated model (deepcopy, pickle) is accelerated too, with a handle of its own.
    """

    def __init__(
        self,
        found: Found,
        recipe: Recipe | None,
        sites: dict[str, Site],
        attached: Attached | Callable[[], None],
    ) -> None:
        self.model, self.recipe, self.left_alone = found.model, recipe, dict(found.left_alone)
        self._sites = [(found.modules[name], site) for name, site in sites.items()]
        self._attached = attached if isinstance(attached, Attached) else Attached(attached)
        self.active = True
        for module, site in self._sites:
            setattr(module, SITE, site)
            site.open(self)
        setattr(self.model, _HANDLE, self)  # it lives as long as the model
        if found.pipeline is not None:  # several denoisers have nothing else that holds it
            setattr(found.pipeline, _HANDLE, self)
        self._pipeline = found.pipeline

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for _, site in self._sites if self.active else ():
            site.open(self)

    def context(
        self,
        *,
        noise_level: float | None = None,
        step: int | None = None,
        progress: float | None = None,
    ) -> AbstractContextManager[None]:
        """Set what schedules and recipes that depend on a context see, inside a `with` block.

        Outside of any block all are None. A pipeline sets them itself, step by step. For a
        transformers model they hold in this thread or task only; other models have one context.
        """
        context = Context(noise_level, step, progress)
        clock = self._attached.clock
        return inside(self, context) if clock is None else clock.inside(context)

    def report(self) -> Report:
        """What ran in every attention module since the start or the last `reset()`."""
        layers = tuple(site.report() for _, site in self._sites)
        return Report(layers, self.recipe, dict(self.left_alone), tuple(self._attached.notes()))

    def add(self, module: nn.Module, site: Site) -> None:
        """Take over a site that an adapter found while the model ran."""
        self._sites.append((module, site))
        site.open(self)

    def reset(self) -> None:
        """Set all counts to zero."""
        for _, site in self._sites:
            site.reset()

    def tap(self, name: str, callback: Tap | None) -> None:
        """Call a function with the tensors of a layer's `sparge.attention` calls; None ends it."""
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
        self._attached.undo()
        for module, site in self._sites:
            site.close()
            if site_of(module) is site:
                delattr(module, SITE)
        for owner in (self.model, self._pipeline):
            if owner is not None and vars(owner).get(_HANDLE) is self:
                delattr(owner, _HANDLE)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        return f"<sparge on {type(self.model).__name__}: {len(self._sites)} layers, {state}>"


def replaced_handles(found: Found) -> list[Handle]:
    """The handles that a new one for these modules takes the place of."""
    sites = [site for module in found.modules.values() if (site := site_of(module)) is not None]
    handles = dict.fromkeys(handle for site in sites if (handle := site.holder()) is not None)
    for handle in handles:
        # Sites that were found while the model ran belong to the whole of it.
        covered = {module for module, _ in handle._sites} - {handle.model}
        if found.model is not handle.model and not covered <= {*found.modules.values()}:
            raise ValueError(
                f"{handle!r} covers more than this part of the model; remove() it first, or choose "
                "by `layers` on the whole"
            )
    return list(handles)
