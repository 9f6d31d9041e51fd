"""What the native core and dense attention cost before anything was measured here."""

from __future__ import annotations

from ...routing.crossover import (
    DENSE_LSE,
    DENSE_WAY,
    DTYPES,
    HEAD_DIMS,
    WAYS,
    Crossover,
    UnitCosts,
    name_of,
)


def _built_in() -> Crossover:
    """Nanoseconds of one thread with AVX2 at head dim 64, twice that at 128. Only ratios matter,
    and ours are a quarter dearer than measured there: a machine not known yet is not gambled on."""
    ours = {"int8": 4.0, "int8-fast": 3.8, "half": 5.0, "exact": 5.0}
    elements = {DENSE_WAY: 4.0, DENSE_LSE: 12.0, **ours}
    tokens, calls = dict.fromkeys(ours, 150.0), dict.fromkeys(ours, 500_000.0)
    costs = {
        name_of(dtype, D, way): UnitCosts(
            calls.get(way, 20_000.0) * 1e-9,
            tokens.get(way, 0.0) * 1e-9 * D / HEAD_DIMS[0],
            elements[way] * 1e-9 * D / HEAD_DIMS[0],
        )
        for dtype in DTYPES.values()
        for D in HEAD_DIMS
        for way in WAYS
    }
    return Crossover(costs)


BUILT_IN = _built_in()
