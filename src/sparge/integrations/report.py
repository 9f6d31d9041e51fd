"""What an accelerated model did, layer by layer: `handle.report()`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..recipe import Recipe
from .sites import LayerReport


@dataclass(frozen=True)
class Report:
    """One report of the whole model; `str()` is a table, `to_dict()` is plain JSON.

    left_alone: parts of the model that do not honour the attention interface, and why.
    """

    layers: tuple[LayerReport, ...]
    recipe: Recipe | None
    left_alone: dict[str, str]

    @property
    def density(self) -> float:
        """Mean over the layers that ran sparse; 1 where none did."""
        each = [layer.density for layer in self.layers if layer.density_by_head]
        return sum(each) / len(each) if each else 1.0

    @property
    def error(self) -> float | None:
        """Mean over the layers whose error was measured."""
        each = [layer.error for layer in self.layers if layer.error is not None]
        return sum(each) / len(each) if each else None

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Every reason why a call did not run sparse, and how often."""
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(layer.fallbacks)
        return dict(total)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "sparge.report/1",
            "recipe": None if self.recipe is None else self.recipe.to_dict(),
            "density": self.density,
            "error": self.error,
            "seconds": self.seconds,
            "fallbacks": self.fallbacks,
            "left_alone": dict(self.left_alone),
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers] + [5])
        lines = [f"{'layer':{width}}  {'calls':>5}  density  by head       pv_skipped  error   ran"]
        lines += [_line(layer, width) for layer in self.layers]
        error = "" if self.error is None else f", error {self.error:.4f}"
        lines.append(
            f"{len(self.layers)} layers, density {self.density:.3f}{error}, "
            f"{self.seconds:.2f} s in attention"
        )
        lines += [f"  not sparse {n}x: {reason}" for reason, n in self.fallbacks.items()]
        lines += [f"  left alone: {name}: {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def _line(layer: LayerReport, width: int) -> str:
    heads = layer.density_by_head
    spread = f"{min(heads):.2f} to {max(heads):.2f}" if heads else "-"
    error = "-" if layer.error is None else f"{layer.error:.4f}"
    ran = ", ".join(f"{way} {n}x" for way, n in layer.ran.items()) or "nothing"
    density = f"{layer.density:.3f}" if heads else "-"
    return (
        f"{layer.name:{width}}  {layer.calls:5d}  {density:>7}  {spread:12}  "
        f"{layer.pv_skipped:10.3f}  {error:6}  {ran}"
    )
