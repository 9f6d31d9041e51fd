"""A block map as a few lines of text."""

from __future__ import annotations

import torch
from torch import Tensor

SHADES = " ░▒▓█"
NOTHING = "·"


def draw_blocks(kept: Tensor, allowed: Tensor, width: int = 32) -> str:
    """Each character is a patch of blocks: the darker, the more of the allowed ones are kept.

    kept, allowed: bool `[n_q, n_k]`. A patch in which nothing may be attended is a dot.
    """
    n_q, n_k = kept.shape
    across = min(width, n_k)
    down = min(max(width // 2, 1), n_q)  # a character is about twice as high as wide
    rows, cols = _edges(n_q, down), _edges(n_k, across)
    kept, allowed = kept.to(torch.int64).cpu(), allowed.to(torch.int64).cpu()
    lines = []
    for top, bottom in rows:
        line = ""
        for left, right in cols:
            may = int(allowed[top:bottom, left:right].sum())
            has = int(kept[top:bottom, left:right].sum())
            # Any kept block shows, and only a full patch is solid.
            shade = min(1 + 3 * has // max(may, 1), 3) if 0 < has < may else 4 * (has > 0)
            line += SHADES[shade] if may else NOTHING
        lines.append(f"  {line}")
    return "\n".join(lines)


def _edges(n: int, parts: int) -> list[tuple[int, int]]:
    return [(p * n // parts, (p + 1) * n // parts) for p in range(parts)]
