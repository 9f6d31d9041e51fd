"""A showcase as one self-contained HTML file with embedded figures, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from ..report.machine import load_text
from ..report.table import percent
from . import comparison as say
from .result import Reading, Showcase

STYLE = Path(__file__).with_name("page.css")
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
    title = f"{show.model['name']}: {show.tokens:,} tokens, dense and sparge"
    body = [
        f"<h1>{escape(headline(show))}</h1>",
        f'<p class="verdict">{escape(say.verdict(show))}</p>',
        f'<p class="cost">{escape(say.cost(show))}</p>',
        tiles(show),
        "<h2>The question at the end of the document</h2>",
        needle(show),
        "<h2>Side by side</h2>",
        table(show),
        *(figure(name, figures[name]) for name in CAPTIONS if name in figures),
        *([] if show.heads else [nothing_sparse(show)]),
        "<h2>How this was made</h2>",
        details(show),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>\n",
        ]
    )


def headline(show: Showcase) -> str:
    facts = show.model
    return (
        f"sparge demo · {facts['name']} ({facts['layers']} layers, {facts['heads']} heads) reads "
        f"{show.tokens:,} tokens of “{show.text['name']}” in {show.dtype} on "
        f"{show.where['machine']['cpu']}, torch threads: {show.where['machine']['threads']}"
    )


def tiles(show: Showcase) -> str:
    dense, sparge = show.dense, show.sparge
    needle_kind = "bad" if dense.found and not sparge.found else "good" if sparge.found else ""
    boxes = [
        (
            "First token",
            f"{show.speedup:.2f}×",
            f"{say.seconds(dense.first_token)} → {say.seconds(sparge.first_token)}; "
            f"{show.limit:.2f}× if attention took no time",
            "accent" if show.speedup >= 1 else "bad",
        ),
        (
            "Attention alone",
            f"{show.attention_speedup:.2f}×",
            f"{say.seconds(dense.attention_seconds)} → {say.seconds(sparge.attention_seconds)}",
            "accent" if show.attention_speedup >= 1 else "bad",
        ),
        (
            "Attention computed",
            percent(show.density),
            "of the allowed blocks, over all calls (density)",
            "",
        ),
        (
            "Perplexity",
            say.signed_percent(show.perplexity_change),
            f"{dense.perplexity:.3f} → {sparge.perplexity:.3f}",
            "",
        ),
        ("Needle", *say.NEEDLE_SHORT[dense.found, sparge.found], needle_kind),
    ]
    made = [
        f'<div class="tile"><span class="what">{escape(what)}</span>'
        f'<b class="{kind}">{escape(number)}</b><span>{escape(about)}</span></div>'
        for what, number, about, kind in boxes
    ]
    return f'<div class="tiles">\n{chr(10).join(made)}\n</div>'


def needle(show: Showcase) -> str:
    hidden = show.needle
    answers = "\n".join(
        f"<div>{_verdict_of(reading)} <b>{name}</b><br>"
        f'<span class="soft">{escape(hidden.prefix)}</span><mark>{escape(reading.answer)}</mark>'
        "</div>"
        for name, reading in (("dense", show.dense), ("sparge", show.sparge))
    )
    return (
        f"<p>One sentence was hidden at token {hidden.token:,} of {show.tokens:,} "
        f"({hidden.depth}% into the text):</p>\n"
        f'<blockquote class="fact">{escape(hidden.fact)}</blockquote>\n'
        f"<p>At the end both were asked: {escape(hidden.question)} The beginning of the answer was "
        "given (grey); the model wrote the rest from the cache of the same "
        f'prefill:</p>\n<div class="answers">\n{answers}\n</div>'
    )


def _verdict_of(reading: Reading) -> str:
    return '<b class="good">✓</b>' if reading.found else '<b class="bad">✗</b>'


def table(show: Showcase) -> str:
    head = "".join(f'<th scope="col">{escape(c.heading)}</th>' for c in say.COLUMNS)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row["what"])}</th>'
        + "".join(f"<td>{escape(row[c.key])}</td>" for c in say.COLUMNS[1:])
        + "</tr>"
        for row in say.comparison_rows(show)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in say.notes(show))
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        f'</table></div>\n<div class="notes">{notes}</div>'
    )


def figure(name: str, uris: dict[str, str]) -> str:
    title, caption = CAPTIONS[name]
    return (
        f"<h2>{escape(title)}</h2>\n<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{uris["dark"]}">'
        f'<img src="{uris["light"]}" alt="{escape(title)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def nothing_sparse(show: Showcase) -> str:
    why = "; ".join(show.sparge.fallbacks) or "no reason was recorded"
    return (
        f'<p class="soft">No layer ran sparse, so there is no plan to draw: {escape(why)}. '
        "Try a longer document.</p>"
    )


def details(show: Showcase) -> str:
    where = show.where
    found = ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v)
    ran = ", ".join(f"{way} {n}×" for way, n in show.sparge.ran.items())
    facts = {
        "command": f"<code>{escape(show.command)}</code>",
        "model": escape(f"{show.model['name']}, digest {show.model['digest'][:12]}"),
        "text": escape(f"{show.text['name']}, digest {show.text['digest'][:12]}"),
        "machine": escape(where["machine_line"]),
        "instruction set": escape(where["isa"] or "none: the reference ran"),
        "load before": escape(load_text(dict(where))),
        "versions": escape(found),
        "date": escape(where["date"]),
        "timing": escape(say.how_often(show)),
        "dense is": "torch’s scaled_dot_product_attention in every layer",
        "sparge ran": escape(f"{ran} in the prefill"),
        "not sparse": _lines(say.fallback_lines(show)),
        "this run took": escape(say.seconds(show.took_seconds)),
    }
    rows = "\n".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts.items())
    recipe = escape(json.dumps(show.recipe.to_dict()))
    return f"<dl>\n{rows}\n</dl>\n<p>The recipe:</p>\n<pre>{recipe}</pre>"


def _lines(lines: Iterable[str]) -> str:
    return "<br>".join(map(escape, lines)) or "nothing"
