"""The figures of the page: PNG, for light and for dark pages."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import Unsupported
from ..geometry import BLOCK_K, BLOCK_Q
from ..report.figure import new_figure, to_png
from .comparison import seconds
from .result import AttentionMap, Showcase

FAINTEST = 1e-4
"""Shares below this have the same colour. With uniform attention over 8192 keys it is 8e-3."""
ACROSS = 3  # maps in a row
DPI = 140


@dataclass(frozen=True)
class Theme:
    """Colours. kept, skipped, map: from little to much. stages: one per stage of sparge."""

    paper: str
    ink: str
    faint: str
    dense: str
    rest: str
    stages: tuple[str, str, str, str]
    kept: tuple[str, str, str]
    skipped: tuple[str, str]
    map: tuple[str, str]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1c2126",
    faint="#8b939c",
    dense="#5b6b7d",
    rest="#dfe3e8",
    stages=("#f7d3b3", "#f2b98a", "#e58a4a", "#c2571a"),
    kept=("#fde3cd", "#e8741e", "#5f1f04"),
    skipped=("#f4f5f6", "#4b5158"),
    map=("#f3f6fa", "#14548c"),
)
DARK = Theme(
    paper="#171b20",
    ink="#e7eaee",
    faint="#7d8792",
    dense="#8fa3b8",
    rest="#3a424b",
    stages=("#6b3a17", "#8a4a1c", "#cf6f2a", "#f5a066"),
    kept=("#5a2a0c", "#e8741e", "#fff0e2"),
    skipped=("#20262c", "#c3cad1"),
    map=("#1d252d", "#6db3f2"),
)
THEMES = {"light": LIGHT, "dark": DARK}
Draw = Callable[[Showcase, Theme], Any]


def require_matplotlib() -> None:
    """Raise Unsupported without matplotlib."""
    if find_spec("matplotlib") is None:
        raise Unsupported(
            "the page of the demo needs matplotlib, which is not installed",
            {},
            'install it with: pip install "sparge[demo]"',
        )


def make_figures(show: Showcase) -> dict[str, dict[str, str]]:
    """Each figure by name, as a data URI for each theme; no maps where no head ran sparse."""
    drawn: dict[str, Draw] = {"time": time_figure}
    if show.heads:
        drawn |= {"plans": plans_figure, "sparsity": sparsity_figure}
    return {
        name: {theme: data_uri(draw(show, look)) for theme, look in THEMES.items()}
        for name, draw in drawn.items()
    }


def data_uri(figure: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(to_png(figure, dpi=DPI)).decode('ascii')}"


def time_figure(show: Showcase, theme: Theme) -> Any:
    """Two bars of seconds, divided into attention and the rest."""
    figure, panel = _one_panel(9.6, 2.5, theme)
    for y, parts in enumerate((dense_parts(show, theme), sparge_parts(show, theme))):
        left = 0.0
        for name, spent, colour in parts:
            label = f"{name}, {seconds(spent)}"
            panel.barh(y, spent, left=left, height=0.62, color=colour, label=label)
            left += spent
        total = f"  {seconds(left)}"
        panel.text(left, y, total, va="center", color=theme.ink, fontweight="bold")
    panel.set_yticks([0, 1], ["dense", "sparge"])
    panel.invert_yaxis()
    longest = max(show.dense.seconds[0], show.sparge.seconds[0])
    panel.set_xlim(0, longest * 1.12)
    which = "" if show.rounds == 1 else ", first round"
    panel.set_xlabel(f"seconds to the first token{which}")
    panel.spines[["left", "top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=theme.ink)
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
    figure = new_figure(9.6, 0.6 + 3.3 * down, facecolor=theme.paper)
    # Two grid columns per map, so the two colour scales share the last row.
    grid = figure.add_gridspec(down + 1, 2 * across, height_ratios=[1.0] * down + [0.035])
    norm = LogNorm(FAINTEST, 1.0)
    maps = {
        "computed": LinearSegmentedColormap.from_list("computed", theme.kept),
        "skipped": LinearSegmentedColormap.from_list("skipped", theme.skipped),
    }
    for i, view in enumerate(show.heads):
        row, column = divmod(i, across)
        panel = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
        _style(panel, theme)
        _draw_plan(panel, view, show, norm, maps, theme)
    for i, (name, colours) in enumerate(maps.items()):
        place = figure.add_subplot(grid[down, i * across : (i + 1) * across])
        bar = figure.colorbar(ScalarMappable(norm, colours), cax=place, orientation="horizontal")
        _style_bar(bar, f"{name}: share of a query block's attention", theme)
    return figure


def _draw_plan(
    panel: Any, view: AttentionMap, show: Showcase, norm: Any, maps: Mapping[str, Any], theme: Theme
) -> None:
    n_q, n_k = view.mass.shape
    extent = (0, n_k * BLOCK_K, n_q * BLOCK_Q, 0)
    shares = view.mass.clamp(min=FAINTEST).double()
    first_row = torch.arange(n_q)[:, None] * BLOCK_Q
    future = torch.arange(n_k) * BLOCK_K >= first_row + BLOCK_Q
    for name, hidden in (("skipped", view.kept | future), ("computed", ~view.kept)):
        colours = shares.masked_fill(hidden, torch.nan).numpy()
        panel.imshow(colours, cmap=maps[name], norm=norm, extent=extent, interpolation="nearest")
    panel.set_title(
        f"layer {view.layer}, head {view.head}\n{100 * view.density:.0f}% of the blocks, "
        f"{100 * view.mass_kept:.1f}% of the attention",
        fontsize=8.5,
        color=theme.ink,
    )
    panel.plot(
        show.needle.token, 0, marker="v", markersize=6, color=theme.ink, clip_on=False, zorder=5
    )
    panel.set_xlabel("key", fontsize=8)
    panel.set_ylabel("query", fontsize=8)
    panel.set_xlim(0, show.tokens)
    panel.set_ylim(show.tokens, 0)
    panel.locator_params(nbins=4)
    panel.tick_params(labelsize=7)
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
    figure, panel = _one_panel(9.6, 1.3 + 0.24 * heads, theme)
    colours = LinearSegmentedColormap.from_list("sparsity", theme.map)
    image = panel.imshow(grid.numpy(), cmap=colours, vmin=0, vmax=100, aspect="auto")
    if n <= 40 and heads <= 40:  # more would be too small to read
        for h in range(heads):
            for i in range(n):
                value = float(grid[h, i])
                ink = theme.paper if value > 62 else theme.ink
                text = "" if value != value else f"{value:.0f}"
                panel.text(i, h, text, ha="center", va="center", fontsize=6.5, color=ink)
    panel.set_xlabel("layer")
    panel.set_ylabel("head")
    panel.locator_params(integer=True)
    bar = figure.colorbar(image, ax=panel, pad=0.01, fraction=0.03)
    _style_bar(bar, "% of blocks skipped", theme)
    for side in panel.spines.values():
        side.set_visible(False)
    return figure


def _one_panel(width: float, height: float, theme: Theme) -> tuple[Any, Any]:
    figure = new_figure(width, height, facecolor=theme.paper)
    panel = figure.subplots()
    _style(panel, theme)
    return figure, panel


def _style(panel: Any, theme: Theme) -> None:
    panel.set_facecolor(theme.paper)
    panel.tick_params(colors=theme.ink, labelsize=8)
    for side in panel.spines.values():
        side.set_color(theme.faint)
        side.set_linewidth(0.6)
    for words in (panel.xaxis.label, panel.yaxis.label, panel.title):
        words.set_color(theme.ink)


def _style_bar(bar: Any, label: str, theme: Theme) -> None:
    bar.set_label(label, color=theme.ink, fontsize=8)
    bar.ax.tick_params(which="both", colors=theme.ink, labelsize=7)
    bar.outline.set_visible(False)
