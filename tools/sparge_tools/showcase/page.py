"""A showcase as one self-contained HTML file: the table and the sentences that compare dense with
sparge, and embedded figures, light and dark.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import torch

from sparge import BLOCK_K, BLOCK_Q
from sparge.cli.screen import MISSING, Column, Table, error, share

from ..figure import new_figure, to_png
from ..machine import load_text
from ..screen import percent, times
from .result import AttentionMap, Showcase

COLUMNS = (
    Column("what", ""),
    *(Column(name, name, "{}".format) for name in ("dense", "sparge", "change")),
)
FOUND = {True: "found", False: "not found"}
NEEDLE = {  # by whether dense and sparge found it: a sentence, and a word with its agent
    (True, True): ("both found the needle", "found", "by both"),
    (True, False): ("sparge lost the needle that dense found", "lost", "by sparge"),
    (False, True): ("sparge found the needle, dense did not", "found", "by sparge"),
    (False, False): (
        "neither found the needle, so it says nothing about sparge",
        "found",
        "by neither",
    ),
}


def comparison_rows(show: Showcase) -> list[dict[str, str]]:
    dense, sparge = show.dense, show.sparge

    def row(what: str, *cells: str) -> dict[str, str]:
        return {column.key: cell for column, cell in zip(COLUMNS, (what, *cells), strict=True)}

    first = seconds(dense.first_token), seconds(sparge.first_token)
    inside = seconds(dense.attention_seconds), seconds(sparge.attention_seconds)
    shares = percent(dense.attention_share), percent(sparge.attention_share)
    perplexities = f"{dense.perplexity:.3f}", f"{sparge.perplexity:.3f}"
    change = signed_percent(show.perplexity_change)
    measured = MISSING if show.error is None else error(show.error)
    return [
        row("seconds to the first token", *first, f"{times(show.speedup)} the speed"),
        row("of these in attention", *inside, f"{times(show.attention_speedup)} the speed"),
        row("attention's share of the time", *shares, MISSING),
        row("density: kept / allowed blocks", share(1.0), share(show.density), MISSING),
        row(f"perplexity over {show.tokens - 1:,} tokens", *perplexities, change),
        row("needle", FOUND[dense.found], FOUND[sparge.found], MISSING),
        row("error of attention (rel. L1)", MISSING, measured, MISSING),
        row("same most likely next token as dense", MISSING, percent(show.agreement), MISSING),
    ]


def comparison_table(show: Showcase) -> Table:
    title = f"{show.model['name']}, {show.tokens:,} tokens, {show.dtype}"
    return Table(title, COLUMNS, comparison_rows(show), notes(show))


def notes(show: Showcase) -> list[str]:
    lines = [
        how_often(show),
        f"Attention took {percent(show.dense.attention_share)} of the dense time: the first token "
        f"could come at most {show.limit:.2f}x sooner.",
    ]
    if show.error_layers:
        layers = ", ".join(map(str, show.error_layers))
        lines.append(f"error: mean over the heads of layers {layers}, against exact attention.")
    return lines


def how_often(show: Showcase) -> str:
    times_each = "once each" if show.rounds == 1 else f"{show.rounds} times each, median"
    return (
        f"Timed {times_each}, in the order {', '.join(show.order)}, after a warm-up of "
        f"{show.warmup_tokens} tokens. For careful measurements use sparge eval."
    )


def verdict(show: Showcase) -> str:
    """The gain, in one sentence."""
    sooner = "sooner" if show.speedup >= 1 else "later"
    return (
        f"The first token came {max(show.speedup, 1 / show.speedup):.2f}× {sooner} with sparge: "
        f"after {seconds(show.sparge.first_token)} instead of {seconds(show.dense.first_token)}."
    )


def cost(show: Showcase) -> str:
    """The cost, in one sentence."""
    return (
        f"It computed {percent(show.density)} of the attention blocks; perplexity changed by "
        f"{signed_percent(show.perplexity_change)}; "
        f"{NEEDLE[show.dense.found, show.sparge.found][0]}."
    )


def fallback_lines(show: Showcase) -> list[str]:
    """Reasons why calls were not sparse; the tokens of the answer always are among them."""
    return [f"{n}×: {reason}" for reason, n in show.sparge.fallbacks.items()]


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def signed_percent(value: float) -> str:
    return f"{100 * value:+.2f}%"


PAGE = Path(__file__).with_name("page.html")
SPARSE_OR_NOT = re.compile("<!-- if sparse -->\n(.*)<!-- else -->\n(.*)<!-- end -->\n", re.DOTALL)


def make_page(show: Showcase, figures: dict[str, dict[str, str]]) -> str:
    """figures: by name, a data URI for each theme."""
    words = {name: escape(text) for name, text in (_results(show) | _origin(show)).items()}
    cells = [[escape(text) for text in row.values()] for row in comparison_rows(show)]
    html = {
        "rows": "\n".join(
            f'<tr><th scope="row">{what}</th><td>{"</td><td>".join(rest)}</td></tr>'
            for what, *rest in cells
        ),
        "notes": "".join(f"<p>{escape(note)}</p>" for note in notes(show)),
        **{f"{name}_{look}": uri for name, of in figures.items() for look, uri in of.items()},
    }
    page = SPARSE_OR_NOT.sub(r"\1" if show.heads else r"\2", PAGE.read_text(encoding="utf-8"))
    return Template(page).substitute(words, **html)


def _results(show: Showcase) -> dict[str, str]:
    dense, sparge, needle = show.dense, show.sparge, show.needle
    _, found, by_whom = NEEDLE[dense.found, sparge.found]
    lost = dense.found and not sparge.found
    out = {
        "verdict": verdict(show),
        "cost": cost(show),
        "speedup": f"{show.speedup:.2f}",
        "speedup_kind": _gain(show.speedup),
        "first_token": f"{seconds(dense.first_token)} → {seconds(sparge.first_token)}",
        "limit": f"{show.limit:.2f}",
        "attention": f"{show.attention_speedup:.2f}",
        "attention_kind": _gain(show.attention_speedup),
        "attention_seconds": f"{seconds(dense.attention_seconds)} → "
        f"{seconds(sparge.attention_seconds)}",
        "density": percent(show.density),
        "change": signed_percent(show.perplexity_change),
        "perplexity": f"{dense.perplexity:.3f} → {sparge.perplexity:.3f}",
        "needle": found,
        "needle_by": by_whom,
        "needle_kind": "bad" if lost else "good" if sparge.found else "",
        "token": f"{needle.token:,}",
        "depth": str(needle.depth),
        **{name: getattr(needle, name) for name in ("fact", "question", "prefix")},
        "why_not": "; ".join(sparge.fallbacks) or "no reason was recorded",
    }
    for name, reading in (("dense", dense), ("sparge", sparge)):
        kind, sign = ("good", "✓") if reading.found else ("bad", "✗")
        out |= {f"{name}_kind": kind, f"{name}_sign": sign, f"{name}_answer": reading.answer}
    return out


def _origin(show: Showcase) -> dict[str, str]:
    model = show.model
    return {
        "model": model["name"],
        "model_digest": model["digest"][:12],
        "layers": str(model["layers"]),
        "heads": str(model["heads"]),
        "text": show.text["name"],
        "text_digest": show.text["digest"][:12],
        "tokens": f"{show.tokens:,}",
        "dtype": show.dtype,
        "command": show.command,
        **machine_words(show.where),
        "timing": how_often(show),
        "ran": ", ".join(f"{way} {n}×" for way, n in show.sparge.ran.items()),
        "not_sparse": "\n".join(fallback_lines(show)) or "nothing",
        "took": seconds(show.took_seconds),
        "recipe": json.dumps(show.recipe.to_dict()),
    }


def machine_words(where: Mapping[str, Any]) -> dict[str, str]:
    """Where and when a page's numbers were measured, by the names that the pages give them."""
    return {
        "cpu": where["machine"]["cpu"],
        "threads": str(where["machine"]["threads"]),
        "machine": where["machine_line"],
        "isa": where["isa"] or "none: the reference ran",
        "load": load_text(where),
        "versions": ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v),
        "date": where["date"],
    }


