"""One attention module of a model: its settings, its calls and what was counted of them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import output_error
from ..api import attention
from ..dispatch import AUTO
from ..geometry import BLOCK_K, BLOCK_Q, n_blocks
from ..recipe import Recipe
from ..record import Run, unwatch, watch
from ..schedule import Context
from .plan_reuse import PlanKeeper
from .report import OWN, LayerReport, RecipeReport, StepReport

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


@dataclass
class _StepTally:
    """Sums over the calls of one step of a run; by head over those that ran sparse."""

    noise_level: float | None = None
    calls: int = 0
    kept: int = 0
    allowed: int = 0
    kept_by_head: list[int] = field(default_factory=list)
    allowed_by_head: list[int] = field(default_factory=list)

    def add(self, kept: int, allowed: int, run: Run | None = None) -> None:
        self.calls += 1
        self.kept += kept
        self.allowed += allowed
        if run is not None and run.kept_by_head:
            self.kept_by_head = _added(self.kept_by_head, run.kept_by_head)
            self.allowed_by_head = _added(self.allowed_by_head, run.allowed_by_head)

    def report(self, step: int) -> StepReport:
        pairs = zip(self.kept_by_head, self.allowed_by_head, strict=True)
        heads = tuple(kept / max(allowed, 1) for kept, allowed in pairs)
        return StepReport(step, self.noise_level, self.calls, self.kept, self.allowed, heads)


def _added(sums: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """Sums by head; they begin again where a call has another number of heads than those before.

    A model that is split by heads while it is accelerated has fewer from then on.
    """
    if len(sums) != len(numbers):
        sums = [0] * len(numbers)
    return [a + b for a, b in zip(sums, numbers, strict=True)]


@dataclass
class _Tally:
    """Sums over calls; `by_head` over those that ran sparse."""

    ran: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    by_recipe: dict[Recipe, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_head: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    by_step: dict[int, _StepTally] = field(default_factory=dict)
    parallel: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add_by_head(self, name: str, numbers: Sequence[float]) -> None:
        self.by_head[name] = _added(self.by_head[name], numbers)

    def at(self, context: Context) -> _StepTally:
        """The sums of a step; outside of a run nothing is kept by step."""
        if context.step is None:
            return _StepTally()
        return self.by_step.setdefault(context.step, _StepTally(context.noise_level))


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
        self._keeper = PlanKeeper()
        # Two models may have layers of one name; a label belongs to one site.
        self.label = f"{self.name}#{next(_numbers)}"
        self._lock, self._tally, self._last = threading.Lock(), _Tally(), threading.local()
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
        result = None
        if by_hand and recipe is not None and not return_lse:
            result = self._attend_with_kept_plan(query, key, value, arguments, recipe)
        if result is None:
            chosen: dict[str, Any] = {"recipe": recipe, "backend": self.backend}
            chosen |= {"label": self.label, "return_lse": return_lse}
            result = attention(query, key, value, **arguments, **chosen)
        if by_hand and self.measure_error and getattr(self._last, "sparse", False):
            out = result[0] if return_lse else result
            error = output_error(query, key, value, out, **arguments).mean(0).tolist()
            with self._lock:
                if len(error) != len(self._tally.by_head["error"]):
                    self._tally.counts["measured"] = 0  # sums by head begin again
                self._tally.add_by_head("error", error)
                self._tally.counts["measured"] += 1
        return result

    def _attend_with_kept_plan(
        self, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any], recipe: Recipe
    ) -> Tensor | None:
        """The output by a plan of an earlier step, or by one that is kept for later steps; None
        where the schedule keeps none."""
        schedule, step = getattr(self.recipe, "schedule", None), self.context.step
        if schedule is None or not schedule.reuse_steps or step is None:
            return None
        done = self._keeper.attend(
            query,
            key,
            value,
            arguments,
            recipe=recipe,
            backend=self.backend,
            schedule=schedule,
            step=step,
        )
        if done is None:
            return None
        out, run, reused = done
        self._note(run)
        with self._lock:
            self._tally.counts["reused"] += reused
        return out

    def reset(self) -> None:
        with self._lock:
            self._tally = _Tally()

    def note_own(self, reason: str, seconds: float, blocks: int) -> None:
        """The model's own attention ran, over this many blocks (see `allowed_blocks`)."""
        with self._lock:
            self._tally.ran[OWN] += 1
            self._tally.fallbacks[reason] += 1
            self._tally.seconds += seconds
            self._tally.counts.update(kept=blocks, allowed=blocks)
            self._tally.at(self.context).add(blocks, blocks)

    def note_parallel(self, way: str) -> None:
        """A call over several processes ran in this way."""
        with self._lock:
            self._tally.parallel[way] += 1

    def _note(self, run: Run) -> None:
        # A rank of a ring counts its own blocks, and none by head.
        in_ring = run.ring is not None and not run.routed_to_dense
        self._last.sparse = bool(run.kept_by_head) or in_ring
        given = self.recipe if isinstance(self.recipe, Recipe) else run.recipe
        with self._lock:
            tally = self._tally
            tally.seconds += run.seconds["total"]
            tally.counts.update(kept=run.kept, allowed=run.allowed)
            tally.at(self.context).add(run.kept, run.allowed, run)
            tally.counts["estimated"] += run.cost_source == "estimate"
            if run.ring is not None:
                tally.counts.update(sent=run.ring.bytes_sent, dense_sent=run.ring.dense_bytes)
            tally.by_recipe[given].update(calls=1, kept=run.kept, allowed=run.allowed)
            if not self._last.sparse:
                tally.ran["dense"] += 1
                tally.fallbacks[run.reason] += 1
                return
            tally.ran[f"{run.backend} ({run.isa})"] += 1
            tally.counts.update(pv_skips=run.pv_skips, pv_groups=run.pv_groups)
            tally.counts.update(sparse_kept=run.kept, sparse_allowed=run.allowed)
            if run.kept_by_head:
                tally.add_by_head("kept", run.kept_by_head)
                tally.add_by_head("allowed", run.allowed_by_head)

    def report(self) -> LayerReport:
        with self._lock:
            tally, counts = self._tally, self._tally.counts
            kept, allowed = tally.by_head["kept"], tally.by_head["allowed"]
            return LayerReport(
                name=self.name,
                calls=sum(tally.ran.values()),
                ran=dict(tally.ran),
                kept=counts["kept"],
                allowed=counts["allowed"],
                sparse_density=_share(counts["sparse_kept"], counts["sparse_allowed"]),
                density_by_head=tuple(k / max(a, 1) for k, a in zip(kept, allowed, strict=True)),
                pv_skipped=counts["pv_skips"] / max(counts["pv_groups"], 1),
                error_by_head=tuple(e / counts["measured"] for e in tally.by_head["error"]) or None,
                seconds=tally.seconds,
                fallbacks=dict(tally.fallbacks),
                recipe=self.recipe if isinstance(self.recipe, Recipe) else None,
                by_recipe=tuple(RecipeReport(r, **n) for r, n in tally.by_recipe.items()),
                estimated=counts["estimated"],
                plans_reused=counts["reused"],
                parallel=dict(tally.parallel),
                bytes_sent=counts["sent"],
                dense_ring_bytes=counts["dense_sent"],
                by_step=tuple(each.report(step) for step, each in sorted(tally.by_step.items())),
            )


def _share(kept: int, allowed: int) -> float:
    return kept / allowed if allowed else 1.0


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
    n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(key.shape[2], BLOCK_K)
    if not is_causal:
        return B * Hq * n_q * n_k
    ends = (min((i + 1) * BLOCK_Q, Lq) + offset for i in range(n_q))
    return B * Hq * sum(min(n_blocks(max(end, 0), BLOCK_K), n_k) for end in ends)
