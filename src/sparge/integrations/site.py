"""One attention module of a model: its settings, its calls and what was counted of them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import output_error
from ..api import attention
from ..dispatch import AUTO
from ..geometry import BLOCK_K, BLOCK_Q, n_blocks
from ..recipe import Recipe
from ..record import Run, unwatch, watch
from .context import Context, context_of
from .report import OWN, LayerReport, RecipeReport

SITE = "_sparge_site"
"""The attribute of a module that holds its site."""
Tap = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], None]
"""query, key, value, and the other arguments of `attention`."""
RecipeOf = Callable[[Context], Recipe | None]
_numbers = itertools.count()


def site_of(module: nn.Module) -> Site | None:
    return vars(module).get(SITE)


@dataclass
class _Blocks:
    calls: int = 0
    kept: int = 0
    allowed: int = 0

    def add(self, kept: int, allowed: int) -> None:
        self.calls += 1
        self.kept += kept
        self.allowed += allowed


@dataclass
class _Tally:
    ran: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    estimated: int = 0
    blocks: _Blocks = field(default_factory=_Blocks)
    by_recipe: dict[Recipe, _Blocks] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    pv_skips: int = 0
    pv_groups: int = 0
    errors: list[float] = field(default_factory=list)
    errors_seen: int = 0
    seconds: float = 0.0


class Site:
    """The settings and counts of one attention module.

    recipe: of every call, or a function of the context; None leaves the module its own attention,
    and `left_out` says why. own: what the adapter needs to run that attention.
    holder: the handle that made it. tap: is called with the arguments of every `sparge.attention`,
    outside of compiled graphs. A copy of a site has the settings and its own counts; a handle that
    is copied with it takes it over.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe | RecipeOf | None,
        *,
        backend: str = AUTO,
        measure_error: bool = False,
        left_out: str = "",
    ) -> None:
        self.name, self.recipe, self.backend = name, recipe, backend
        self.measure_error, self.left_out = measure_error, left_out
        self.own: Any = None
        self.watched = False
        self.holder: weakref.ref[Any] | None = None
        self.handle_number = -1
        self.windowed = with_window(recipe) if isinstance(recipe, Recipe) else None
        self.tap: Tap | None = None
        self._begin()

    def _begin(self) -> None:
        # Two models may have layers of one name; a label belongs to one site.
        self.label = f"{self.name}#{next(_numbers)}"
        self._lock, self._tally, self._last = threading.Lock(), _Tally(), threading.local()
        self._recipe_in_context: Any = None
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            # A compiled graph would keep the recipe of its first call.
            recipe_of = self.recipe
            self._recipe_in_context = torch.compiler.disable(
                lambda handle: recipe_of(context_of(handle))
            )

    def __getstate__(self) -> dict[str, Any]:
        begun = ("label", "_lock", "_tally", "_last", "_recipe_in_context", "holder", "tap")
        return {name: value for name, value in vars(self).items() if name not in begun}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.holder = self.tap = None
        self._begin()
        if self.watched:
            self.open()

    def open(self) -> None:
        """Count the runs of this site's label, until `close()`."""
        self.watched = True
        note = weakref.WeakMethod(self._note)  # a model that is dropped takes its sites with it
        watch(self.label, lambda run: (to := note()) and to(run))
        weakref.finalize(self, unwatch, self.label).atexit = False

    def close(self) -> None:
        self.watched = False
        unwatch(self.label)

    def recipes(self) -> tuple[Recipe | None, Recipe | None]:
        """The recipe of a call made now, and the same with its causal window as a number.

        The second is for a mask that has the diagonal in it, which `attention` cannot see there.
        """
        if self.recipe is None or isinstance(self.recipe, Recipe):
            return self.recipe, self.windowed
        recipe: Recipe | None = self._recipe_in_context(self.handle_number)
        return recipe, recipe and with_window(recipe)

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
        chosen: dict[str, Any] = {"recipe": recipe, "backend": self.backend, "label": self.label}
        result: Any = attention(query, key, value, **arguments, **chosen, return_lse=return_lse)
        if by_hand and self.measure_error and getattr(self._last, "sparse", False):
            out = result[0] if return_lse else result
            self._note_error(output_error(query, key, value, out, **arguments).mean(0).tolist())
        return result

    def reset(self) -> None:
        with self._lock:
            self._tally = _Tally()

    def note_own(self, reason: str, seconds: float, blocks: int) -> None:
        """The model's own attention ran, over this many blocks (see `allowed_blocks`)."""
        with self._lock:
            self._tally.ran[OWN] += 1
            self._tally.fallbacks[reason] += 1
            self._tally.seconds += seconds
            self._tally.blocks.add(blocks, blocks)

    def _note_error(self, errors: Sequence[float]) -> None:
        with self._lock:
            tally = self._tally
            tally.errors = _added(tally.errors, errors)
            tally.errors_seen += 1

    def _note(self, run: Run) -> None:
        self._last.sparse = bool(run.kept_by_head)
        with self._lock:
            tally = self._tally
            tally.seconds += run.seconds["total"]
            tally.blocks.add(run.kept, run.allowed)
            given = self.recipe if isinstance(self.recipe, Recipe) else run.recipe
            tally.by_recipe.setdefault(given, _Blocks()).add(run.kept, run.allowed)
            tally.estimated += getattr(run, "cost_source", "") == "estimate"
            if not run.kept_by_head:
                tally.ran["dense"] += 1
                tally.fallbacks[run.reason] += 1
                return
            tally.ran[f"{run.backend} ({run.isa})"] += 1
            tally.kept = _added(tally.kept, run.kept_by_head)
            tally.allowed = _added(tally.allowed, run.allowed_by_head)
            tally.pv_skips += run.pv_skips
            tally.pv_groups += run.pv_groups

    def report(self) -> LayerReport:
        with self._lock:
            tally = self._tally
            pairs = list(zip(tally.kept, tally.allowed, strict=True))
            return LayerReport(
                name=self.name,
                calls=sum(tally.ran.values()),
                ran=dict(tally.ran),
                kept=tally.blocks.kept,
                allowed=tally.blocks.allowed,
                sparse_density=sum(tally.kept) / max(sum(tally.allowed), 1) if pairs else 1.0,
                density_by_head=tuple(kept / max(allowed, 1) for kept, allowed in pairs),
                pv_skipped=tally.pv_skips / tally.pv_groups if tally.pv_groups else 0.0,
                error_by_head=tuple(e / tally.errors_seen for e in tally.errors) or None,
                seconds=tally.seconds,
                fallbacks=dict(tally.fallbacks),
                recipe=self.recipe if isinstance(self.recipe, Recipe) else None,
                by_recipe=tuple(
                    RecipeReport(recipe, **vars(blocks))
                    for recipe, blocks in tally.by_recipe.items()
                ),
                estimated=tally.estimated,
            )


def with_window(recipe: Recipe) -> Recipe:
    return replace(recipe, local_blocks=recipe.window(True))


def allowed_blocks(query: Tensor, key: Tensor, *, is_causal: bool, offset: int = 0) -> int:
    """Blocks that attention may compute, over batch and heads; padding is not looked at.

    offset: a causal query row i may attend keys up to `i + offset`.
    """
    B, Hq, Lq = query.shape[:3]
    n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(key.shape[2], BLOCK_K)
    if not is_causal:
        return B * Hq * n_q * n_k
    ends = (min((i + 1) * BLOCK_Q, Lq) + offset for i in range(n_q))
    return B * Hq * sum(min(n_blocks(max(end, 0), BLOCK_K), n_k) for end in ends)


def _added(sums: list[Any], numbers: Sequence[Any]) -> list[Any]:
    return [a + b for a, b in zip(sums, numbers, strict=True)] if sums else list(numbers)
