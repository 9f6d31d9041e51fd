"""A showcase as one self-contained HTML file with embedded figures, light and dark."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from string import Template

from sparge.cli.machine import load_text
from sparge.cli.screen import percent

from . import comparison as say
from .result import Showcase

PAGE = Path(__file__).with_name("page.html")
SPARSE_OR_NOT = re.compile("<!-- if sparse -->\n(.*)<!-- else -->\n(.*)<!-- end -->\n", re.DOTALL)


def make_page(show: Showcase, figures: dict[str, dict[str, str]]) -> str:
    """figures: by name, a data URI for each theme."""
    words = {name: escape(text) for name, text in (_results(show) | _origin(show)).items()}
    cells = [[escape(text) for text in row.values()] for row in say.comparison_rows(show)]
    html = {
        "rows": "\n".join(
            f'<tr><th scope="row">{what}</th><td>{"</td><td>".join(rest)}</td></tr>'
            for what, *rest in cells
        ),
        "notes": "".join(f"<p>{escape(note)}</p>" for note in say.notes(show)),
        **{f"{name}_{look}": uri for name, of in figures.items() for look, uri in of.items()},
    }
    page = SPARSE_OR_NOT.sub(r"\1" if show.heads else r"\2", PAGE.read_text(encoding="utf-8"))
    return Template(page).substitute(words, **html)


def _results(show: Showcase) -> dict[str, str]:
    dense, sparge, needle = show.dense, show.sparge, show.needle
    _, found, by_whom = say.NEEDLE[dense.found, sparge.found]
    lost = dense.found and not sparge.found
    out = {
        "verdict": say.verdict(show),
        "cost": say.cost(show),
        "speedup": f"{show.speedup:.2f}",
        "speedup_kind": _gain(show.speedup),
        "first_token": f"{say.seconds(dense.first_token)} → {say.seconds(sparge.first_token)}",
        "limit": f"{show.limit:.2f}",
        "attention": f"{show.attention_speedup:.2f}",
        "attention_kind": _gain(show.attention_speedup),
        "attention_seconds": f"{say.seconds(dense.attention_seconds)} → "
        f"{say.seconds(sparge.attention_seconds)}",
        "density": percent(show.density),
        "change": say.signed_percent(show.perplexity_change),
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
    where, model = show.where, show.model
    return {
        "model": model["name"],
        "model_digest": model["digest"][:12],
        "layers": str(model["layers"]),
        "heads": str(model["heads"]),
        "text": show.text["name"],
        "text_digest": show.text["digest"][:12],
        "tokens": f"{show.tokens:,}",
        "dtype": show.dtype,
        "cpu": where["machine"]["cpu"],
        "threads": str(where["machine"]["threads"]),
        "command": show.command,
        "machine": where["machine_line"],
        "isa": where["isa"] or "none: the reference ran",
        "load": load_text(where),
        "versions": ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v),
        "date": where["date"],
        "timing": say.how_often(show),
        "ran": ", ".join(f"{way} {n}×" for way, n in show.sparge.ran.items()),
        "not_sparse": "\n".join(say.fallback_lines(show)) or "nothing",
        "took": say.seconds(show.took_seconds),
        "recipe": json.dumps(show.recipe.to_dict()),
    }


def _gain(ratio: float) -> str:
    return "accent" if ratio >= 1 else "bad"
