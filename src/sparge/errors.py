"""The one error of our own; the caller's mistakes are plain ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Mapping


class Unsupported(RuntimeError):  # noqa: N818 - reads as the answer it is
    """A fair request that nothing here can serve; lists every backend with its reason."""

    def __init__(self, what: str, reasons: Mapping[str, str], way_out: str = "") -> None:
        self.what, self.reasons, self.way_out = what, dict(reasons), way_out
        lines = [what, *(f"  {name}: {reason}" for name, reason in self.reasons.items())]
        super().__init__("\n".join([*lines, way_out] if way_out else lines))

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, dict[str, str], str]]:
        """Pickled by its parts, so that it survives the way back from another process."""
        return Unsupported, (self.what, self.reasons, self.way_out)
