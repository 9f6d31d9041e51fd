"""A page of renders: pictures dense, sparse and their difference; figures; where it was sparse."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from sparge.cli.machine import load_text
from sparge.cli.screen import Table

from ..renders import Pair, Renders, difference_map
from ..renders.media import shown_frames
from . import pictures_tables as say
from .page import PAGE as OTHER_PAGE

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
        "verdict": say.verdict(sections),
        "cost": say.cost(sections),
        "command": command,
        "cpu": where["machine"]["cpu"],
        "threads": str(where["machine"]["threads"]),
        "machine": where["machine_line"],
        "isa": where["isa"] or "none: the reference ran",
        "load": load_text(where),
        "versions": ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v),
        "date": where["date"],
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
    parts.append(_table(say.pairs_table(renders)))
    if find_spec("matplotlib") is not None:
        from .pictures_figures import make_charts

        parts += [_chart(name, uris) for name, uris in make_charts(renders).items()]
    settings = json.dumps(dict(renders.settings), ensure_ascii=False)
    parts.append(f"<p>Settings; null is the default:</p><pre>{escape(settings)}</pre>")
    return "\n".join(parts)


def _pictures(pair: Pair) -> str:
    seed = "" if pair.seed is None else f", seed {pair.seed}"
    told = "; ".join(say.words_of(name, value) for name, value in pair.figures.items())
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
