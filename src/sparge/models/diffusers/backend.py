"""diffusers' attention dispatch: the backend name `sparge`, and processors that go to a route.

diffusers has no public way to add a backend, so its enum is extended, as other libraries do. A
backend gets no module, so processors are replaced by copies, which set the route of their module
around a call (`routed`); a second backend hands the call over to it. A copy has a generated
subclass with the same signature, because diffusers filters arguments by it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers.models import attention_dispatch as dispatch
from torch import Tensor, nn

from ...values.recipe import DEFAULT
from ..modules import SDPA
from ..route import Intercept, Route, SdpaCall, running
from ..site import Site
from .context_parallel import attend_parallel, heads_first, heads_last

NAME, RELAY = "sparge", "_sparge_relay"
DISPATCH = "dispatch_attention_fn"
BACKEND = "_attention_backend"
PARALLEL = "_parallel_config"
_ROUTE, _INTERCEPT = "_sparge_route", "_sparge_intercept"

_ANYWHERE = Route(Site('set_attention_backend("sparge")', DEFAULT))
"""For a model that chose the name itself and was not accelerated: self- and joint attention is
sparse, by the default recipe."""


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Inside, calls of the relay go to this route."""
    here = running()
    before = here.route
    here.route = route
    try:
        yield
    finally:
        here.route = before


def register() -> None:
    """Make both names known to diffusers; harmless to repeat."""
    registry = dispatch._AttentionBackendRegistry
    for value, route_of in ((NAME, lambda: _ANYWHERE), (RELAY, _running)):
        if value not in {member.value for member in dispatch.AttentionBackendName}:
            registry.register(
                _add_member(value),
                constraints=[dispatch._check_device, dispatch._check_shape],
                supports_context_parallel=True,
            )(_backend(route_of))


def _add_member(value: str) -> Any:
    kind: Any = dispatch.AttentionBackendName
    name = value.upper()
    member = str.__new__(kind, value)
    member._name_, member._value_, member.__objclass__ = name, value, kind
    member._sort_order_ = len(kind._member_names_)
    kind._member_names_.append(name)
    kind._member_map_[name] = member
    kind._value2member_map_[value] = member
    type.__setattr__(kind, name, member)
    return member


def _backend(route_of: Callable[[], Route]) -> Callable[..., Tensor]:
    """A backend that serves calls by a route; diffusers gives it the arguments that it names."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """Tensors `[B, L, H, D]`; the LSE is `[B, L, H]` in float32, with natural logarithms."""
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]  # of keys; SDPA would read rows of queries
        call = SdpaCall(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
        )
        if getattr(_parallel_config, "context_parallel_config", None) is not None:
            return attend_parallel(route_of(), call, _parallel_config)
        return heads_last(route_of().serve(heads_first(call)))

    return attend


def _running() -> Route:
    """The route of the processor that is running."""
    route = running().route
    assert route is not None, "an accelerated processor sets its route"
    return route


@dataclass(frozen=True)
class OwnBackend:
    """The attention that a processor had, or was given since: its backend; None is the active one.

    A processor that was set to our name is served by the one that was active before.
    """

    backend: Any

    def now(self) -> Any:
        if self.backend not in (None, NAME, RELAY):
            return self.backend
        active, _ = dispatch._AttentionBackendRegistry.get_active_backend()
        return dispatch.AttentionBackendName.NATIVE if active in (NAME, RELAY) else active

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        backend = self.now()
        query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        out = dispatch.dispatch_attention_fn(query, key, value, **given, backend=backend)
        return out.permute(0, 2, 1, 3)


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
    kind: Any = type(processor)
    how, mine = attention_call(processor), copy.copy(processor)
    vars(mine).pop(BACKEND, None)
    mine.__class__ = _accelerated_class(kind, how)
    setattr(mine, _ROUTE, route)
    if how == "dispatch":
        route.own = OwnBackend(getattr(processor, BACKEND))
    else:
        setattr(mine, _INTERCEPT, Intercept(route))
    return mine


def is_accelerated(processor: Any) -> bool:
    return _ROUTE in vars(processor)


def give_back(processor: Any, before: Any) -> None:
    """Let the processor before have what was chosen for an accelerated one."""
    own = processor._sparge_route.own
    if own is not None and own.backend is not None:
        setattr(before, BACKEND, own.backend)
    if PARALLEL in vars(processor):
        setattr(before, PARALLEL, vars(processor)[PARALLEL])


@functools.cache
def _accelerated_class(kind: Any, how: str) -> Any:
    dispatches = how == "dispatch"

    @functools.wraps(kind.__call__)  # keeps the signature
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with routed(self._sparge_route) if dispatches else self._sparge_intercept:
            return kind.__call__(self, *args, **kwargs)

    members: dict[str, Any] = {"__call__": call, "__reduce_ex__": _reduce}
    if dispatches:
        # `set_attention_backend` sets what dense parts use; it must not switch sparge off.
        relay = dispatch.AttentionBackendName(RELAY)
        members[BACKEND] = property(lambda self: relay, _set_backend)
    return type(f"Sparge{kind.__name__}", (kind,), members)


def _set_backend(self: Any, backend: Any) -> None:
    self._sparge_route.own = OwnBackend(backend)


def _reduce(self: Any, protocol: Any) -> Any:
    """A generated class has no name that a pickle could find: it is made again."""
    kind = type(self).__mro__[1]
    return _rebuild, (kind, attention_call(self)), vars(self)


def _rebuild(kind: Any, how: str) -> Any:
    return object.__new__(_accelerated_class(kind, how))
