"""One attention module of a model: its settings, its calls and what was counted of them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..api.accuracy import output_error
from ..api.attention import attention
from ..engine.recording import unwatch, watch
from ..routing import AUTO
from ..values.geometry import allowed_blocks as blocks_of_head
from ..values.recipe import Recipe
from ..values.run import Run
from ..values.schedule import Context
from .report import LayerReport
from .tally import Tally, is_sparse

SITE = "_sparge_site"
"""The attribute of a module that holds its site."""
Tap = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], None]
"""query, key, value, and the other arguments of `attention`."""
_numbers = itertools.count()


RecipeOf = Callable[[Context], Recipe | None]
# By the id of a handle, for this thread or task. A ContextVar of each handle would never be freed.
_contexts: ContextVar[Mapping[int, Context]] = ContextVar(
    "sparge_contexts", default=MappingProxyType({})
)


@contextmanager
def inside(handle: object, context: Context) -> Iterator[None]:
    token = _contexts.set({**_contexts.get(), id(handle): context})
    try:
        yield
    finally:
        _contexts.reset(token)


def site_of(module: nn.Module) -> Site | None:
    return vars(module).get(SITE)


@dataclass(eq=False, repr=False)
class Site:
    """The settings and counts of one attention module.

    recipe: of every call, or a function of the context; None leaves the module its own attention,
    and `left_out` says why. own: what the adapter needs to run that attention.
    follows_clock: its recipe is looked up when the handle's context changes (`turn_to`), not in
    every call; compiled graphs then hold one variant for each recipe, and none for each step.
    holder: returns the handle of the site, or None. tap: is called with the arguments of every
    `sparge.attention`, outside of compiled graphs. A copy of a site has its settings alone; a
    handle that is copied with it takes it over.
    """

    name: str
    recipe: Recipe | RecipeOf | None
    backend: str = AUTO
    measure_error: bool = False
    left_out: str = ""
    own: Any = None
    follows_clock: bool = False

    def __post_init__(self) -> None:
        self.holder: Callable[[], Any] = lambda: None
        self.tap: Tap | None = None
        self.windowed = with_window(self.recipe) if isinstance(self.recipe, Recipe) else None
        self.now: Recipe | None = None
        self._refusal: ValueError | None = None
        self.context = Context()
        # Two models may have layers of one name; a label belongs to one site.
        self.label = f"{self.name}#{next(_numbers)}"
        self._lock, self._tally, self._last = threading.Lock(), Tally(), threading.local()
        # A compiled graph would keep the recipe of its first call.
        self._recipe_in_context = torch.compiler.disable(self._call_recipe)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def open(self, handle: object) -> None:
        """Count the runs of this site's label for a handle, until `close()`."""
        self.holder = weakref.ref(handle)
        note = weakref.WeakMethod(self._note)  # a model that is dropped takes its sites with it
        watch(self.label, lambda run: (to := note()) and to(run))
        weakref.finalize(self, unwatch, self.label).atexit = False

    def close(self) -> None:
        unwatch(self.label)

    def recipes(self) -> tuple[Recipe | None, Recipe | None]:
        """The recipe of a call made now, and the same with its causal window as a number.

        The second is for a mask that has the diagonal in it, which `attention` cannot see there.
        """
        if self.recipe is None or isinstance(self.recipe, Recipe):
            return self.recipe, self.windowed
        if self.follows_clock:
            if self._refusal is not None:
                raise self._refusal
            return self.now, self.windowed
        recipe: Recipe | None = self._recipe_in_context()
        return recipe, recipe and with_window(recipe)

    @property
    def is_sparse(self) -> bool:
        """Whether a call made now would be sparse, as far as its settings say."""
        return (
            self.now if self.follows_clock and callable(self.recipe) else self.recipe
        ) is not None

    def turn_to(self, context: Context) -> None:
        """Take the recipe of a context, and count calls from now on for its step."""
        self.context, self._refusal = context, None
        if self.follows_clock and callable(self.recipe):
            try:
                self.now = self.recipe(context)
            except ValueError as error:  # outside of a run that is no mistake yet
                self.now, self._refusal = None, error
            self.windowed = self.now and _windowed(self.now)

    def _call_recipe(self) -> Recipe | None:
        context = _contexts.get().get(id(self.holder()), Context())
        return self.recipe(context) if callable(self.recipe) else self.recipe

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
        *,
        recipe: Recipe | None,
        return_lse: bool = False,
    ) -> Any:
        """`sparge.attention` by this site's settings, tapped, measured and counted."""
        by_hand = not torch.compiler.is_compiling()
        if by_hand and self.tap is not None:
            self.tap(query, key, value, arguments)
        chosen: dict[str, Any] = {"recipe": recipe, "backend": self.backend}
        chosen |= {"label": self.label, "return_lse": return_lse}
        result = attention(query, key, value, **arguments, **chosen)
        if by_hand and self.measure_error and getattr(self._last, "measurable", False):
            out = result[0] if return_lse else result
            error = output_error(query, key, value, out, **arguments).mean(0).tolist()
            with self._lock:
                self._tally.add_error(error)
        return result

    def reset(self) -> None:
        with self._lock:
            self._tally = Tally()

    def note_own(self, reason: str, seconds: float, blocks: int) -> None:
        """The model's own attention ran, over this many blocks (see `allowed_blocks`)."""
        with self._lock:
            self._tally.add_own(reason, seconds, blocks, self.context)

    def note_parallel(self, way: str) -> None:
        """A call over several processes ran in this way."""
        with self._lock:
            self._tally.parallel[way] += 1

    def _note(self, run: Run) -> None:
        self._last.measurable = is_sparse(run) and not run.captured
        given = self.recipe if isinstance(self.recipe, Recipe) else run.recipe
        with self._lock:
            self._tally.add(run, given, self.context)

    def report(self) -> LayerReport:
        """What was counted so far; waits for calls that a device has not finished."""
        with self._lock:
            recipe = self.recipe if isinstance(self.recipe, Recipe) else None
            return self._tally.report(self.name, recipe)


@lru_cache(maxsize=256)
def _windowed(recipe: Recipe) -> Recipe:
    """`with_window`, the same object for the same recipe: a graph is compiled for each object."""
    return with_window(recipe)


def with_window(recipe: Recipe) -> Recipe:
    return replace(recipe, local_blocks=recipe.window(True))


def allowed_blocks(query: Tensor, key: Tensor, *, is_causal: bool, offset: int = 0) -> int:
    """Blocks that attention may compute, over batch and heads; padding is not looked at.

    offset: a causal query row i may attend keys up to `i + offset`.
    """
    B, Hq, Lq = query.shape[:3]
    return B * Hq * blocks_of_head(Lq, key.shape[2], is_causal=is_causal, offset=offset)
