"""NOUN instructions that one query-key pair takes in the attention kernel's loop over full blocks.

Counted in the machine code that Triton makes (`sparge bench --static`), the matrix products' own
included; a test compares the table with the record of that check. A loop of `n` instructions for a
tile of `block_m` queries and 64 keys gives each pair n · threads / (64 · block_m).
"""

from __future__ import annotations

from collections.abc import Mapping

Counts = Mapping[str, tuple[float, float]]
"""By precision, at head dims 64 and 128; about 3 % above what was counted."""

# Products of one warp (mma.sync). "half" at 128 and "exact" have small tiles, for the registers.
_WARP: Counts = {
    "int8": (12.3, 16.5),
    "int8-fast": (13.3, 17.5),
    "half": (12.6, 36.0),
    "exact": (32.0, 104.0),
}
_SM_90: Counts = {
    "int8": (10.8, 12.7),
    "int8-fast": (12.7, 14.4),
    "half": (11.3, 13.2),
    "exact": (32.0, 107.0),
}
_SM_100: Counts = {
    "int8": (11.5, 13.0),
    "int8-fast": (12.5, 14.8),
    "half": (11.3, 13.1),
    "exact": (31.0, 97.0),
}
_CDNA: Counts = {
    "int8": (14.4, 15.9),
    "int8-fast": (9.2, 11.0),
    "half": (13.4, 18.6),
    "exact": (18.7, 41.0),
}
# Few registers: tiles of 16 and 32 queries. fp8 of gfx12 was not compiled; as int8.
_RDNA: Counts = {
    "int8": (21.0, 91.0),
    "int8-fast": (21.0, 91.0),
    "half": (33.5, 37.0),
    "exact": (255.0, 480.0),
}
LEGACY_INT8: Counts = {**_SM_100, "int8": (14.9, 17.2), "int8-fast": (16.3, 19.0)}
"""sm_100 where Triton, before 3.8, multiplies int8 as on sm_80; int8 counted with 3.7.1, int8-fast
as much more as it has with 3.9."""
_FAMILIES = {
    "sm_90": _SM_90,
    "sm_100": _SM_100,
    "sm_103": LEGACY_INT8,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}


def instructions_of(architecture: str, precision: str, D: int, *, legacy: bool = False) -> float:
    """For a pair, at head dim 64 or 128. legacy: see `LEGACY_INT8`."""
    own = _RDNA if architecture.startswith(("gfx11", "gfx12")) else _WARP
    counts = LEGACY_INT8 if legacy else _FAMILIES.get(architecture, own)
    return counts[precision][0 if D <= 64 else 1]
