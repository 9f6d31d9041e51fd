"""Draw the plans of docs/recipes.md: `python docs/tools/pictures.py` writes docs/pictures/*.svg.

The plans are real ones, of the reference on synthetic inputs. tests/test_docs.py checks that the
committed files are what this script writes.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

import sparge
from sparge import KeepError, KeepFraction, KeepMass, Recipe
from sparge.synthetic import structured_qkv

FOLDER = Path(__file__).parent.parent / "pictures"
HEAD, TOKENS, CELL = 2, 2048, 7  # a key block is CELL wide, a query block twice as high
SIDE, GAP = TOKENS // sparge.BLOCK_K * CELL, 24
PICTURES = {
    "keep": {
        "KeepMass(0.98), the default": Recipe(),
        "KeepMass(0.9)": Recipe(KeepMass(0.9)),
        "KeepFraction(0.2)": Recipe(KeepFraction(0.2)),
        "KeepError(0.02)": Recipe(KeepError(0.02)),
    },
    "predictor": {
        "mean": Recipe(predictor="mean"),
        "mean, min_similarity=0.4": Recipe(predictor="mean", min_similarity=0.4),
        "rows": Recipe(predictor="rows"),
        "blend, the default": Recipe(),
    },
    "forced": {
        "sink_blocks=0, local_blocks=0": Recipe(sink_blocks=0, local_blocks=0),
        "sink_blocks=1, local_blocks=1": Recipe(),
        "local_blocks=4": Recipe(local_blocks=4),
        "protect=((640, 768),)": Recipe(protect=((640, 768),)),
    },
}


def draw(recipes: dict[str, Recipe]) -> str:
    """An SVG with one panel for each recipe."""
    query, key, value = structured_qkv(Hq=4, Hk=4, L=TOKENS)
    width, height = len(recipes) * (SIDE + GAP) + GAP, SIDE + 68
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, (title, recipe) in enumerate(recipes.items()):
        given = {"value": value} if isinstance(recipe.keep, KeepError) else {}
        plan = sparge.make_plan(
            query, key, is_causal=True, recipe=recipe, backend="reference", **given
        )
        out, _ = sparge.attend(query, key, value, plan, recipe=recipe, backend="reference")
        error = sparge.output_error(query, key, value, out, is_causal=True)[0, HEAD]
        kept = plan.to_mask()[0, HEAD]
        density = kept.sum() / plan.allowed[0, HEAD].sum()
        parts.append(f'<g transform="translate({GAP + i * (SIDE + GAP)},44)">')
        parts.append(f'<text y="-24" font-weight="bold">{title}</text>')
        parts.append(f'<text y="-7">density {density:.2f}, error {error:.3f}</text>')
        parts += [*_cells(kept, plan.allowed[0, HEAD]), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _cells(kept: Tensor, allowed: Tensor) -> list[str]:
    """Per query block a light bar of what it may attend; dark cells are kept."""
    light = [(i_q, 0, n) for i_q, n in enumerate(allowed.tolist())]
    dark = [(i_q, i_k, 1) for i_q, i_k in kept.nonzero().tolist()]
    return [_bars(light, "#dde3ee"), _bars(dark, "#24508f")]


def _bars(bars: list[tuple[int, int, int]], colour: str) -> str:
    high = 2 * CELL
    each = [
        f"M{i_k * CELL} {i_q * high}h{n * CELL}v{high - 1}h{-n * CELL}z" for i_q, i_k, n in bars
    ]
    return f'<path fill="{colour}" d="{"".join(each)}"/>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, recipes in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(recipes))
