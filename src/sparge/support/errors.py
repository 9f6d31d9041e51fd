"""`Unsupported`. Mistakes of the caller are plain ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Mapping


class Unsupported(RuntimeError):  # noqa: N818 - reads as the answer it is
    """A valid request that no backend here can serve; lists every backend with its reason."""

    def __init__(self, what: str, reasons: Mapping[str, str], way_out: str = "") -> None:
        self.what, self.reasons, self.way_out = what, dict(reasons), way_out
        lines = [what, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join([*lines, way_out] if way_out else lines))

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, dict[str, str], str]]:
        """Pickle by parts, so that the error crosses process boundaries."""
        return Unsupported, (self.what, self.reasons, self.way_out)
