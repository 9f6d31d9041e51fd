"""What an accelerated model did, layer by layer: the tally of its calls, and `handle.report()`.

A call on an accelerator is never waited for. Its counts arrive in host memory, and its times in
events; the tally adds both up once the device has passed them, and a report waits for the rest.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..values.backend import DENSE
from ..values.recipe import Recipe
from ..values.run import Run
from ..values.schedule import Context

OWN = "own attention"


class _Counted:
    """The part that reports of blocks share. `to_dict()` is plain JSON."""

    kept: int
    allowed: int

    @property
    def density(self) -> float:
        return self.kept / self.allowed if self.allowed else 1.0

    def to_dict(self) -> dict[str, Any]:
        plain = {name: _plain(value) for name, value in vars(self).items()}
        return {**plain, "density": self.density}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


@dataclass(frozen=True)
class RecipeReport(_Counted):
    """The calls of a layer with one recipe, and their blocks; dense calls included."""

    recipe: Recipe
    calls: int
    kept: int
    allowed: int


@dataclass(frozen=True)
class StepReport(_Counted):
    """The calls of a layer in one step of a diffusion run; density by head of the sparse ones."""

    step: int
    noise_level: float | None
    calls: int
    kept: int
    allowed: int
    density_by_head: tuple[float, ...]


@dataclass(frozen=True)
class LayerReport(_Counted):
    """What ran in one attention module since the start or the last `reset()`.

    ran: how often each way ran. fallbacks: why calls went to dense or to the model's own attention.
    kept, allowed: blocks over all calls; dense and own attention keep all of theirs.
    sparse_density, density_by_head, pv_skipped: over the calls that ran sparse. error_by_head:
    mean relative L1 against exact attention, where it was measured. seconds: time in attention; on
    a GPU, the model's own attention is only launched in it. recipe: None for a layer left out, or
    whose recipe depends on the context; by_recipe has one entry for each recipe that ran.
    estimated: calls whose backend was chosen by the built-in cost estimate.
    by_step: one entry for each step of a diffusion run; runs with the same steps are added up.
    parallel: how often each way of sharing a call among processes was taken; the figures are then
    those of this process: of its own heads ("ulysses") or its own queries ("ring").
    bytes_sent, dense_ring_bytes: by all processes of the rings, and what dense rings would send.
    waited: seconds of `seconds` for threads that other programs kept from running.
    captured: calls that were captured in a graph, by what they run. What they keep is not known, so
    no other figure has them; replays of the graph are not seen.
    """

    name: str
    calls: int
    ran: dict[str, int]
    kept: int
    allowed: int
    sparse_density: float
    density_by_head: tuple[float, ...]
    pv_skipped: float
    error_by_head: tuple[float, ...] | None
    seconds: float
    fallbacks: dict[str, int]
    recipe: Recipe | None
    by_recipe: tuple[RecipeReport, ...]
    estimated: int
    by_step: tuple[StepReport, ...] = ()
    parallel: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    dense_ring_bytes: int = 0
    captured: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0

    @property
    def error(self) -> float | None:
        return _mean(self.error_by_head or ())

    @property
    def sparse_calls(self) -> int:
        return sum(n for way, n in self.ran.items() if way not in (OWN, "dense"))

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "error": self.error}


@dataclass(frozen=True)
class Report:
    """One report of the whole model; `str()` is a table, `to_dict()` is plain JSON.

    recipe: the one of all layers; None with a profile or a function of the context.
    left_alone: parts of the model that keep their own attention, and why.
    notes: facts about the run that a reader should know, such as the order of the tokens.
    """

    layers: tuple[LayerReport, ...]
    recipe: Recipe | None
    left_alone: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def density(self) -> float:
        """Kept / allowed blocks over all calls; dense and own attention keep all of theirs."""
        allowed = sum(layer.allowed for layer in self.layers)
        return sum(layer.kept for layer in self.layers) / allowed if allowed else 1.0

    @property
    def sparse_density(self) -> float:
        """Mean over the layers that ran sparse, of those calls; 1 where none did."""
        mean = _mean([layer.sparse_density for layer in self.layers if layer.sparse_calls])
        return 1.0 if mean is None else mean

    @property
    def error(self) -> float | None:
        """Mean over the layers whose error was measured."""
        return _mean([layer.error for layer in self.layers if layer.error is not None])

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers)

    @property
    def waited(self) -> float:
        return sum(layer.waited for layer in self.layers)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Every reason why a call did not run sparse, and how often."""
        return _added_up(layer.fallbacks for layer in self.layers)

    @property
    def parallel(self) -> dict[str, int]:
        """Every way in which calls were shared among processes, and how often."""
        return _added_up(layer.parallel for layer in self.layers)

    @property
    def captured(self) -> dict[str, int]:
        """Calls that were captured in a graph, by what they run; in no other figure."""
        return _added_up(layer.captured for layer in self.layers)

    @property
    def density_by_step(self) -> dict[int, float]:
        """Kept / allowed blocks of each step of a diffusion run, over all layers."""
        kept: Counter[int] = Counter()
        allowed: Counter[int] = Counter()
        for step in (step for layer in self.layers for step in layer.by_step):
            kept[step.step] += step.kept
            allowed[step.step] += step.allowed
        return {step: kept[step] / max(allowed[step], 1) for step in sorted(allowed)}

    def to_dict(self) -> dict[str, Any]:
        sums = ("density", "sparse_density", "error", "seconds", "waited", "fallbacks", "parallel")
        return {
            "format": "sparge.report/3",
            "recipe": _plain(self.recipe),
            **{name: getattr(self, name) for name in (*sums, "captured", "left_alone")},
            "notes": list(self.notes),
            "density_by_step": {str(step): d for step, d in self.density_by_step.items()},
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [5])
        lines = [f"{'layer':{width}}  {'calls':>5}  density  by head       pv_skipped  error   ran"]
        lines += [_line(layer, width) for layer in self.layers]
        error = "" if self.error is None else f", error {self.error:.4f}"
        density = f"{len(self.layers)} layers, density {self.density:.3f}"
        lines.append(f"{density}{error}, {self.seconds:.2f} s in attention")
        if self.waited > 0.1 * self.seconds:
            lines.append(
                f"  {self.waited:.2f} s of them waiting for threads: other programs were at work"
            )
        if estimated := sum(layer.estimated for layer in self.layers):
            lines.append(
                f"  {estimated} calls were routed by the built-in cost estimate, not by a "
                "measurement of this machine; see `sparge doctor`"
            )
        if steps := self.density_by_step:
            shown = " ".join(f"{density:.2f}" for density in steps.values())
            lines.append(f"  density by step: {shown}")
        lines += [
            f"  captured in a graph {n}x: {way}; not counted, nor are its replays"
            for way, n in self.captured.items()
        ]
        lines += [f"  over several processes {n}x: {way}" for way, n in self.parallel.items()]
        if dense := sum(layer.dense_ring_bytes for layer in self.layers):
            sent = sum(layer.bytes_sent for layer in self.layers)
            lines.append(f"  rings sent {sent} bytes, {sent / dense:.2f} of what dense rings send")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  not sparse {n}x: {reason}" for reason, n in self.fallbacks.items()]
        lines += _left_alone_lines(self.left_alone)
        return "\n".join(lines)


