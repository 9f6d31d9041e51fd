"""NOUN instructions that one query-key pair takes in the attention kernel's loop over full blocks.

Counted in the machine code that Triton makes (`sparge bench --static`), the matrix products' own
included; a test compares the table with the record of that check. A loop of `n` instructions for a
tile of `block_m` queries and 64 keys gives each pair n · threads / (64 · block_m).
"""

from __future__ import annotations

from collections.abc import Mapping

Counts = Mapping[str, tuple[float, float]]
"""By precision, at head dims 64 and 128; about 3 % above the most that was counted with Triton 3.6
to 3.9."""

# Products of one warp (mma.sync). "half" at 128 and "exact" have small tiles, for the registers.
_WARP: Counts = {
    "int8": (12.9, 17.3),
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
    "half": (11.6, 14.1),
    "exact": (31.0, 97.0),
}
_CDNA: Counts = {
    "int8": (17.4, 21.9),
    "int8-fast": (11.8, 15.0),
    "half": (16.5, 23.6),
    "exact": (23.3, 47.0),
}
# Few registers: tiles of 16 and 32 queries. fp8 of gfx12 was not compiled; as int8.
_RDNA: Counts = {
    "int8": (30.0, 110.0),
    "int8-fast": (30.0, 110.0),
    "half": (35.0, 46.8),
    "exact": (255.0, 480.0),
}
LEGACY_INT8: Counts = {
    **_SM_100,
    "int8": (14.9, 17.2),
    "int8-fast": (19.9, 27.4),
}
"""sm_100 where Triton, before 3.8, multiplies int8 as on sm_80."""
_SM_103: Counts = {**LEGACY_INT8, "int8": (16.9, 21.8), "int8-fast": (24.0, 31.2)}
_FAMILIES = {
    "sm_90": _SM_90,
    "sm_100": _SM_100,
    "sm_103": _SM_103,
    "sm_110": _SM_103,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}


def instructions_of(architecture: str, precision: str, D: int, *, legacy: bool = False) -> float:
    """For a pair, at head dim 64 or 128. legacy: see `LEGACY_INT8`."""
    own = _RDNA if architecture.startswith(("gfx11", "gfx12")) else _WARP
    counts = LEGACY_INT8 if legacy else _FAMILIES.get(architecture, own)
    return counts[precision][0 if D <= 64 else 1]
