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
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..reorder import HILBERT
from .adapters import Attached, Found
from .clock import Clock
from .replacement import Replacement
from .route import Intercept, Route
from .site import Site
from .tokens import Tokens

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
        modules, unseen = attention_modules(model)
        if not modules:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(unseen.items())[:3])
            return reasons or f"none of its modules calls F.{SDPA}"
        return Found(model, modules, unseen, defaults={"order": HILBERT})

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
        inside = [
            Inside(module, Places(sites[name], module, route, clock))
            for name, module in found.modules.items()
        ]
        if found.model not in found.modules.values():
            elsewhere = Elsewhere(_settings_elsewhere(sites), found.model, route, clock)
            inside.append(Inside(found.model, elsewhere))
        for forward in inside:
            forward.install()
        return Attached(partial(_give_back, inside), clock)


ADAPTER = ModuleAdapter()


def _give_back(inside: list[Inside]) -> None:
    for forward in inside:
        forward.restore()


class Inside(Replacement):
    """Stands in the place of a module's `forward`, and runs it with its attention intercepted."""

    def __init__(self, module: nn.Module, calls: Places | Elsewhere) -> None:
        super().__init__(module, "forward")
        self.calls, self.intercept = calls, Intercept(calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.method()
        if not self.active:
            return forward(*args, **kwargs)
        self.calls.begin()
        with self.intercept:
            return forward(*args, **kwargs)


@dataclass(eq=False)
class _Calls:
    """Attention calls of a forward, of which more may come up while the model runs.

    like: the site whose settings they have, all of its handle.
    """

    like: Site
    module: nn.Module
    make_route: Callable[[Site], Route]
    clock: Clock

    def begin(self) -> None:
        """The forward is called."""

    def new_route(self, name: str) -> Route:
        site = replace(self.like, name=name)
        site.turn_to(self.clock.context)
        self.clock.sites.append(site)
        if (handle := self.like.holder()) is not None:
            handle.add(self.module, site)
        return self.make_route(site)


@dataclass(eq=False)
class Places(_Calls):
    """The calls of one module's forward, in order: each has a site of its own."""

    def __post_init__(self) -> None:
        self.routes = [self.make_route(self.like)]
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
            self.routes.append(self.new_route(f"{self.like.name}:{i + 1}"))
        return self.routes[i](*args, **kwargs)


@dataclass(eq=False)
class Elsewhere(_Calls):
    """Calls from code that belongs to no module that was found: a site for each line."""

    def __post_init__(self) -> None:
        self.routes: dict[str, Route] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # a graph can make no site
            return F.scaled_dot_product_attention(*args, **kwargs)
        place = _call_place()
        if place not in self.routes:
            self.routes[place] = self.new_route(place)
        return self.routes[place](*args, **kwargs)


def _settings_elsewhere(sites: Mapping[str, Site]) -> Site:
    """The site whose settings hold for calls of no known layer: none, if some layer is left out."""
    left_out = (site for site in sites.values() if site.recipe is None)
    scheduled = (s for s in sites.values() if not getattr(s.recipe, "dense_layer", False))
    return next(left_out, None) or next(scheduled, None) or next(iter(sites.values()))


def _call_place() -> str:
    """File, function and line of the call, outside of torch and of this package."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "sparge.")):
            code = frame.f_code
            return f"{os.path.basename(code.co_filename)}:{line} {code.co_name}"
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
        name = name or type(model).__name__  # the model itself has none among its parts
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
    return any(
        SDPA in names or any(x is F.scaled_dot_product_attention for x in values)
        for names, values in _read(module)
    )


def attends_by_hand(module: nn.Module) -> bool:
    """A softmax and a product of matrices in the code of one module."""
    names = set[str]().union(*(found for found, _ in _read(module)))
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
        values = [x.__func__ if isinstance(x, staticmethod) else x for x in values]
        values += [_content(cell) for cell in function.__closure__ or ()]
        values += [type(x).__call__ for x in values if _is_processor(x)]
        yield names, values
        todo += [(x, depth + 1) for x in values if _is_own(x)]


def _names(code: CodeType) -> set[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names}.union(*inner)


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