def _left_alone_lines(left_alone: dict[str, str]) -> list[str]:
    """One line for each reason, with the first names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_alone.items():
        by_reason.setdefault(why, []).append(name)
    lines = []
    for why, (first, *others) in by_reason.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(f"  left alone: {first}{more}: {why}")
    return lines


def _line(layer: LayerReport, width: int) -> str:
    heads = layer.density_by_head
    spread = f"{min(heads):.2f} to {max(heads):.2f}" if heads else "-"
    error = "-" if layer.error is None else f"{layer.error:.4f}"
    ran = ", ".join(f"{way} {n}x" for way, n in layer.ran.items()) or "nothing"
    density = f"{layer.density:.3f}" if layer.calls else "-"
    return (
        f"{layer.name:{width}}  {layer.calls:5d}  {density:>7}  {spread:12}  "
        f"{layer.pv_skipped:10.3f}  {error:6}  {ran}"
    )


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _added_up(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for part in counts:
        total.update(part)
    return dict(total)


def is_sparse(run: Run) -> bool:
    """Whether a sparse backend ran, as far as is known without its numbers."""
    return run.backend != DENSE


@dataclass
class Sums(_Counted):
    """Calls and their blocks; by head of those that ran sparse."""

    calls: int = 0
    kept: int = 0
    allowed: int = 0
    kept_by_head: list[int] = field(default_factory=list)
    allowed_by_head: list[int] = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.add_dense(run.kept, run.allowed)
        if run.kept_by_head:
            self.kept_by_head = _added(self.kept_by_head, run.kept_by_head)
            self.allowed_by_head = _added(self.allowed_by_head, run.allowed_by_head)

    def add_dense(self, kept: int, allowed: int) -> None:
        self.calls += 1
        self.kept += kept
        self.allowed += allowed

    @property
    def density_by_head(self) -> tuple[float, ...]:
        pairs = zip(self.kept_by_head, self.allowed_by_head, strict=True)
        return tuple(kept / max(allowed, 1) for kept, allowed in pairs)


@dataclass
class Tally:
    """Sums over the calls of one layer, from any thread.

    by_step: with the noise level of the step. errors: sums by head, on the device that has them.
    captured: calls that a graph holds, by what they run, which are not in the other sums. unread:
    runs whose numbers a device may not have sent yet, in the order of their calls, with the other
    arguments of `_add_up`. The device's queue of launches bounds how many there are.
    """

    ran: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    total: Sums = field(default_factory=Sums)
    sparse: Sums = field(default_factory=Sums)
    by_recipe: dict[Recipe, Sums] = field(default_factory=lambda: defaultdict(Sums))
    by_step: dict[int, tuple[float | None, Sums]] = field(default_factory=dict)
    errors: Tensor | None = None
    parallel: Counter[str] = field(default_factory=Counter)
    captured: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    waited: float = 0.0
    unread: deque[tuple[Run, Recipe, Sums, bool]] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        run: Run,
        *,
        recipe: Recipe,
        context: Context | None = None,
        seconds: float | None = None,
    ) -> None:
        """A call of this recipe, or each sequence of a pack as a call of its own; added up once its
        numbers can be read without waiting.

        seconds: of the call, by the caller's clock; None takes the time of its stages.
        """
        with self.lock:
            self.seconds += seconds or 0.0
            for part in run.parts or (run,):
                if part.captured:  # nothing may be asked of the device now
                    self.captured[_way(part)] += 1
                    continue
                self.unread.append((part, recipe, self._step(context), seconds is None))
                while self.unread and self.unread[0][0].ready():
                    self._add_up(*self.unread.popleft())

    def add_own(
        self, reason: str, seconds: float, blocks: int, context: Context | None = None
    ) -> None:
        """A call of the model's (or the engine's) own attention, over this many blocks."""
        with self.lock:
            self.ran[OWN] += 1
            self.fallbacks[reason] += 1
            self.seconds += seconds
            for sums in (self.total, self._step(context)):
                sums.add_dense(blocks, blocks)

    def add_unrecorded(self, calls: int, seconds: float) -> None:
        """Sparse calls of which nothing was counted."""
        with self.lock:
            self.ran["not recorded"] += calls
            self.seconds += seconds

    def add_parallel(self, way: str) -> None:
        """A call over several processes ran in this way."""
        with self.lock:
            self.parallel[way] += 1

    def add_error(self, error: Tensor) -> None:
        """What a sparse call was measured to be wrong by, for each head; added up where it is."""
        with self.lock:
            if self.errors is None or self.errors.shape != error.shape:
                self.errors, self.counts["measured"] = torch.zeros_like(error), 0
            self.errors = self.errors.to(error.device) + error
            self.counts["measured"] += 1

    def _add_up(self, run: Run, recipe: Recipe, step: Sums, timed: bool) -> None:
        self.seconds += run.seconds["total"] if timed else 0.0
        self.waited += run.waited
        for sums in (self.total, step, self.by_recipe[recipe]):
            sums.add(run)
        self.counts["estimated"] += run.cost_source == "estimate"
        if run.ring is not None:
            self.counts.update(sent=run.ring.bytes_sent, dense_sent=run.ring.dense_bytes)
        self.ran[_way(run)] += 1
        if is_sparse(run):
            self.counts.update(pv_skips=run.pv_skips, pv_groups=run.pv_groups)
            self.sparse.add(run)
        else:
            self.fallbacks[run.reason] += 1

    def _step(self, context: Context | None) -> Sums:
        """The sums of a step; outside of a run nothing is kept by step."""
        if context is None or context.step is None:
            return Sums()
        return self.by_step.setdefault(context.step, (context.noise_level, Sums()))[1]

    def sparse_density(self, *, calls: int) -> float | None:
        """Of the sparse calls that were read so far; None before there are this many."""
        with self.lock:
            enough = self.sparse.calls >= calls and self.sparse.allowed
            return self.sparse.density if enough else None

    def report(self, name: str, recipe: Recipe | None) -> LayerReport:
        """What was counted so far; waits for calls that a device has not finished."""
        with self.lock:
            while self.unread:
                self._add_up(*self.unread.popleft())
            counts = self.counts
            errors = [] if self.errors is None else self.errors.tolist()
            return LayerReport(
                name=name,
                calls=sum(self.ran.values()),
                ran=dict(self.ran),
                kept=self.total.kept,
                allowed=self.total.allowed,
                sparse_density=self.sparse.density,
                density_by_head=self.sparse.density_by_head,
                pv_skipped=counts["pv_skips"] / max(counts["pv_groups"], 1),
                error_by_head=tuple(e / counts["measured"] for e in errors) or None,
                seconds=self.seconds,
                fallbacks=dict(self.fallbacks),
                recipe=recipe,
                by_recipe=tuple(
                    RecipeReport(used, sums.calls, sums.kept, sums.allowed)
                    for used, sums in self.by_recipe.items()
                ),
                estimated=counts["estimated"],
                by_step=tuple(
                    StepReport(i, noise, sums.calls, sums.kept, sums.allowed, sums.density_by_head)
                    for i, (noise, sums) in sorted(self.by_step.items())
                ),
                parallel=dict(self.parallel),
                bytes_sent=counts["sent"],
                dense_ring_bytes=counts["dense_sent"],
                captured=dict(self.captured),
                waited=self.waited,
            )


def _way(run: Run) -> str:
    """What ran, as reports call it."""
    return f"{run.backend} ({run.isa})" if is_sparse(run) else "dense"


def _added(sums: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """Sums by head; they begin again where a call has another number of heads than those before.

    A model that is split by heads while it is accelerated has fewer from then on.
    """
    if len(sums) != len(numbers):
        sums = [0] * len(numbers)
    return [a + b for a, b in zip(sums, numbers, strict=True)]
