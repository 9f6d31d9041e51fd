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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..reorder import HILBERT
from .adapters import Attached, Found
from .clock import Clock
from .route import Intercept, Route
from .site import Site
from .tokens import Tokens

_FORWARD = "forward"
RouteOf = Callable[[Site], Route]
SDPA = "scaled_dot_product_attention"
DEPTH = 6
"""Functions that call functions; deeper ones are not read."""
_NOT_OWN = ("torch", "sparge", "diffusers")
_PRODUCTS = {"matmul", "einsum", "bmm", "baddbmm", "mm"}
HIDDEN = (
    "nn.MultiheadAttention calls its attention inside torch, where it cannot be replaced; "
    "call F.scaled_dot_product_attention in its place"
)
BY_HAND = (
    "its code multiplies matrices and takes a softmax itself, which looks like attention and "
    "cannot be replaced; call F.scaled_dot_product_attention in its place"
)


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
    site = replace(other, name=name)
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


# --- which modules call SDPA, found by reading their code ---------------------------------------
#
# Names are followed from `forward` through functions and methods of the model's own packages. Calls
# of submodules are not followed: each module answers for itself.


def attention_modules(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Modules that call SDPA, by name; and those whose attention cannot be seen, with why."""
    found: dict[str, nn.Module] = {}
    unseen: dict[str, str] = {}
    inside_torch: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            unseen[name] = HIDDEN
            inside_torch |= {id(part) for part in module.modules()}
        elif id(module) in inside_torch or type(module).__module__.startswith("torch."):
            continue
        elif calls_sdpa(module):
            found[name] = module
        elif attends_by_hand(module):
            unseen[name] = BY_HAND
    return found, unseen


def calls_sdpa(module: nn.Module) -> bool:
    sdpa = F.scaled_dot_product_attention
    return any(
        SDPA in names or any(value is sdpa for value in values) for names, values in _read(module)
    )


def attends_by_hand(module: nn.Module) -> bool:
    """A softmax and a product of matrices in the code of one module."""
    names = {name for each, _ in _read(module) for name in each}
    return "softmax" in names and bool(names & _PRODUCTS or _has_product(module))


def _has_product(module: nn.Module) -> bool:
    """Whether `forward` has the operator @, which is no name."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return any(" @ " in line for line in source.splitlines())


def _read(module: nn.Module) -> Iterator[tuple[set[str], list[Any]]]:
    """Names in the code of `forward` and of what it calls, and the values that they stand for."""
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(vars(module).get("forward", type(module).forward), 0)]
    while todo:
        function, depth = todo.pop()
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        if code is None or id(code) in seen or depth > DEPTH:
            continue
        seen.add(id(code))
        names = _names(code)
        values = [function.__globals__.get(name) for name in names]
        values += [inspect.getattr_static(module, name, None) for name in names]
        values = [each.__func__ if isinstance(each, staticmethod) else each for each in values]
        values += [_content(cell) for cell in function.__closure__ or ()]
        values += [type(each).__call__ for each in values if _is_processor(each)]
        yield names, values
        todo += [(each, depth + 1) for each in values if _is_own(each)]


def _names(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*(_names(each) for each in inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _is_processor(value: Any) -> bool:
    """An object of the model's own packages that is called, such as an attention processor.

    Those of diffusers are left to its adapter, which knows where their text is.
    """
    kind = type(value)
    if isinstance(value, type | nn.Module | FunctionType | MethodType):
        return False
    home = (kind.__module__ or "").partition(".")[0]
    return isinstance(vars(kind).get("__call__"), FunctionType) and home not in _NOT_OWN


def _is_own(value: Any) -> bool:
    """A function of the model's own packages: torch's would all lead to SDPA in the end."""
    if not isinstance(value, FunctionType | MethodType):
        return False
    return not (value.__module__ or "").startswith(("torch.", "sparge."))
