"""The handle of an accelerated model: its report, its context, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..recipe import Recipe
from .adapters import Found
from .report import Report
from .site import SITE, Context, Site, Tap, inside, site_of

_HANDLE = "_sparge_handle"


class Handle:
    """An accelerated model: what it did, and the way back.

    A copy of an accelerated model (deepcopy, pickle) is accelerated too, with a handle of its own.
    """

    def __init__(
        self, found: Found, recipe: Recipe | None, sites: dict[str, Site], undo: Callable[[], None]
    ) -> None:
        self.model, self.recipe, self.left_alone = found.model, recipe, dict(found.left_alone)
        self._sites = [(found.modules[name], site) for name, site in sites.items()]
        self._undo = undo
        self.active = True
        for module, site in self._sites:
            setattr(module, SITE, site)
            site.open(self)
        setattr(self.model, _HANDLE, self)  # it lives as long as the model

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for _, site in self._sites if self.active else ():
            site.open(self)

    def context(
        self, *, noise_level: float | None = None, step: int | None = None
    ) -> AbstractContextManager[None]:
        """Set what recipes that depend on a context see, inside a `with` block.

        It holds for this handle, in this thread or task. Outside of any block both are None.
        """
        return inside(self, Context(noise_level, step))

    def report(self) -> Report:
        """What ran in every attention module since the start or the last `reset()`."""
        layers = tuple(site.report() for _, site in self._sites)
        return Report(layers, self.recipe, dict(self.left_alone))

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
        self._undo()
        for module, site in self._sites:
            site.close()
            if site_of(module) is site:
                delattr(module, SITE)
        if vars(self.model).get(_HANDLE) is self:
            delattr(self.model, _HANDLE)

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
        if not {module for module, _ in handle._sites} <= {*found.modules.values()}:
            raise ValueError(
                f"{handle!r} covers more than this part of the model; remove() it first, or choose "
                "by `layers` on the whole"
            )
    return list(handles)
