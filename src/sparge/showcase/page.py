"""A showcase as one self-contained HTML file with embedded figures, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from string import Template

from ..report.machine import load_text
from ..report.table import percent
from . import comparison as say
from .result import Showcase

PAGE = Path(__file__).with_name("page.html")
CAPTIONS = {
    "time": (
        "Where the time goes",
        "One prefill of each. Only the attention differs; the rest of the model does the same work "
        "in both and limits the speed-up.",
    ),
    "plans": (
        "Exact attention, and the blocks that were computed",
        "A few heads of three layers, from the sparsest to the densest. Colour: blocks that the "
        "plan computes. Grey: blocks that it skips; dark grey would be attention that was missed. "
        "▼ marks the needle. The scale is logarithmic.",
    ),
    "sparsity": (
        "Sparsity by layer and head",
        "Per cent of the allowed blocks that were skipped. Blank: a layer that ran dense.",
    ),
}


def make_page(show: Showcase, figures: dict[str, dict[str, str]]) -> str:
    """figures: by name, a data URI for each theme."""
    model, machine, needle = show.model, show.where["machine"], show.needle
    words = {
        "title": f"{model['name']}: {show.tokens:,} tokens, dense and sparge",
        "headline": f"sparge demo · {model['name']} ({model['layers']} layers, {model['heads']} "
        f"heads) reads {show.tokens:,} tokens of “{show.text['name']}” in {show.dtype} on "
        f"{machine['cpu']}, torch threads: {machine['threads']}",
        "verdict": say.verdict(show),
        "cost": say.cost(show),
        "token": f"{needle.token:,}",
        "tokens": f"{show.tokens:,}",
        "depth": str(needle.depth),
        "fact": needle.fact,
        "question": needle.question,
        "recipe": json.dumps(show.recipe.to_dict()),
    }
    drawn = [_figure(*CAPTIONS[name], figures[name]) for name in CAPTIONS if name in figures]
    parts = {
        "tiles": _tiles(show),
        "answers": _answers(show),
        "columns": (f'<th scope="col">{escape(c.heading)}</th>' for c in say.COLUMNS),
        "rows": map(_row, say.comparison_rows(show)),
        "notes": (f"<p>{escape(note)}</p>" for note in say.notes(show)),
        "figures": drawn if show.heads else [*drawn, _nothing_sparse(show)],
        "details": _details(show),
    }
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        {name: escape(text) for name, text in words.items()},
        **{name: "\n".join(each) for name, each in parts.items()},
    )


def _tiles(show: Showcase) -> Iterator[str]:
    dense, sparge = show.dense, show.sparge
    found = "bad" if dense.found and not sparge.found else "good" if sparge.found else ""
    _, *needle = say.NEEDLE[dense.found, sparge.found]
    first = f"{say.seconds(dense.first_token)} → {say.seconds(sparge.first_token)}"
    inside = f"{say.seconds(dense.attention_seconds)} → {say.seconds(sparge.attention_seconds)}"
    faster, limit = show.attention_speedup, f"{show.limit:.2f}× if attention took no time"
    density = "of the allowed blocks, over all calls (density)"
    change = say.signed_percent(show.perplexity_change)
    tiles = [
        ("First token", f"{show.speedup:.2f}×", f"{first}; {limit}", _gain(show.speedup)),
        ("Attention alone", f"{faster:.2f}×", inside, _gain(faster)),
        ("Attention computed", percent(show.density), density, ""),
        ("Perplexity", change, f"{dense.perplexity:.3f} → {sparge.perplexity:.3f}", ""),
        ("Needle", *needle, found),
    ]
    for what, number, about, kind in tiles:
        yield (
            f'<div class="tile"><span class="what">{what}</span>'
            f'<b class="{kind}">{escape(number)}</b><span>{escape(about)}</span></div>'
        )


def _gain(ratio: float) -> str:
    return "accent" if ratio >= 1 else "bad"


def _answers(show: Showcase) -> Iterator[str]:
    for name, reading in (("dense", show.dense), ("sparge", show.sparge)):
        kind, sign = ("good", "✓") if reading.found else ("bad", "✗")
        yield (
            f'<div><b class="{kind}">{sign}</b> <b>{name}</b><br>'
            f'<span class="soft">{escape(show.needle.prefix)}</span>'
            f"<mark>{escape(reading.answer)}</mark></div>"
        )


def _row(row: dict[str, str]) -> str:
    what, *cells = (escape(row[column.key]) for column in say.COLUMNS)
    return f'<tr><th scope="row">{what}</th><td>{"</td><td>".join(cells)}</td></tr>'


def _figure(title: str, caption: str, uris: dict[str, str]) -> str:
    return (
        f"<h2>{escape(title)}</h2>\n<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{uris["dark"]}">'
        f'<img src="{uris["light"]}" alt="{escape(title)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _nothing_sparse(show: Showcase) -> str:
    why = "; ".join(show.sparge.fallbacks) or "no reason was recorded"
    return (
        f'<p class="soft">No layer ran sparse, so there is no plan to draw: {escape(why)}. '
        "Try a longer document.</p>"
    )


def _details(show: Showcase) -> Iterable[str]:
    where = show.where
    ran = ", ".join(f"{way} {n}×" for way, n in show.sparge.ran.items())
    facts = {
        "model": f"{show.model['name']}, digest {show.model['digest'][:12]}",
        "text": f"{show.text['name']}, digest {show.text['digest'][:12]}",
        "machine": where["machine_line"],
        "instruction set": where["isa"] or "none: the reference ran",
        "load before": load_text(where),
        "versions": ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v),
        "date": where["date"],
        "timing": say.how_often(show),
        "dense is": "torch’s scaled_dot_product_attention in every layer",
        "sparge ran": f"{ran} in the prefill",
        "not sparse": "\n".join(say.fallback_lines(show)) or "nothing",
        "this run took": say.seconds(show.took_seconds),
    }
    yield f"<dt>command</dt><dd><code>{escape(show.command)}</code></dd>"
    for name, text in facts.items():
        yield f"<dt>{name}</dt><dd>{escape(text).replace(chr(10), '<br>')}</dd>"
