"""What the native core costs before anything was measured here, and how it is measured."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from ...support.cpuinfo import cpu_name
from ...values.backend import (
    CPU,
    DENSE_LSE,
    DENSE_WAY,
    DTYPES,
    HEAD_DIMS,
    WAYS,
    Measuring,
    Place,
    Rates,
    UnitCosts,
    name_of,
)
from . import library

FEWEST_PAIRS = 1 << 19
"""Calls of fewer query-key pairs take a millisecond or two; planning alone takes half of that."""


def _built_in() -> dict[str, UnitCosts]:
    """Nanoseconds of one thread with AVX2 at head dim 64, twice that at 128. Only ratios matter,
    and ours are a quarter dearer than measured there: a machine not known yet is not gambled on."""
    ours = {"int8": 4.0, "int8-fast": 3.8, "half": 5.0, "exact": 5.0}
    elements = {DENSE_WAY: 4.0, DENSE_LSE: 12.0, **ours}
    tokens, calls = dict.fromkeys(ours, 150.0), dict.fromkeys(ours, 500_000.0)
    return {
        name_of(dtype, D, way): UnitCosts(
            calls.get(way, 20_000.0) * 1e-9,
            tokens.get(way, 0.0) * 1e-9 * D / HEAD_DIMS[0],
            elements[way] * 1e-9 * D / HEAD_DIMS[0],
        )
        for dtype in DTYPES.values()
        for D in HEAD_DIMS
        for way in WAYS
    }


BUILT_IN = _built_in()


def _place(kind: str, index: int) -> Place:
    return library.chosen_isa(library.available()), torch.get_num_threads()


def key_of(place: Place) -> dict[str, str]:
    isa, threads = place
    return {
        "cpu": cpu_name(),
        "isa": isa,
        "threads": str(threads),
        # A library that was built anew may be faster, whatever its version says.
        "library": native_build(),
    }


def native_build() -> str:
    """Size and time of the library's file; "" where there is none."""
    try:
        facts = Path(library.library() or "").stat()
    except OSError:
        return ""
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def _measuring(place: Place) -> Measuring:
    """About 1.5 s. The longer length is the shortest that torch cuts as it does the longest; ours
    costs the same per pair from there on, too (LAB.md). An LSE's cost per pair is plain from short
    ones. The fastest turn counts: short turns are the likeliest to be undisturbed."""
    return Measuring(
        CPU,
        heads=max(2, place[1]),  # no thread waits for work
        lengths=(256, 768),
        lse_lengths=(256,),
        seconds=1.5,
        seconds_in_call=1.5,
        fewest_rounds=3,
        limit=5.0,
    )


RATES = Rates(
    (CPU,),
    place=_place,
    key=key_of,
    estimate=lambda place: BUILT_IN,
    estimated_by="built-in estimate, nothing was measured",
    measuring=_measuring,
    # Long prompts and videos mostly keep less; where a plan keeps more, the plan itself decides.
    unseen_density=0.6,
    retry_after=timedelta(hours=1),
    on_host=True,
    fewest_pairs=FEWEST_PAIRS,
    packs_dense=True,
)
