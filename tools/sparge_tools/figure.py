"""matplotlib figures as PNG; matplotlib is imported at use."""

from __future__ import annotations

import io
from typing import Any


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A figure without pyplot, which would select a window system and keep every figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", **options)


def to_png(figure: Any, *, dpi: int) -> bytes:
    """Without the name of the program in the file: equal numbers give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()
