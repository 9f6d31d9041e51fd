"""Charts of a page of renders: error of the latents by step, density by layer and step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..figure import new_figure
from ..renders import Renders
from ..renders.result import step_densities
from .page_figures import THEMES, WIDTH, Theme, themed_uri

MOST_LABELS = 40


def make_charts(renders: Renders) -> dict[str, dict[str, str]]:
    """By name, a data URI for each theme; only of what was measured."""
    drawn: dict[str, Callable[[Renders, Theme], Any]] = {}
    if any(pair.latent_errors for pair in renders.pairs):
        drawn["errors"] = errors_figure
    if step_densities(renders.pairs[0].report)["steps"]:
        drawn["steps"] = steps_figure
    return {
        name: {theme: themed_uri(draw, renders, look) for theme, look in THEMES.items()}
        for name, draw in drawn.items()
    }


def errors_figure(renders: Renders, theme: Theme) -> Any:
    """One line for each pair: relative L2 of its latents after each step."""
    figure = new_figure(WIDTH, 2.8)
    panel = figure.subplots()
    for pair in renders.pairs:
        steps = range(1, len(pair.latent_errors) + 1)
        # A logarithmic axis has no place for a step that is equal to dense.
        shown = [error or math.nan for error in pair.latent_errors]
        panel.plot(steps, shown, color=theme.stages[-1], alpha=0.75, marker=".")
    if any(error > 0 for pair in renders.pairs for error in pair.latent_errors):
        panel.set_yscale("log")
    panel.set(xlabel="step", ylabel="relative L2 of the latents")
    panel.set_xlim(0.5, max(len(pair.latent_errors) for pair in renders.pairs) + 0.5)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def steps_figure(renders: Renders, theme: Theme) -> Any:
    """Density by layer and step of the first pair."""
    from matplotlib.colors import LinearSegmentedColormap

    found = step_densities(renders.pairs[0].report)
    grid = [[math.nan if x is None else x for x in row] for row in found["density"]]
    n, steps = len(grid), len(found["steps"])
    figure = new_figure(WIDTH, min(1.4 + 0.22 * n, 9.0))
    panel = figure.subplots()
    # Sparser is darker, as on the other pages.
    colours = LinearSegmentedColormap.from_list("density", theme.map[::-1])
    extent = (0.5, steps + 0.5, n - 0.5, -0.5)
    image = panel.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto", extent=extent)
    if n <= MOST_LABELS:
        panel.set_yticks(range(n), found["layers"], fontsize=6.5)
        if steps <= 20:
            for i, row in enumerate(grid):
                for j, value in enumerate(row):
                    ink = theme.rc["axes.facecolor" if value < 0.4 else "text.color"]
                    text = "" if math.isnan(value) else f"{value:.2f}"
                    panel.text(j + 1, i, text, ha="center", va="center", fontsize=6.5, color=ink)
    else:
        panel.set_ylabel("layer")
    panel.set_xlabel("step")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, pad=0.01, fraction=0.03)
    bar.set_label("density")
    bar.outline.set_visible(False)
    return figure
