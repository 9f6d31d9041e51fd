"""Figures of an evaluation: needles by length and depth, errors by head, perplexity."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparge.support.atomic_files import replace_file

from ..figure import new_figure, to_png

WORST_LOSS = 2.0  # losses above this have the same colour


def draw_figures(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write the figures that have rows; none without matplotlib. Returns their paths."""
    if find_spec("matplotlib") is None:
        return []
    made = []
    for name, rows, figure in (
        ("needle.png", document["needle"], needle_figure),
        ("errors.png", document["errors"], errors_figure),
        ("perplexity.png", document["perplexity"], perplexity_figure),
    ):
        if rows:
            replace_file(directory / name, to_png(figure(rows), dpi=120))
            made.append(directory / name)
    return made


def needle_figure(rows: list[dict[str, Any]]) -> Any:
    """Dense beside sparge: the loss as colour, and whether the answer was found."""
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    figure = new_figure(3.5 + 2 * len(lengths), 2 + 0.6 * len(depths))
    panels = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    image = None
    for panel, variant in zip(panels, ("dense", "sparge"), strict=True):
        grid = torch.full((len(depths), len(lengths)), torch.nan)
        for row in rows:
            i, j = depths.index(row["depth"]), lengths.index(row["length"])
            grid[i, j] = row[f"{variant}_loss"]
            text = f"{grid[i, j]:.2f}\n{'found' if row[f'{variant}_found'] else 'not found'}"
            panel.text(j, i, text, ha="center", va="center", fontsize=8)
        image = panel.imshow(grid.numpy(), cmap="RdYlGn_r", vmin=0, vmax=WORST_LOSS, aspect="auto")
        found = sum(row[f"{variant}_found"] for row in rows)
        panel.set(title=f"{variant}: {found} of {len(rows)} found", xlabel="tokens")
        panel.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    panels[0].set_yticks(range(len(depths)), [f"{d} %" for d in depths])
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label="loss of the answer, nats per token")
    return figure


def errors_figure(rows: list[dict[str, Any]]) -> Any:
    """Error and density of each layer and head, at the greatest length."""
    row = max(rows, key=lambda row: row["length"])
    figure = new_figure(9, 1.5 + 0.16 * len(row["layer_names"]) + 1.5)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name, label, most in (
        (panels[0], "error_by_head", "error (relative L1)", None),
        (panels[1], "density_by_head", "density", 1.0),
    ):
        image = panel.imshow(_grid(row[name]), cmap="viridis", vmin=0, vmax=most, aspect="auto")
        figure.colorbar(image, ax=panel, label=label)
        panel.set(xlabel="head", title=label)
    panels[0].set_ylabel("layer")
    figure.suptitle(f"{row['length']} tokens; blank: not measured, or not sparse")
    return figure


def _grid(layers: list[list[float] | None]) -> list[list[float]]:
    heads = max((len(layer) for layer in layers if layer), default=1)
    return [[*(layer or []), *[float("nan")] * (heads - len(layer or []))] for layer in layers]


def perplexity_figure(rows: list[dict[str, Any]]) -> Any:
    """Change of perplexity by position, one line for each length."""
    figure = new_figure(7, 4)
    panel = figure.subplots()
    for row in rows:
        ends = [bucket["stop"] for bucket in row["buckets"]]
        change = [100 * bucket["relative"] for bucket in row["buckets"]]
        bar = [100 * bucket["relative_error"] for bucket in row["buckets"]]
        label = f"{row['length']} tokens"
        panel.errorbar(ends, change, yerr=bar, marker="o", capsize=3, label=label)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    places = sorted({bucket["stop"] for row in rows for bucket in row["buckets"]})
    panel.set_xticks(places, [str(place) for place in places])
    panel.set(xlabel="position, up to", ylabel="change of perplexity, %")
    panel.legend()
    return figure
