"""The figures of the page: PNG, for light and for dark pages."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparge import BLOCK_K, BLOCK_Q

from ..figure import new_figure, to_png
from .comparison import seconds
from .result import AttentionMap, Showcase

# Shares below this have the same colour. With uniform attention over 8192 keys it is 8e-3.
FAINTEST = 1e-4
ACROSS = 3  # maps in a row
WIDTH = 9.6  # inches
DPI = 140
T = TypeVar("T")


@dataclass(frozen=True)
class Theme:
    """Colours. rc: matplotlib's parameters. stages: one per stage of sparge.

    kept, skipped, map: from little to much.
    """

    rc: dict[str, Any]
    dense: str
    rest: str
    stages: list[str]
    kept: list[str]
    skipped: list[str]
    map: list[str]


SMALL = ("xtick.labelsize", "ytick.labelsize", "axes.labelsize", "axes.titlesize")
SIZES: Any = {"axes.linewidth": 0.6, **dict.fromkeys(SMALL, 8)}
THEMES = {
    name: Theme(**colours)
    for name, colours in json.loads(Path(__file__).with_name("themes.json").read_text()).items()
}


def make_figures(show: Showcase) -> dict[str, dict[str, str]]:
    """Each figure by name, as a data URI for each theme; no maps where no head ran sparse."""
    drawn: dict[str, Callable[[Showcase, Theme], Any]] = {"time": time_figure}
    if show.heads:
        drawn |= {"plans": plans_figure, "sparsity": sparsity_figure}
    return {
        name: {theme: themed_uri(draw, show, look) for theme, look in THEMES.items()}
        for name, draw in drawn.items()
    }


def themed_uri(draw: Callable[[T, Theme], Any], show: T, theme: Theme) -> str:
    """What a function draws of `show`, as an embedded PNG."""
    from matplotlib import rc_context

    with rc_context(SIZES | theme.rc):
        image = to_png(draw(show, theme), dpi=DPI)
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"


def time_figure(show: Showcase, theme: Theme) -> Any:
    """Two bars of seconds, divided into attention and the rest."""
    figure = new_figure(WIDTH, 2.5)
    panel = figure.subplots()
    for y, parts in enumerate((dense_parts(show, theme), sparge_parts(show, theme))):
        left = 0.0
        for name, spent, colour in parts:
            label = f"{name}, {seconds(spent)}"
            panel.barh(y, spent, left=left, height=0.62, color=colour, label=label)
            left += spent
        panel.text(left, y, f"  {seconds(left)}", va="center", fontweight="bold")
    panel.set_yticks([0, 1], ["dense", "sparge"])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12 * max(show.dense.seconds[0], show.sparge.seconds[0]))
    which = "" if show.rounds == 1 else ", first round"
    panel.set_xlabel(f"seconds to the first token{which}")
    panel.spines[["left", "top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


Parts = list[tuple[str, float, str]]


def dense_parts(show: Showcase, theme: Theme) -> Parts:
    whole, inside = show.dense.seconds[0], show.dense.attention[0]
    return [
        ("dense: attention", inside, theme.dense),
        ("dense: rest of the model", whole - inside, theme.rest),
    ]


def sparge_parts(show: Showcase, theme: Theme) -> Parts:
    """The stages in the order they run, then attention that ran in another way."""
    whole, inside = show.sparge.seconds[0], show.sparge.attention[0]
    stages = show.sparge.stages.items()
    parts = [
        (f"sparge: {stage}", spent, colour)
        for (stage, spent), colour in zip(stages, theme.stages[-len(stages) :], strict=False)
    ]
    other = inside - sum(spent for _, spent, _ in parts)
    if other > 0.005 * inside:
        parts.append(("sparge: the model's own attention", other, theme.dense))
    return [*parts, ("sparge: rest of the model", whole - inside, theme.rest)]


def plans_figure(show: Showcase, theme: Theme) -> Any:
    """Exact attention by block: in colour what the plan computes, in grey what it skips."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    across = min(ACROSS, len(show.heads))
    down = -(-len(show.heads) // across)
    figure = new_figure(WIDTH, 0.6 + 3.3 * down)
    # Two grid columns per map, so the two colour scales share the last row.
    grid = figure.add_gridspec(down + 1, 2 * across, height_ratios=[1.0] * down + [0.035])
    scales = {
        name: ScalarMappable(LogNorm(FAINTEST, 1.0), LinearSegmentedColormap.from_list(name, ends))
        for name, ends in (("computed", theme.kept), ("skipped", theme.skipped))
    }
    for i, view in enumerate(show.heads):
        row, column = divmod(i, across)
        panel = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
        _draw_plan(panel, view, scales)
        panel.plot(show.needle.token, 0, marker="v", color=theme.rc["text.color"], clip_on=False)
        panel.set(xlabel="key", ylabel="query", xlim=(0, show.tokens), ylim=(show.tokens, 0))
    for i, (name, scale) in enumerate(scales.items()):
        place = figure.add_subplot(grid[down, i * across : (i + 1) * across])
        bar = figure.colorbar(scale, cax=place, orientation="horizontal")
        bar.set_label(f"{name}: share of a query block's attention")
        bar.outline.set_visible(False)
    return figure


def _draw_plan(panel: Any, view: AttentionMap, scales: Mapping[str, Any]) -> None:
    n_q, n_k = view.mass.shape
    shares = view.mass.clamp(min=FAINTEST).double()
    first_row = torch.arange(n_q)[:, None] * BLOCK_Q
    future = torch.arange(n_k) * BLOCK_K >= first_row + BLOCK_Q
    for name, hidden in (("skipped", view.kept | future), ("computed", ~view.kept)):
        panel.imshow(
            shares.masked_fill(hidden, torch.nan).numpy(),
            cmap=scales[name].cmap,
            norm=scales[name].norm,
            extent=(0, n_k * BLOCK_K, n_q * BLOCK_Q, 0),
            interpolation="nearest",
        )
    panel.set_title(
        f"layer {view.layer}, head {view.head}\n{100 * view.density:.0f}% of the blocks, "
        f"{100 * view.mass_kept:.1f}% of the attention"
    )
    panel.locator_params(nbins=4)
    panel.spines[["top", "right"]].set_visible(False)


def sparsity_figure(show: Showcase, theme: Theme) -> Any:
    """Per cent of blocks that each head skipped; blank where a layer ran dense."""
    from matplotlib.colors import LinearSegmentedColormap

    n = len(show.density_by_head)
    heads = max(len(each) for each in show.density_by_head if each is not None)
    grid = torch.full((heads, n), torch.nan)
    for i, each in enumerate(show.density_by_head):
        if each is not None:
            grid[: len(each), i] = 100 * (1 - torch.tensor(each))
    figure = new_figure(WIDTH, 1.3 + 0.24 * heads)
    panel = figure.subplots()
    colours = LinearSegmentedColormap.from_list("sparsity", theme.map)
    image = panel.imshow(grid.numpy(), cmap=colours, vmin=0, vmax=100, aspect="auto")
    if n <= 40 and heads <= 40:  # more would be too small to read
        for h, i in (~grid.isnan()).nonzero().tolist():
            value = float(grid[h, i])
            ink = theme.rc["axes.facecolor" if value > 62 else "text.color"]
            panel.text(i, h, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
    panel.set(xlabel="layer", ylabel="head")
    panel.locator_params(integer=True)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, pad=0.01, fraction=0.03)
    bar.set_label("% of blocks skipped")
    bar.outline.set_visible(False)
    return figure
