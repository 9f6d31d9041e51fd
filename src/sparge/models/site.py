"""One attention module of a model: its settings, its calls and what was counted of them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..api.accuracy import output_error
from ..api.attention import attention_and_run
from ..api.varlen import attend_packed
from ..engine.recording import GRAPH_LISTENERS
from ..routing import AUTO, DENSE, backends
from ..values.call import allowed_blocks
from ..values.recipe import Recipe
from ..values.run import Run
from ..values.schedule import Context
from .report import LayerReport, Tally, is_sparse
from .ulysses import ONE_SELECTION

SITE = "_sparge_site"
"""The attribute of a module that holds its site."""
Tap = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], None]
"""query, key, value, and the other arguments of `attention`."""
RecipeOf = Callable[[Context], Recipe | None]
T = TypeVar("T")
_numbers = itertools.count()
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


def check_backend(backend: str) -> None:
    known = (AUTO, DENSE, *(found.name for found in backends()))
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}; got {backend!r}")


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
        self.fixed = self.recipe if isinstance(self.recipe, Recipe) else None
        self.asks_context = callable(self.recipe) and not self.follows_clock
        # Two recipes are kept ready, because a compiled graph cannot make one.
        self.now = self.fixed
        self.now_in_mask = self.now and with_causal_window(self.now)
        self._refusal: ValueError | None = None
        self.context = Context()
        # Two models may have layers of one name; a label belongs to one site.
        self.label = f"{self.name}#{next(_numbers)}"
        self.tally, self.is_open = Tally(), False
        # A compiled graph would keep the recipe of its first call.
        self._recipe_in_context = torch.compiler.disable(self._call_recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, setting.name) for setting in fields(self))

    def open(self, handle: object) -> None:
        """Count the calls of this site for a handle, until `close()`."""
        self.holder, self.is_open = weakref.ref(handle), True
        GRAPH_LISTENERS[self.label] = self

    def close(self) -> None:
        self.is_open = False
        GRAPH_LISTENERS.pop(self.label, None)

    def recipe_now(self, *, diagonal_in_mask: bool = False) -> Recipe | None:
        """The recipe of a call made now; None leaves it to the model's own attention.

        diagonal_in_mask: the call is causal by its mask, where `attention` cannot see it; the
        recipe then has its causal window as a number.
        """
        if self.asks_context:
            recipe: Recipe | None = self._recipe_in_context(diagonal_in_mask)
            return recipe
        if self._refusal is not None:
            raise self._refusal
        return self.now_in_mask if diagonal_in_mask else self.now

    @property
    def is_sparse(self) -> bool:
        """Whether a call made now would be sparse, as far as its settings say."""
        return self.now is not None or self.asks_context

    def turn_to(self, context: Context) -> None:
        """Take the recipe of a context, and count calls from now on for its step."""
        self.context, self._refusal = context, None
        if self.follows_clock and callable(self.recipe):
            try:
                self.now = self.recipe(context)
            except ValueError as error:  # outside of a run that is no mistake yet
                self.now, self._refusal = None, error
            self.now_in_mask = self.now and with_causal_window(self.now)

    def _call_recipe(self, diagonal_in_mask: bool) -> Recipe | None:
        assert callable(self.recipe)
        recipe = self.recipe(_contexts.get().get(id(self.holder()), Context()))
        return recipe and with_causal_window(recipe) if diagonal_in_mask else recipe

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
        *,
        recipe: Recipe | None,
        return_lse: bool = False,
        protect: tuple[tuple[int, int], ...] | None = None,
    ) -> Any:
        """`sparge.attention` by this site's settings, tapped, measured and counted.

        protect: token ranges in place of the recipe's.
        """
        if self.tap is not None and not torch.compiler.is_compiling():
            self.tap(query, key, value, arguments)
        given = {"recipe": recipe, "return_lse": return_lse, "protect": protect, **arguments}
        out, lse, run = self._counted(
            attention_and_run, query, key, value, label=self.label, **given
        )
        if run is not None:
            self._measure(run, (query, key, value, out), arguments)
        return (out, lse) if return_lse else out

    def attend_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cuts: list[int],
        *,
        recipe: Recipe | None,
        return_lse: bool = False,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`sparge.attention_varlen` in the same way, of the sequences `[T, H, D]` between the cuts;
        each is counted as a call. Not in compiled graphs."""
        if self.tap is not None:
            for q, k, v in _sequences(cuts, query, key, value):
                self.tap(q, k, v, {"attn_mask": None, **arguments})
        given = {"recipe": recipe, "return_lse": return_lse, **arguments}
        out, lse, run = self._counted(
            attend_packed, query, key, value, (cuts, cuts), causal_align="top_left", **given
        )
        if run is not None:
            sequences = _sequences(cuts, query, key, value, out)
            for part, views in zip(run.parts, sequences, strict=True):
                self._measure(part, views, arguments)
        return out, lse

    def attend_ring(
        self, query: Tensor, key: Tensor, value: Tensor, *, recipe: Recipe, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`sparge.parallel.ring_attention` in the same way, of this process' part of a sequence.

        Returns the output and its LSE, if wanted. Not tapped or measured: no process has it all.
        """
        from ..parallel.ring import ring_attention_and_run

        parts = (x.contiguous() for x in (query, key, value))
        out, lse, _ = self._counted(
            ring_attention_and_run, *parts, recipe=recipe, label=self.label, **arguments
        )
        self.tally.add_parallel(ONE_SELECTION)
        return out, lse

    def _counted(
        self,
        attend: Callable[..., tuple[Tensor, Tensor | None, Run | None]],
        *args: Any,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None, Run | None]:
        """What an attention returns; with its run only where the call is counted."""
        recorded = self.is_open and not torch.compiler.is_compiling()
        out, lse, run = attend(*args, backend=self.backend, recorded=recorded, **given)
        if run is None or not self.is_open:
            return out, lse, None
        self.note(run)
        return out, lse, run

    def _measure(self, run: Run, tensors: Sequence[Tensor], arguments: dict[str, Any]) -> None:
        """tensors: query, key, value and the output."""
        if self.measure_error and is_sparse(run) and not run.captured:
            self.tally.add_error(output_error(*tensors, **arguments).mean(0).double())

    def run_own(
        self,
        reason: str,
        own: Callable[[], T],
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool,
        offset: int = 0,
    ) -> T:
        """The model's own attention, timed and counted with the reason; a compiled graph counts
        nothing. offset: a causal query row i may attend keys up to `i + offset`."""
        if torch.compiler.is_compiling():
            return own()
        start = time.perf_counter()
        result = own()
        seconds = time.perf_counter() - start
        blocks = 0
        if query.dim() == 4:
            B, Hq, Lq = query.shape[:3]
            blocks = allowed_blocks(Lq, key.shape[2], is_causal=is_causal, offset=offset) * B * Hq
        self.note_own(reason, seconds, blocks)
        return result

    def reset(self) -> None:
        self.tally = Tally()

    def note_own(self, reason: str, seconds: float, blocks: int) -> None:
        """The model's own attention ran, over this many blocks of all heads and the batch."""
        self.tally.add_own(reason, seconds, blocks, self.context)

    def note(self, run: Run) -> None:
        """Count a call of this site; the ops of compiled graphs call this from any thread."""
        self.tally.add(run, recipe=self.fixed or run.recipe, context=self.context)

    def report(self) -> LayerReport:
        """What was counted so far; waits for calls that a device has not finished."""
        return self.tally.report(self.name, self.fixed)


@lru_cache(maxsize=256)
def with_causal_window(recipe: Recipe) -> Recipe:
    """A recipe with its causal window as a number; the same object for the same recipe, because a
    graph is compiled for each object."""
    return replace(recipe, local_blocks=recipe.window(True))


def _sequences(cuts: list[int], *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views `[1, H, L, D]` of these tensors for each sequence between the cuts."""
    for a, b in pairwise(cuts):
        yield tuple(x[a:b].transpose(0, 1).unsqueeze(0) for x in packed)
