"""The one error of our own; the caller's mistakes are plain ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Mapping


class Unsupported(RuntimeError):  # noqa: N818 - reads as the answer it is
    """A fair request that nothing here can serve; lists every backend with its reason."""

    def __init__(self, what: str, reasons: Mapping[str, str], way_out: str = "") -> None:
        self.reasons = dict(reasons)
        lines = [what, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join([*lines, way_out] if way_out else lines))
