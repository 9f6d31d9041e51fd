"""What an accelerated model did, layer by layer: `handle.report()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..values.recipe import Recipe

OWN = "own attention"


@dataclass(frozen=True)
class RecipeReport:
    """The calls of a layer with one recipe, and their blocks; dense calls included."""

    recipe: Recipe
    calls: int
    kept: int
    allowed: int

    @property
    def density(self) -> float:
        return self.kept / self.allowed if self.allowed else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "recipe": self.recipe.to_dict(), "density": self.density}


@dataclass(frozen=True)
class StepReport:
    """The calls of a layer in one step of a diffusion run; density by head of the sparse ones."""

    step: int
    noise_level: float | None
    calls: int
    kept: int
    allowed: int
    density_by_head: tuple[float, ...]

    @property
    def density(self) -> float:
        return self.kept / self.allowed if self.allowed else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "density": self.density,
            "density_by_head": list(self.density_by_head),
        }


@dataclass(frozen=True)
class LayerReport:
    """What ran in one attention module since the start or the last `reset()`.

    ran: how often each way ran. fallbacks: why calls went to dense or to the model's own attention.
    kept, allowed: blocks over all calls; dense and own attention keep all of theirs.
    sparse_density, density_by_head, pv_skipped: over the calls that ran sparse; a ring counts no
    heads. error_by_head: mean relative L1 against exact attention, where it was measured. seconds:
    time in attention; on a GPU, the model's own attention is only launched in it. recipe: None for
    a layer left out, or whose recipe depends on the context; by_recipe has one entry for each
    recipe that ran.
    estimated: calls whose backend was chosen by the built-in cost estimate.
    by_step: one entry for each step of a diffusion run; runs with the same steps are added up.
    parallel: how often each way of sharing a call among processes was taken; the figures are then
    those of this process: of its own heads ("ulysses") or its own queries ("ring").
    bytes_sent, dense_ring_bytes: by all processes of the rings, and what dense rings would send.
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

    @property
    def density(self) -> float:
        return self.kept / self.allowed if self.allowed else 1.0

    @property
    def error(self) -> float | None:
        return _mean(self.error_by_head or ())

    @property
    def sparse_calls(self) -> int:
        return sum(n for way, n in self.ran.items() if way not in (OWN, "dense"))

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "density": self.density,
            "density_by_head": list(self.density_by_head),
            "error_by_head": None if self.error_by_head is None else list(self.error_by_head),
            "error": self.error,
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
            "by_recipe": [each.to_dict() for each in self.by_recipe],
            "by_step": [each.to_dict() for each in self.by_step],
        }


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
        each = _mean([layer.sparse_density for layer in self.layers if layer.sparse_calls])
        return 1.0 if each is None else each

    @property
    def error(self) -> float | None:
        """Mean over the layers whose error was measured."""
        return _mean([layer.error for layer in self.layers if layer.error is not None])

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Every reason why a call did not run sparse, and how often."""
        return dict(sum((Counter(layer.fallbacks) for layer in self.layers), Counter[str]()))

    @property
    def parallel(self) -> dict[str, int]:
        """Every way in which calls were shared among processes, and how often."""
        return dict(sum((Counter(layer.parallel) for layer in self.layers), Counter[str]()))

    @property
    def captured(self) -> dict[str, int]:
        """Calls that were captured in a graph, by what they run; in no other figure."""
        return dict(sum((Counter(layer.captured) for layer in self.layers), Counter[str]()))

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
        sums = (
            "density",
            "sparse_density",
            "error",
            "seconds",
            "fallbacks",
            "parallel",
            "captured",
        )
        names = (*sums, "left_alone")
        return {
            "format": "sparge.report/3",
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
            **{name: getattr(self, name) for name in names},
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
    names: dict[str, list[str]] = {}
    for name, why in left_alone.items():
        names.setdefault(why, []).append(name)
    shown = {
        why: each[0] if len(each) == 1 else f"{each[0]} and {len(each) - 1} more"
        for why, each in names.items()
    }
    return [f"  left alone: {name}: {why}" for why, name in shown.items()]


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
