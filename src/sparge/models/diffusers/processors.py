"""Attention processors of diffusers, replaced by copies whose attention goes to a route.

A copy has a generated subclass of the processor's class, with the same signature, because diffusers
filters arguments by it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from torch import nn

from ..modules.reach import SDPA
from ..sdpa import Intercept, Route
from .backend import OwnBackend, relay_member, routed

DISPATCH = "dispatch_attention_fn"
BACKEND = "_attention_backend"
PARALLEL = "_parallel_config"
_ROUTE, _INTERCEPT, _OWN = "_sparge_route", "_sparge_intercept", "_sparge_own"


def attention_call(processor: Any) -> str:
    """How a processor computes attention: "dispatch", "sdpa", or "" where it cannot be replaced."""
    kind: Any = type(processor)
    called = kind.forward if isinstance(processor, nn.Module) else kind.__call__
    code = getattr(inspect.unwrap(called), "__code__", None)
    names = {*code.co_names} if code is not None else set()
    if DISPATCH in names and hasattr(processor, BACKEND):
        return "dispatch"
    return "sdpa" if SDPA in names else ""


def accelerated(processor: Any, route: Route) -> Any:
    """A copy of a processor whose attention goes to the route."""
    mine = copy.copy(processor)
    own = vars(mine).pop(BACKEND, None)
    kind: Any = type(processor)
    mine.__class__ = _accelerated_class(kind, attention_call(processor))
    setattr(mine, _ROUTE, route)
    if attention_call(processor) == "dispatch":
        setattr(mine, _OWN, own if own is not None else getattr(type(processor), BACKEND, None))
        route.own = OwnBackend(getattr(mine, _OWN))
    else:
        setattr(mine, _INTERCEPT, Intercept(route))
    return mine


def is_accelerated(processor: Any) -> bool:
    return _ROUTE in vars(processor)


def own_backend(processor: Any) -> Any:
    """The backend that was chosen for an accelerated processor, before or since."""
    return vars(processor).get(_OWN)


@functools.cache
def _accelerated_class(kind: Any, how: str) -> Any:
    call = _dispatched(kind) if how == "dispatch" else _intercepted(kind)
    members: dict[str, Any] = {"__call__": call, "__reduce_ex__": _reduce}
    if how == "dispatch":
        # `set_attention_backend` sets what dense parts use; it must not switch sparge off.
        members[BACKEND] = property(_get_backend, _set_backend)
    return type(f"Sparge{kind.__name__}", (kind,), members)


def _dispatched(kind: Any) -> Any:
    @functools.wraps(kind.__call__)  # keeps the signature
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with routed(self._sparge_route):
            return kind.__call__(self, *args, **kwargs)

    return call


def _intercepted(kind: Any) -> Any:
    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._sparge_intercept:
            return kind.__call__(self, *args, **kwargs)

    return call


def _get_backend(self: Any) -> Any:
    return relay_member()


def _set_backend(self: Any, backend: Any) -> None:
    setattr(self, _OWN, backend)
    self._sparge_route.own = OwnBackend(backend)


def _reduce(self: Any, protocol: Any) -> Any:
    """A generated class has no name that a pickle could find: it is made again."""
    kind = type(self).__mro__[1]
    return _rebuild, (kind, attention_call(self)), vars(self)


def _rebuild(kind: Any, how: str) -> Any:
    return object.__new__(_accelerated_class(kind, how))
