"""Attention calls of a model's code on their way to sparge: place → decide → attend → restore.

`Route` serves calls with the arguments of `F.scaled_dot_product_attention`; `Intercept` sends those
of a model's own code to it, inside a `with` block and in its thread only. Compiled graphs trace
both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..api.attention import attention
from ..routing import DENSE
from ..values.call import MAX_HEAD_DIM
from ..values.recipe import Recipe
from .clock import known_recipes
from .site import Site
from .tokens import OpenRanges, Placed, Ranges, Tokens, absolute_ranges
from .ulysses import HeadShare

Own = Callable[..., Tensor]
"""The model's own attention, with the arguments of `F.scaled_dot_product_attention`."""
CROSS = "cross-attention: its keys are of other tokens than its queries"
ONE_QUERY = "one query (decode): dense attention is faster"
GRADIENT = "a gradient is wanted: torch's own is faster; sparge runs under no_grad"


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class SdpaCall(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`, and whether an LSE is wanted."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `F.scaled_dot_product_attention` beside its tensors."""
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        return {name: getattr(self, name) for name in names}

    def map(self, change: Callable[[Tensor], Tensor]) -> SdpaCall:
        """The call with its query, key and value changed alike."""
        query, key, value = (change(x) for x in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query.shape[-2], self.key.shape[-2]

    @property
    def is_self_attention(self) -> bool:
        """Whether there are as many keys as queries, which are then taken for the same tokens."""
        return self.query.dim() == 4 and self.query.shape[-2] == self.key.shape[-2]


def why_own(
    call: SdpaCall, *, left_out: str, cross: bool = True, lengths: tuple[int, int] | None = None
) -> str:
    """Why the model's own attention must run a call, or "".

    left_out: why the settings leave this call dense, or "". cross: attention to other tokens is
    served, too. lengths: of the queries and of the keys, where the tensors are parts of them.
    """
    if left_out:
        return left_out
    query, key, value = call[:3]
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return f"tensors of {query.dim()} dimensions; sparge takes 4: [B, H, L, D]"
    if query.shape[0] != key.shape[0] or key.shape[0] != value.shape[0]:
        return "a batch of keys that is broadcast"
    heads = {key.shape[1], value.shape[1]}
    if not call.enable_gqa and heads not in ({query.shape[1]}, {1}):
        return "heads that are broadcast"
    Lq, Lk = lengths or call.lengths
    if Lq != Lk and not cross:
        return CROSS
    if call.dropout_p > 0.0:
        return f"dropout {call.dropout_p}: sparge has none"
    if Lq == 1:
        return ONE_QUERY
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an empty tensor"
    if wants_gradient(query, key, value):
        return GRADIENT
    head_dim = max(query.shape[3], value.shape[3])
    return f"head dim {head_dim} is over {MAX_HEAD_DIM}" if head_dim > MAX_HEAD_DIM else ""


class Route:
    """Serves the attention calls of one site: sparse, or by the model's own attention.

    own: None is SDPA itself. cross: serve attention to other tokens, too.
    """

    def __init__(
        self, site: Site, tokens: Tokens | None = None, own: Own | None = None, cross: bool = False
    ) -> None:
        self.site, self.tokens, self.own, self.cross = site, tokens, own, cross
        # Of all parts of a run, so that a dense part refuses them, too.
        known = (recipe.protect for recipe in known_recipes(site.recipe))
        self.known_ranges = tuple(dict.fromkeys(ranges for ranges in known if ranges))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, or `(out, lse)`, of a call with the arguments of `SdpaCall`."""
        return self.serve(SdpaCall(*args, **kwargs))

    def serve(self, call: SdpaCall, *, share: HeadShare | None = None) -> Any:
        """The result of a call. share: its heads, where other processes have the rest of those that
        the site's recipe is for."""
        call, placed = self.place(call)
        recipe, reason = self.decide(call, share=share)
        if recipe is None or reason:
            return self.run_own(reason, call)
        if placed is None or (self.tokens is not None and self.tokens.permuted):
            return self.attend(call, recipe, placed)
        mask = placed.reorder_mask(call.attn_mask, *call.lengths)
        moved = call.map(placed.reorder)._replace(attn_mask=mask)
        result = self.attend(moved, recipe, placed)
        if call.return_lse:
            return placed.restore(result[0]), placed.restore(result[1], dim=-1)
        return placed.restore(result)

    def place(self, call: SdpaCall) -> tuple[SdpaCall, Placed | None]:
        """The call as it comes to attention, and where its visual tokens are while it is attended;
        None is as they came. In a model whose hidden states are in order, a mask must follow."""
        tokens, (Lq, Lk) = self.tokens, call.lengths
        if call.is_self_attention and self.known_ranges:
            check_ranges(self.known_ranges, int(Lq))
        if tokens is None:
            return call, None
        if tokens.permuted:
            placed = tokens.place(int(Lq))
            if placed is not None and call.attn_mask is not None:
                call = call._replace(attn_mask=placed.reorder_mask(call.attn_mask, Lq, Lk))
            return call, placed if call.is_self_attention else None
        # A causal call goes by the order in which its tokens came.
        in_order = call.is_self_attention and not call.is_causal
        return call, tokens.place(int(Lq)) if in_order else None

    def decide(
        self,
        call: SdpaCall,
        *,
        share: HeadShare | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> tuple[Recipe | None, str]:
        """The recipe of a call, and why the model's own attention must run it instead, or "".

        lengths: of the queries and of the keys, where the tensors are parts of them.
        """
        # SDPA takes a mask beside `is_causal` for one that has the diagonal in it.
        in_mask = call.is_causal and call.attn_mask is not None
        recipe = self.site.recipe_now(diagonal_in_mask=in_mask)
        if share is not None and recipe is not None:
            recipe = share.recipe_of(recipe)
        Lq = (lengths or call.lengths)[0]
        unknown = "" if self.tokens is None else self.tokens.why_unknown(Lq)
        left_out = unknown or ("" if recipe is not None else self.site.left_out)
        return recipe, why_own(call, left_out=left_out, cross=self.cross, lengths=lengths)

    def attend(self, call: SdpaCall, recipe: Recipe, placed: Placed | None) -> Any:
        """Sparse attention of a call whose tokens are in order."""
        arguments = {
            "attn_mask": call.attn_mask,
            "is_causal": call.is_causal,
            "scale": call.scale,
            # One key head for all queries is broadcast by SDPA, and shared here.
            "enable_gqa": call.enable_gqa or call.key.shape[1] < call.query.shape[1],
        }
        return self.site.attend(
            call.query,
            call.key,
            call.value,
            arguments,
            recipe=recipe,
            return_lse=call.return_lse,
            protect=self._protected(recipe, call, placed),
        )

    def _protected(self, recipe: Recipe, call: SdpaCall, placed: Placed | None) -> Ranges | None:
        """Where the protected tokens of a recipe stand, and those that are not visual; None leaves
        the recipe as it is."""
        L = int(call.lengths[0])
        others = () if self.tokens is None else self.tokens.protected(L)
        if not others and not recipe.protect:
            return None
        place = () if placed is None else (*placed.grid, placed.start)
        order = "" if placed is None else placed.order
        return protected_ranges(recipe.protect, L, others, place, order)

    def run_own(self, reason: str, call: SdpaCall) -> Any:
        """The model's own attention, counted with the reason; torch's where an LSE is wanted."""
        own: Any = F.scaled_dot_product_attention if self.own is None else self.own
        own = _dense_with_lse if call.return_lse else own
        own = partial(own, call.query, call.key, call.value, **call.options)
        return self.site.run_own(reason, own, call.query, call.key, is_causal=call.is_causal)


# A graph finds ranges once, while it is traced, from plain numbers.


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_ranges(known: tuple[OpenRanges, ...], L: int) -> bool:
    """Refuse protected ranges that reach out of L tokens."""
    for ranges in known:
        absolute_ranges(ranges, L)
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def protected_ranges(
    ranges: OpenRanges, L: int, others: Ranges, place: tuple[int, ...], order: str
) -> Ranges:
    """Where protected tokens stand in attention, and the others that are protected with them.

    ranges: in the model's own order of L tokens. others: where they stand already. place: the grid
    of visual tokens and where it begins, if they are put in `order`; or empty.
    """
    own = tuple(absolute_ranges(ranges, L))
    if place and own:
        T, H, W, start = place
        own = Placed((T, H, W), start, order).move_ranges(own)
    return tuple(dict.fromkeys((*own, *others)))


def _dense_with_lse(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, enable_gqa: bool, **given: Any
) -> tuple[Tensor, Tensor]:
    if dropout_p > 0.0:
        raise ValueError(f"return_lse must be False with dropout, got dropout_p {dropout_p}")
    shared = enable_gqa or key.shape[1] < query.shape[1]
    return attention(query, key, value, **given, enable_gqa=shared, backend=DENSE, return_lse=True)


class _Running:
    """busy: a route serves an intercepted call. route: of a processor that is running."""

    def __init__(self) -> None:
        # Of the instance from the start: a graph compares where an attribute is.
        self.busy = False
        self.route: Route | None = None


class _InThread(_Running, threading.local): ...


_in_thread, _tracing = _InThread(), _Running()


def running() -> _Running:
    """What this thread is about, or the graph that is traced, which cannot read what a thread has
    of its own."""
    return _tracing if torch.compiler.is_compiling() else _in_thread


class Intercept(TorchFunctionMode):
    """Sends calls of `F.scaled_dot_product_attention` to a route, in this thread, while entered."""

    def __init__(self, route: Callable[..., Tensor]) -> None:
        super().__init__()
        self.route = route

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # a graph cannot follow it to the method of its base class
            return torch.unflatten(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        # What the route calls must not reach an interception around this one.
        here = running()
        if here.busy:
            return func(*args, **kwargs)
        here.busy = True
        try:
            return self.route(*args, **kwargs)
        finally:
            here.busy = False
