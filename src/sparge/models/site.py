"""One attention module of a model: its settings, its calls and what was counted of them."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..api.accuracy import output_error
from ..api.attention import attention_and_run
from ..api.varlen import attend_packed
from ..engine.execute_varlen import sequence
from ..engine.recording import GRAPH_LISTENERS
from ..routing import AUTO, DENSE, backends
from ..values.call import allowed_blocks as blocks_of_head
from ..values.recipe import Recipe
from ..values.run import Run
from ..values.schedule import Context
from .report import LayerReport, Tally, is_sparse
from .ulysses import ONE_SELECTION

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


def check_backend(backend: str) -> None:
    known = (AUTO, DENSE, *(each.name for each in backends()))
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
        # Two recipes are kept ready, because a compiled graph cannot make one.
        self.now = self.recipe if isinstance(self.recipe, Recipe) else None
        self.now_in_mask = self.now and with_causal_window(self.now)
        self._refusal: ValueError | None = None
        self.context = Context()
        # Two models may have layers of one name; a label belongs to one site.
        self.label = f"{self.name}#{next(_numbers)}"
        self.tally, self.is_open = Tally(), False
        # A compiled graph would keep the recipe of its first call.
        self._recipe_in_context = torch.compiler.disable(self._call_recipe)

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def open(self, handle: object) -> None:
        """Count the calls of this site for a handle, until `close()`."""
        self.holder, self.is_open = weakref.ref(handle), True
        GRAPH_LISTENERS.add(self.label, self)

    def close(self) -> None:
        self.is_open = False
        GRAPH_LISTENERS.remove(self.label)

    def recipe_now(self, *, diagonal_in_mask: bool = False) -> Recipe | None:
        """The recipe of a call made now; None leaves it to the model's own attention.

        diagonal_in_mask: the call is causal by its mask, where `attention` cannot see it; the
        recipe then has its causal window as a number.
        """
        if self.recipe is None or isinstance(self.recipe, Recipe) or self.follows_clock:
            if self._refusal is not None:
                raise self._refusal
            return self.now_in_mask if diagonal_in_mask else self.now
        recipe: Recipe | None = self._recipe_in_context(diagonal_in_mask)
        return recipe

    @property
    def is_sparse(self) -> bool:
        """Whether a call made now would be sparse, as far as its settings say."""
        return self.now is not None or (callable(self.recipe) and not self.follows_clock)

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
        by_hand = not torch.compiler.is_compiling()
        if by_hand and self.tap is not None:
            self.tap(query, key, value, arguments)
        out, lse, run = attention_and_run(
            query,
            key,
            value,
            **arguments,
            recipe=recipe,
            backend=self.backend,
            return_lse=return_lse,
            label=self.label,
            protect=protect,
            recorded=by_hand and self.is_open,
        )
        if run is not None and self.is_open:
            self.note(run)
            self._measure(run, query, key, value, out, arguments)
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
        bounds = (cuts, cuts)
        sequences = [sequence(query, key, value, bounds, i) for i in range(len(cuts) - 1)]
        if self.tap is not None:
            for one in sequences:
                assert one.value is not None
                self.tap(one.query, one.key, one.value, {"attn_mask": None, **arguments})
        out, lse, run = attend_packed(
            query,
            key,
            value,
            bounds,
            **arguments,
            causal_align="top_left",
            recipe=recipe,
            backend=self.backend,
            return_lse=return_lse,
            recorded=self.is_open,
        )
        if run is not None and self.is_open:
            self.note(run)
            outs = (out[a:b].transpose(0, 1).unsqueeze(0) for a, b in pairwise(cuts))
            for one, part, made in zip(sequences, run.parts, outs, strict=True):
                assert one.value is not None
                self._measure(part, one.query, one.key, one.value, made, arguments)
        return out, lse

    def attend_ring(
        self, query: Tensor, key: Tensor, value: Tensor, *, recipe: Recipe, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`sparge.parallel.ring_attention` in the same way, of this process' part of a sequence.

        Returns the output and its LSE, if wanted. Not tapped or measured: no process has it all.
        """
        from ..parallel.ring import ring_attention_and_run

        out, lse, run = ring_attention_and_run(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            **arguments,
            recipe=recipe,
            backend=self.backend,
            label=self.label,
            recorded=self.is_open,
        )
        if run is not None and self.is_open:
            self.note(run)
        self.tally.add_parallel(ONE_SELECTION)
        return out, lse

    def _measure(
        self,
        run: Run,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        arguments: dict[str, Any],
    ) -> None:
        if self.measure_error and is_sparse(run) and not run.captured:
            error = output_error(query, key, value, out, **arguments)
            self.tally.add_error(error.mean(0).tolist())

    def run_own(
        self,
        reason: str,
        own: Callable[[], Any],
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool,
        offset: int = 0,
    ) -> Any:
        """The model's own attention, timed and counted with the reason; a compiled graph counts
        nothing. offset: a causal query row i may attend keys up to `i + offset`."""
        if torch.compiler.is_compiling():
            return own()
        start = time.perf_counter()
        result = own()
        seconds = time.perf_counter() - start
        blocks = 0
        if query.dim() == 4:
            blocks = allowed_blocks(query, key, is_causal=is_causal, offset=offset)
        self.note_own(reason, seconds, blocks)
        return result

    def reset(self) -> None:
        self.tally = Tally()

    def note_own(self, reason: str, seconds: float, blocks: int) -> None:
        """The model's own attention ran, over this many blocks (see `allowed_blocks`)."""
        self.tally.add_own(reason, seconds, blocks, self.context)

    def note(self, run: Run) -> None:
        """A call of this site ran; compiled graphs tell it from any thread."""
        given = self.recipe if isinstance(self.recipe, Recipe) else run.recipe
        self.tally.add(run, recipe=given, context=self.context)

    def report(self) -> LayerReport:
        """What was counted so far; waits for calls that a device has not finished."""
        return self.tally.report(
            self.name, self.recipe if isinstance(self.recipe, Recipe) else None
        )


@lru_cache(maxsize=256)
def with_causal_window(recipe: Recipe) -> Recipe:
    """A recipe with its causal window as a number; the same object for the same recipe, because a
    graph is compiled for each object."""
    return replace(recipe, local_blocks=recipe.window(True))


def allowed_blocks(query: Tensor, key: Tensor, *, is_causal: bool, offset: int = 0) -> int:
    """Blocks that attention may compute, over batch and heads; padding is not looked at.

    offset: a causal query row i may attend keys up to `i + offset`.
    """
    B, Hq, Lq = query.shape[:3]
    return B * Hq * blocks_of_head(Lq, key.shape[2], is_causal=is_causal, offset=offset)