def _gain(ratio: float) -> str:
    return "accent" if ratio >= 1 else "bad"


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
    n = len(show.density_by_head)
    heads = max(len(each) for each in show.density_by_head if each is not None)
    grid = torch.full((heads, n), torch.nan)
    for i, each in enumerate(show.density_by_head):
        if each is not None:
            grid[: len(each), i] = 100 * (1 - torch.tensor(each))
    figure, panel = heat_map(
        grid.numpy(), theme.map, height=1.3 + 0.24 * heads, top=100, label="% of blocks skipped"
    )
    if n <= 40 and heads <= 40:  # more would be too small to read
        for h, i in (~grid.isnan()).nonzero().tolist():
            value = float(grid[h, i])
            ink = theme.rc["axes.facecolor" if value > 62 else "text.color"]
            panel.text(i, h, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
    panel.set(xlabel="layer", ylabel="head")
    panel.locator_params(integer=True)
    return figure


def heat_map(
    grid: Any,
    colours: list[str],
    *,
    height: float,
    top: float,
    label: str,
    extent: tuple[float, ...] | None = None,
) -> tuple[Any, Any]:
    """A figure with a grid of values from 0 to `top` and their colour scale, and its panel."""
    from matplotlib.colors import LinearSegmentedColormap

    figure = new_figure(WIDTH, height)
    panel = figure.subplots()
    scale = LinearSegmentedColormap.from_list("scale", colours)
    image = panel.imshow(grid, cmap=scale, vmin=0, vmax=top, aspect="auto", extent=extent)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, pad=0.01, fraction=0.03)
    bar.set_label(label)
    bar.outline.set_visible(False)
    return figure, panel
