"""A page of renders: pictures dense, sparse and their difference; figures; where it was sparse."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from sparge.cli.screen import Column, Table, error, share

from ..figure import new_figure
from ..renders import Pair, Renders, difference_map
from ..renders.compare import decibels, step_densities
from ..renders.pictures import shown_frames
from ..screen import percent, times
from .page import PAGE as OTHER_PAGE
from .page import THEMES, WIDTH, Theme, heat_map, machine_words, seconds, themed_uri

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
    found = step_densities(renders.pairs[0].report)
    grid = [[math.nan if x is None else x for x in row] for row in found["density"]]
    n, steps = len(grid), len(found["steps"])
    figure, panel = heat_map(
        grid,
        theme.map[::-1],  # sparser is darker, as on the other pages
        height=min(1.4 + 0.22 * n, 9.0),
        top=1,
        label="density",
        extent=(0.5, steps + 0.5, n - 0.5, -0.5),
    )
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
    return figure


NAMES = {
    "psnr": "PSNR",
    "ssim": "SSIM",
    "flip": "FLIP",
    "latent_error": "error of the final latents",
    "iou": "IoU of the mask",
    "relative_l2": "relative L2",
    "largest_error": "largest error",
    "agreement": "same tokens",
    "accuracy_dense": "right tokens, dense",
    "accuracy_sparse": "right tokens, sparge",
}
UNITS = {"psnr": "dB", "largest_error": "m"}
WORST = "_worst"


def name_of(figure: str) -> str:
    """In words; of the worst frame of a video too."""
    base = figure.removesuffix(WORST)
    words = NAMES.get(base, base)
    return words if base == figure else f"{words} of the worst frame"


def form_of(figure: str) -> Callable[[float], str]:
    base = figure.removesuffix(WORST)
    return {"psnr": decibels, "largest_error": "{:.3f}".format}.get(base, error)


def words_of(figure: str, value: float) -> str:
    """Such as "PSNR 31.20 dB"."""
    unit = UNITS.get(figure.removesuffix(WORST))
    shown = form_of(figure)(value)
    return f"{name_of(figure)} {shown}{f' {unit}' if unit and math.isfinite(value) else ''}"


def heading_of(figure: str) -> str:
    base = figure.removesuffix(WORST)
    words = NAMES.get(base, base).replace(" of the ", "\nof the ").replace(", ", "\n")
    below = "worst" if base != figure else UNITS.get(figure)
    return words if below is None else f"{words}\n{below}"


def pairs_table(renders: Renders) -> Table:
    """One row for each input, and one for all."""
    columns = [
        Column("caption", "input"),
        *([Column("seed", "seed", "{}".format)] if renders.pairs[0].seed is not None else []),
        *(Column(name, heading_of(name), form_of(name)) for name in renders.figures),
        Column("density", "density", share),
        Column("sparse_density", "where\nsparse", share),
        Column("dense_seconds", "dense\ns", "{:.2f}".format),
        Column("sparse_seconds", "sparge\ns", "{:.2f}".format),
        Column("speedup", "times\ndense", times),
    ]
    rows: list[Mapping[str, Any]] = [
        {**pair.to_dict(), **pair.figures, "caption": _short(pair.caption)}
        for pair in renders.pairs
    ]
    if len(rows) > 1:
        means = {name: renders.mean(name) for name in renders.figures}
        means |= {"density": renders.density, "speedup": renders.speedup}
        rows.append({**means, "caption": "mean", "sparse_density": renders.sparse_density})
    return Table(f"{renders.model}: {renders.about}", columns, rows, notes(renders))


def notes(renders: Renders) -> list[str]:
    missing = dict.fromkeys(
        f"no {what}: {why}" for pair in renders.pairs for what, why in pair.missing.items()
    )
    told = dict.fromkeys(note for pair in renders.pairs for note in pair.report.notes)
    reasons = [f"not sparse {n}×: {reason}" for reason, n in renders.fallbacks.items()]
    return [
        "density: kept / allowed blocks over all attention calls; a dense call counts as 1. "
        "where sparse: of the calls that were. times dense: of the whole run; their median in the "
        "row of means.",
        *missing,
        *told,
        *reasons,
    ]


def verdict(sections: Sequence[Renders]) -> str:
    """What sparse attention did to the results, in one sentence for each model."""
    return _of_each(sections, _verdict)


def cost(sections: Sequence[Renders]) -> str:
    """How long it took, in one sentence for each model."""
    return _of_each(sections, _cost)


def _of_each(sections: Sequence[Renders], say: Callable[[Renders], str]) -> str:
    if len(sections) == 1:
        return say(sections[0])
    return " ".join(f"{renders.model}: {say(renders)}" for renders in sections)


def _verdict(renders: Renders) -> str:
    blocks = f"{percent(renders.density)} of the attention blocks"
    mean = renders.mean(renders.metric)
    if mean is None:
        return f"{blocks} were computed."
    if math.isinf(mean):
        return f"Pictures equal to the dense ones, with {blocks}."
    return f"{words_of(renders.metric, mean)} against dense, with {blocks}."


def _cost(renders: Renders) -> str:
    dense, sparse = (
        sum(getattr(pair, name) for pair in renders.pairs) / len(renders.pairs)
        for name in ("dense_seconds", "sparse_seconds")
    )
    speed = f"{times(renders.speedup)} the speed"
    return f"{seconds(dense)} dense, {seconds(sparse)} with sparge per input ({speed})."


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


PAGE = Path(__file__).with_name("pictures.html")
STYLE = re.compile("<style>.*?</style>", re.DOTALL)
SIDE = 640
"""Pixels of the longer side of an embedded picture; larger ones are scaled down."""
MOST_PAIRS = 8
CAPTIONS = {
    "errors": (
        "Error of the latents",
        "Relative L2 of the latents against the dense run, after each step; steps that are equal "
        "are left out. One line for each pair.",
    ),
    "steps": (
        "Where it was sparse",
        "Density of each layer in each step of the first pair: kept / allowed blocks, 1 is dense.",
    ),
}


def make_pictures_page(
    title: str, sections: Sequence[Renders], *, command: str, where: Mapping[str, Any]
) -> str:
    """One self-contained file. Charts need matplotlib, and are left out without it."""
    words = {
        "title": title,
        "verdict": verdict(sections),
        "cost": cost(sections),
        "command": command,
        **machine_words(where),
    }
    style = STYLE.search(OTHER_PAGE.read_text(encoding="utf-8"))
    assert style is not None
    html = {"style": style[0], "sections": "\n".join(_section(each) for each in sections)}
    page = Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute({name: escape(text) for name, text in words.items()}, **html)


def _section(renders: Renders) -> str:
    parts = [f"<h2>{escape(renders.model)}</h2>", f"<p>{escape(renders.about)}</p>"]
    shown = [pair for pair in renders.pairs if pair.dense is not None]
    parts += [_pictures(pair) for pair in shown[:MOST_PAIRS]]
    if len(shown) > MOST_PAIRS:
        left = len(shown) - MOST_PAIRS
        parts.append(f'<p class="soft">The pictures of {left} more are left out here.</p>')
    parts.append(_table(pairs_table(renders)))
    if find_spec("matplotlib") is not None:
        parts += [_chart(name, uris) for name, uris in make_charts(renders).items()]
    settings = json.dumps(dict(renders.settings), ensure_ascii=False)
    parts.append(f"<p>Settings; null is the default:</p><pre>{escape(settings)}</pre>")
    return "\n".join(parts)


def _pictures(pair: Pair) -> str:
    seed = "" if pair.seed is None else f", seed {pair.seed}"
    told = "; ".join(words_of(name, value) for name, value in pair.figures.items())
    parts = [f"<h3>{escape(pair.caption)}{seed}</h3>", f'<p class="soft">{escape(told)}</p>']
    for i in shown_frames(len(pair.dense)):
        frame = "" if len(pair.dense) == 1 else f", frame {i + 1} of {len(pair.dense)}"
        dense, sparse = pair.dense[i], pair.sparse[i]
        trio = (("dense", dense), ("sparge", sparse), ("difference", difference_map(dense, sparse)))
        figures = [_figure(f"{way}{frame}", picture) for way, picture in trio]
        parts.append(f'<div class="pictures">{"".join(figures)}</div>')
    return "\n".join(parts)


def _figure(caption: str, picture: Any) -> str:
    kind = ' class="small"' if max(picture.shape[:2]) <= SIDE // 4 else ""
    image = f'<img{kind} src="{data_uri(picture)}" alt="{escape(caption)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def data_uri(picture: Any) -> str:
    """A picture uint8 `[H, W, 3]` as an embedded PNG of at most `SIDE` pixels."""
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(c.heading)}</th>' for c in table.columns)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for cells in table.cells()
    )
    told = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>'
        f'</table></div>\n<div class="notes">{told}</div>'
    )


def _chart(name: str, uris: Mapping[str, str]) -> str:
    heading, caption = CAPTIONS[name]
    return (
        f"<h3>{heading}</h3>\n<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{uris["dark"]}">\n'
        f'<img src="{uris["light"]}" alt="{heading}"></picture>\n'
        f"<figcaption>{caption}</figcaption></figure>"
    )
