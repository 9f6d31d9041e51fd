"""The adapter of `sparge.accelerate` for any torch module that calls SDPA.

Every module whose own code calls `F.scaled_dot_product_attention` is a site, and one more for each
further call in its forward. Calls from code that was not found by reading get sites by their place
in the source, while the model runs.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...reorder import HILBERT
from ..adapters import Attached, Found
from ..clock import Clock
from ..route import Intercept, Route
from ..site import Site
from ..tokens import Tokens
from .reach import SDPA, attention_modules

_FORWARD = "forward"
RouteOf = Callable[[Site], Route]


class ModuleAdapter:
    name = "torch"
    options = ("schedule", "order", "grid", "cross_attention")

    def find(self, model: Any, *, cross_attention: bool = False) -> Found | str:
        if not isinstance(model, nn.Module):
            return "it is no torch module"
        found, unseen = attention_modules(model)
        # The model itself has no name among its parts.
        named = {name or type(model).__name__: why for name, why in unseen.items()}
        if not found:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(named.items())[:3])
            return reasons or f"none of its modules calls F.{SDPA}"
        modules = {name or type(model).__name__: module for name, module in found.items()}
        return Found(model, modules, named, defaults={"order": HILBERT})

    def attach(
        self,
        found: Found,
        sites: Mapping[str, Site],
        *,
        schedule: Any = None,
        order: str = HILBERT,
        grid: Any = None,
        cross_attention: bool | None = None,
    ) -> Attached:
        tokens, clock = Tokens(order, grid), Clock(sites.values())
        route = partial(Route, tokens=tokens, cross=bool(cross_attention))
        wrapped = []
        for name, module in found.modules.items():
            wrapped.append((module, Inside(module, Places(sites[name], module, route, clock))))
        if found.model not in found.modules.values():
            elsewhere = Elsewhere(_settings_elsewhere(sites), found.model, route, clock)
            wrapped.append((found.model, Inside(found.model, elsewhere)))
        for module, inside in wrapped:
            module.forward = inside
        return Attached(partial(_give_back, wrapped), clock)


ADAPTER = ModuleAdapter()


def _give_back(wrapped: list[tuple[nn.Module, Inside]]) -> None:
    for module, inside in wrapped:
        if vars(module).get(_FORWARD) is inside:  # otherwise somebody has wrapped it since
            if inside.before is None:
                del module.forward
            else:
                module.forward = inside.before
        inside.active = False


class Inside:
    """Stands in the place of a module's `forward`, and runs it with its attention intercepted."""

    def __init__(self, module: nn.Module, route: Places | Elsewhere) -> None:
        self.module, self.route, self.intercept = module, route, Intercept(route)
        self.before = vars(module).get(_FORWARD)
        self.active = True

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def __wrapped__(self) -> Any:
        """The forward inside, for those who read code, as the next `accelerate` does."""
        return self.before or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or type(self.module).forward.__get__(self.module)
        if not self.active:
            return forward(*args, **kwargs)
        self.route.begin()
        with self.intercept:
            return forward(*args, **kwargs)


class Places:
    """The calls of one module's forward, in order: each has a site of its own."""

    def __init__(self, first: Site, module: nn.Module, route: RouteOf, clock: Clock) -> None:
        self.module, self.route, self.clock = module, route, clock
        self.routes = [route(first)]
        self.traced, self.calls = 0, dict[int, int]()  # of a graph; of each thread

    def begin(self) -> None:
        if torch.compiler.is_compiling():
            self.traced = 0
        else:
            self.calls[threading.get_ident()] = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # a graph can make no site
            i, self.traced = self.traced, self.traced + 1
            return self.routes[min(i, len(self.routes) - 1)](*args, **kwargs)
        thread = threading.get_ident()
        i = self.calls[thread]
        self.calls[thread] = i + 1
        if i == len(self.routes):
            first = self.routes[0].site
            site = _site_like(first, f"{first.name}:{i + 1}", self.module, self.clock)
            self.routes.append(self.route(site))
        return self.routes[i](*args, **kwargs)


class Elsewhere:
    """Calls from code that belongs to no module that was found: a site for each line."""

    def __init__(self, template: Site, module: nn.Module, route: RouteOf, clock: Clock) -> None:
        self.template, self.module, self.route, self.clock = template, module, route, clock
        self.routes: dict[str, Route] = {}

    def begin(self) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        place = "(compiled)" if torch.compiler.is_compiling() else _call_place()
        if place not in self.routes:
            if torch.compiler.is_compiling():
                return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
            site = _site_like(self.template, place, self.module, self.clock)
            self.routes[place] = self.route(site)
        return self.routes[place](*args, **kwargs)


def _settings_elsewhere(sites: Mapping[str, Site]) -> Site:
    """The site whose settings hold for calls of no known layer: none, if some layer is left out."""
    left_out = (site for site in sites.values() if site.recipe is None)
    scheduled = (s for s in sites.values() if not getattr(s.recipe, "dense_layer", False))
    return next(left_out, None) or next(scheduled, None) or next(iter(sites.values()))


def _site_like(other: Site, name: str, module: nn.Module, clock: Clock) -> Site:
    """A site with the settings of another, of the same handle."""
    site = Site(
        name,
        other.recipe,
        other.backend,
        other.measure_error,
        left_out=other.left_out,
        follows_clock=other.follows_clock,
    )
    site.turn_to(clock.context)
    clock.sites.append(site)
    if (handle := other.holder()) is not None:
        handle.add(module, site)
    return site


def _call_place() -> str:
    """File, function and line of the call, outside of torch and of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "")
        if not package.startswith(("torch.", "sparge.")):
            code = frame.f_code
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "unknown"
