"""Backends in diffusers' attention dispatch: the public name `sparge`, and one for our processors.

diffusers has no public way to add a backend, so its enum is extended, as other libraries do. A
backend gets tensors and no module; for accelerated processors the route of the module is set around
the call (`routed`), and the second backend only hands the call over to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from ...values.recipe import DEFAULT
from ..sdpa import Route, running
from ..site import Site
from .parallel import attend_parallel
from .split import heads_last

NAME, RELAY = "sparge", "_sparge_relay"


_ANYWHERE = Route(Site('set_attention_backend("sparge")', DEFAULT))
"""For a model that chose the name itself and was not accelerated."""


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
    for value, route_of in ((NAME, _anywhere), (RELAY, _running)):
        if value not in {each.value for each in dispatch.AttentionBackendName}:
            registry.register(
                _add_member(value),
                constraints=[dispatch._check_device, dispatch._check_shape],
                supports_context_parallel=True,
            )(_backend(route_of))


def relay_member() -> Any:
    register()
    return dispatch.AttentionBackendName(RELAY)


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
        given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        given |= {"scale": scale, "enable_gqa": enable_gqa}
        return _run(route_of(), query, key, value, return_lse, _parallel_config, **given)

    return attend


def _anywhere() -> Route:
    """Self- and joint attention sparse, by the default recipe."""
    return _ANYWHERE


def _running() -> Route:
    """The route of the processor that is running."""
    route: Route | None = running().route
    assert route is not None, "an accelerated processor sets its route"
    return route


def _run(
    route: Route,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    return_lse: bool,
    parallel_config: Any,
    **given: Any,
) -> Any:
    mask = given["attn_mask"]
    if mask is not None and mask.shape == (query.shape[0], key.shape[1]):
        given["attn_mask"] = mask[:, None, None, :]  # of keys; SDPA would read rows of queries
    if getattr(parallel_config, "context_parallel_config", None) is not None:
        return attend_parallel(
            route, query, key, value, config=parallel_config, return_lse=return_lse, **given
        )
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    return heads_last(route(query, key, value, **given, return_lse=return_lse))


class OwnBackend:
    """The attention that a processor had: its backend, or the one that is active."""

    def __init__(self, backend: Any) -> None:
        # A processor that was set to our name is served by the one that was active before.
        self.backend = None if backend in (NAME, RELAY) else backend

    def now(self) -> Any:
        if self.backend is not None:
            return self.backend
        active, _ = dispatch._AttentionBackendRegistry.get_active_backend()
        return dispatch.AttentionBackendName.NATIVE if active in (NAME, RELAY) else active

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        backend = self.now()
        query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        out = dispatch.dispatch_attention_fn(query, key, value, **given, backend=backend)
        return out.permute(0, 2, 1, 3)


__all__ = ["NAME", "RELAY", "OwnBackend", "register", "relay_member", "routed"]
