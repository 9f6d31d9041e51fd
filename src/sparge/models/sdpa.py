"""Calls of `F.scaled_dot_product_attention`, intercepted and served by a site.

The interception holds inside a `with` block and in its thread only, and is traced by compiled
graphs.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..api.attention import attention
from ..routing import DENSE
from ..values.geometry import MAX_HEAD_DIM
from ..values.recipe import Recipe
from .clock import known_recipes
from .site import Site, allowed_blocks
from .tokens import Placed, Tokens, absolute_ranges, with_protected
from .ulysses import HeadShare

Own = Callable[..., Tensor]
"""The model's own attention, with the arguments of `F.scaled_dot_product_attention`."""
_numbers = itertools.count()
_routes: weakref.WeakValueDictionary[int, Route] = weakref.WeakValueDictionary()

CROSS = "cross-attention: its keys are of other tokens than its queries"


class Route:
    """Serves the attention calls of one site: sparse, or by the model's own attention.

    own: None is SDPA itself. cross: serve attention to other tokens, too.
    """

    def __init__(
        self, site: Site, tokens: Tokens | None = None, own: Own | None = None, cross: bool = False
    ) -> None:
        self.site, self.tokens, self.own, self.cross = site, tokens, own, cross
        self._register()

    def _register(self) -> None:
        self.number, self.checked = next(_numbers), set[int]()
        _routes[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        kept = ("site", "tokens", "own", "cross")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        return_lse: bool = False,
        share: HeadShare | None = None,
    ) -> Any:
        """The output, or `(out, lse)`. share: the heads of this call, where others have the rest of
        those that the site's recipe is for."""
        site, tokens = self.site, self.tokens
        recipe, windowed = self.recipes(share)
        Lq, Lk = query.shape[-2], key.shape[-2]
        self_attention = query.dim() == 4 and Lq == Lk
        if self_attention:
            _check_ranges(self.number, int(Lq))
        # A causal call goes by the order of the tokens: only a permuted model may change that.
        stays = is_causal and not (tokens is not None and tokens.permuted)
        placed = self.place(int(Lq)) if self_attention and not stays else None
        if tokens is not None and tokens.permuted:
            at = placed if self_attention else self.place(int(Lq))
            attn_mask = attn_mask if at is None else at.reorder_mask(attn_mask, Lq, Lk)
        rest = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        reason = self.why_own(query, key, value, dropout_p, enable_gqa, recipe)
        if reason:
            given = {"attn_mask": attn_mask, "dropout_p": dropout_p, **rest}
            return self.run_own(reason, query, key, value, return_lse=return_lse, **given)
        assert recipe is not None
        recipe = windowed if is_causal and attn_mask is not None else recipe
        assert recipe is not None
        inside = placed is not None and tokens is not None and not tokens.permuted
        if inside:
            assert placed is not None
            query, key, value = (placed.reorder(x) for x in (query, key, value))
            attn_mask = placed.reorder_mask(attn_mask, Lq, Lk)
        recipe = self._protected(recipe, int(Lq), placed)
        # One key head for all queries is broadcast by SDPA, and shared here.
        shared = enable_gqa or key.shape[1] < query.shape[1]
        arguments = {"attn_mask": attn_mask, **rest, "enable_gqa": shared}
        if return_lse:
            out, lse = site.attend(query, key, value, arguments, recipe=recipe, return_lse=True)
            if inside and placed is not None:
                return placed.restore(out), placed.restore(lse, dim=-1)
            return out, lse
        out = site.attend(query, key, value, arguments, recipe=recipe)
        return placed.restore(out) if inside and placed is not None else out

    def recipes(self, share: HeadShare | None = None) -> tuple[Recipe | None, Recipe | None]:
        """The recipe of a call made now, and the one with its causal window as a number."""
        recipe, windowed = self.site.recipes()
        if share is None or recipe is None or windowed is None:
            return recipe, windowed
        return share.recipe_of(recipe), share.recipe_of(windowed)

    def place(self, L: int) -> Placed | None:
        found = None if self.tokens is None else self.tokens.map_of(L)
        if found is None or self.tokens is None:
            return None
        start = found.start(L)
        return None if start is None else Placed(found.grid, start, self.tokens.order)

    def _protected(self, recipe: Recipe, L: int, placed: Placed | None) -> Recipe:
        tokens = self.tokens
        found = None if tokens is None or not tokens.protect_text else tokens.map_of(L)
        others = () if found is None else found.others(L)
        if not others and not recipe.protect:
            return recipe
        place = () if placed is None else (*placed.grid, placed.start)
        order = "" if placed is None else placed.order
        name = _prepare(self.number, recipe.to_json(), L, others, place, order)
        made: Recipe = getattr(self, name)
        return made

    def why_own(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        enable_gqa: bool,
        recipe: Recipe | None,
        *,
        lengths: tuple[int, int] | None = None,
    ) -> str:
        """Why the model's own attention must run, or "".

        lengths: of the queries and of the keys, where the tensors are parts of them.
        """
        Lq, Lk = (query.shape[-2], key.shape[-2]) if lengths is None else lengths
        if self.tokens is not None and (unknown := self.tokens.why_unknown(Lq)):
            return unknown
        if recipe is None:
            return self.site.left_out
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            return f"tensors of {query.dim()} dimensions; sparge takes 4: [B, H, L, D]"
        if query.shape[0] != key.shape[0] or key.shape[0] != value.shape[0]:
            return "a batch of keys that is broadcast"
        heads = {key.shape[1], value.shape[1]}
        if not enable_gqa and heads not in ({query.shape[1]}, {1}):
            return "heads that are broadcast"
        if Lq != Lk and not self.cross:
            return CROSS
        if dropout_p > 0.0:
            return f"dropout {dropout_p}: sparge has none"
        if Lq == 1:
            return "one query: dense attention is faster"
        if 0 in (*query.shape, *key.shape, *value.shape):
            return "an empty tensor"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return "a gradient is wanted: torch's own is faster; sparge runs under no_grad"
        head_dim = max(query.shape[3], value.shape[3])
        if head_dim > MAX_HEAD_DIM:
            return f"head dim {head_dim} is over {MAX_HEAD_DIM}"
        return ""

    def run_own(
        self,
        reason: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        return_lse: bool = False,
        **given: Any,
    ) -> Any:
        """The model's own attention, counted with the reason; torch's where an LSE is wanted."""
        own: Any = F.scaled_dot_product_attention if self.own is None else self.own
        own = _dense_with_lse if return_lse else own
        if torch.compiler.is_compiling():
            return own(query, key, value, **given)
        start = time.perf_counter()
        out = own(query, key, value, **given)
        seconds = time.perf_counter() - start
        if query.dim() == 4:
            blocks = allowed_blocks(query, key, is_causal=given["is_causal"])
            self.site.note_own(reason, seconds, blocks)
        else:
            self.site.note_own(reason, seconds, 0)
        return out


