"""The crossover to dense attention, as `sparge doctor` reports it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import product
from typing import Any

from ..backends.cpu import library as native
from ..routing import CPU, current_router
from ..routing import cost_file as cache
from ..routing.crossover import CLEARLY, Crossover
from ..support.errors import Unsupported
from ..values.backend import DENSE_WAY, DTYPES, HEAD_DIMS, name_of
from ..values.recipe import PRECISIONS
from .screen import Column, share

COLUMNS = (
    Column("dtype", "dtype"),
    Column("D", "head dim", lambda D: f"{D}"),
    Column(DENSE_WAY, "dense,\nns per pair", lambda seconds: f"{seconds * 1e9:.2f}"),
    *(Column(precision, f"{precision}:\ndense from", share) for precision in PRECISIONS),
)


def calibrate() -> dict[str, Any]:
    """Measure again, store the result, and return its status."""
    if why := native.why_missing():
        raise Unsupported("there is nothing to calibrate:", {"cpu": why}, "dense attention is used")
    measured = current_router().measure(CPU, CPU)
    return _status(measured, current_router().adopt(measured, CPU, CPU), "measured now")


def measurable() -> bool:
    """Whether there is a native core to measure."""
    return native.why_missing() is None


def cached() -> dict[str, Any]:
    """The cached crossover of this machine, number of threads and instruction set."""
    if why := native.why_missing():
        return {"state": "none", "why": why}
    key = current_router().key(CPU, CPU)
    found, why = cache.read(key)
    if found is not None:
        return _status(found, "", "measured before")
    return {
        "state": "none",
        "why": why,
        "key": key,
        "file": cost_file_path(key),
        "failure": current_router().failure(CPU, CPU),
    }


def instruction_sets() -> dict[str, Any]:
    """Instruction sets of the native core, without those for tests, and the one in use."""
    there = [name for name in native.available() if name not in native.FOR_TESTS]
    runs = native.chosen_isa(native.available()) if there else None
    return {"available": there, "runs": runs, "forced": os.environ.get(native.ENV_ISA) or None}


def _status(crossover: Crossover, why: str, state: str) -> dict[str, Any]:
    names = ("date", "took", "noise", "busy", "steady")
    return {
        "state": state,
        "why": why,
        "key": dict(crossover.key),
        "file": None if why else cost_file_path(crossover.key),
        **{name: getattr(crossover, name) for name in names},
        "failure": current_router().failure(CPU, CPU),
        "rows": crossover_rows(crossover),
        "costs": cache.to_dict(crossover)["costs"],
    }


def crossover_rows(crossover: Crossover) -> list[dict[str, Any]]:
    """Density above which dense attention is faster, on long sequences."""
    rows = []
    for dtype, D in product(DTYPES.values(), HEAD_DIMS):
        ways = (DENSE_WAY, *PRECISIONS)
        costs = {way: crossover.costs.get(name_of(dtype, D, way)) for way in ways}
        pair = {way: cost.element for way, cost in costs.items() if cost and cost.element}
        dense = pair.pop(DENSE_WAY, 0.0)
        shares = {way: min(CLEARLY * dense / ours, 1.0) for way, ours in pair.items()}
        rows.append({"dtype": dtype, "D": D, DENSE_WAY: dense, **shares})
    return rows


def status_lines(status: dict[str, Any]) -> dict[str, str]:
    """The status as text, by heading."""
    failed = {"calibration failed": status["failure"]} if status.get("failure") else {}
    if status["state"] == "none":
        return {
            "crossover to dense": f"not measured: {status['why']}. The first call that needs it "
            "measures it; `sparge doctor --calibrate` measures it now. Until then a built-in "
            "estimate is used",
            **failed,
        }
    facts = ", ".join(f"{name} {value}" for name, value in status["key"].items())
    took = (
        f"in {status['took']:.1f} s, a median turn {status['noise']:.2f}x the fastest, "
        f"{status['busy']:.0%} of the cores used by others"
    )
    if not status["steady"]:
        took += "; not steady: a later process measures again, or --calibrate on a quiet machine"
    return {
        "crossover to dense": f"{status['state']}, {status['date']}, {took}",
        "measured for": facts,
        "kept in": status["file"] or status["why"],
        **failed,
    }


def cost_file_path(key: Mapping[str, str]) -> str | None:
    """None without a home directory."""
    try:
        return str(cache.path_of(key))
    except RuntimeError:
        return None