def _dense_with_lse(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, enable_gqa: bool, **given: Any
) -> tuple[Tensor, Tensor]:
    if dropout_p > 0.0:
        raise ValueError(f"return_lse must be False with dropout, got dropout_p {dropout_p}")
    shared = enable_gqa or key.shape[1] < query.shape[1]
    return attention(query, key, value, **given, enable_gqa=shared, backend=DENSE, return_lse=True)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_ranges(number: int, L: int) -> bool:
    """Refuse protected ranges that reach out of L tokens, in dense parts of a run, too."""
    route = _routes[number]
    if L not in route.checked:
        for recipe in known_recipes(route.site.recipe):
            absolute_ranges(recipe.protect, L)
        route.checked.add(L)
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare(
    number: int,
    text: str,
    L: int,
    others: tuple[tuple[int, int], ...],
    place: tuple[int, ...],
    order: str,
) -> str:
    """Make a recipe with protected tokens, and return the attribute of the route that holds it.

    A graph cannot make a recipe. It runs this once, while it is traced, and reads the attribute.
    """
    route = _routes[number]
    name = f"_recipe_{hash((text, L, others, place, order)) & (1 << 64) - 1:x}"
    if name not in vars(route):
        placed = Placed((place[0], place[1], place[2]), place[3], order) if place else None
        setattr(route, name, with_protected(text, L, others, placed))
    return name


class _InThread(threading.local):
    busy = False
    route: Route | None = None


class _Tracing:
    """In place of the above while a graph is traced, which cannot read a thread's own values."""

    def __init__(self) -> None:
        # Of the instance from the start: a graph compares where an attribute is.
        self.busy = False
        self.route: Route | None = None


_in_thread, _tracing = _InThread(), _Tracing()


def running() -> Any:
    """What this thread, or the graph that is traced, is about: `busy` while a route serves an
    intercepted call, and the `route` of a processor that is running."""
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
