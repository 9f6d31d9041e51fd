"""The accelerators, as `sparge doctor` reports them: launch configuration and cost of each card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from ..backends.triton import NAME
from ..backends.triton.architectures import architecture_of
from ..backends.triton.first_launch import needs, this_machine
from ..backends.triton.packages import clash, installation
from ..backends.triton.roofline import card_of
from ..routing import cost_file as cache
from ..routing import current_router
from ..routing.crossover import Crossover
from ..values.backend import cost_names
from .crossover_status import cost_file_path, crossover_rows

VERIFIED = "verified by interpreter and ahead-of-time compilation, see docs/backends.md"
CALIBRATE = "`sparge doctor --calibrate` measures it, the first long call its own kind"


def gpu_status(*, measure: bool) -> dict[str, Any]:
    """triton: its version, or None. packages: version by name of distribution; `clash` says which
    overwrite each other. first_launch: what Triton needs beside itself, each found or with a way
    out; empty for a torch without GPU support. cards: one entry for each kind of card; of several
    equal ones the first is looked at, and calibrated if `measure`."""
    cards: dict[tuple[str, ...], dict[str, Any]] = {}
    for kind, index in _each_device():
        card = card_of(kind, index)
        key = current_router().key(NAME, kind, index)
        known = cards.setdefault(
            tuple(key.values()),
            {"device": kind, "indices": [], "name": card.name, "architecture": card.architecture},
        )
        known["indices"].append(index)
        if "cost" not in known:
            known["launch"] = _launch(kind, index)
            known["cost"] = _measured_now(kind, index) if measure else _cached(kind, index, key)
    packages = installation()
    return {
        "triton": packages.version,
        "packages": packages.found,
        "clash": clash(packages),
        "first_launch": [asdict(need) for need in needs(this_machine())],
        "cards": list(cards.values()),
    }


def _each_device() -> Iterator[tuple[str, int]]:
    """Type and index of every accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    for index in range(torch.accelerator.device_count()):
        yield accelerator.type, index


def _launch(kind: str, index: int) -> dict[str, Any] | str:
    """How kernels are launched, or why they are not."""
    found = architecture_of(kind, index)
    if isinstance(found, str):
        return found
    fp8 = None if found.fp8 is None else str(found.fp8).removeprefix("torch.")
    return {**asdict(found.tiles), "fp8": fp8, "shared": found.shared, "source": found.source}


def _measured_now(kind: str, index: int) -> dict[str, Any]:
    router, where = current_router(), (NAME, kind, index)
    try:
        measured = router.measure(*where)
    except Exception as error:  # a kernel may fail on a card that nobody has tried; doctor goes on
        return _cost(router.crossover(*where), failure=f"{type(error).__name__}: {error}")
    return _cost(measured, "measured now", why=router.adopt(measured, *where))


def _cached(kind: str, index: int, key: dict[str, str]) -> dict[str, Any]:
    _, why = cache.read(key, complete=False)
    return _cost(current_router().crossover(NAME, kind, index), "measured before", why=why)


def _cost(
    found: Crossover | str, state: str = "", *, why: str = "", failure: str = ""
) -> dict[str, Any]:
    """source: "measured", "estimate" or "none". why: why it is not stored, or was not read."""
    if isinstance(found, str):
        return {"source": "none", "state": found, "why": why, "failure": failure}
    facts = ("date", "took", "noise", "steady")
    return {
        "source": found.source,
        "state": state if found.measured else found.words,
        "why": why,
        "failure": failure,
        "file": cost_file_path(found.key) if found.measured and not why else None,
        **{name: getattr(found, name) for name in facts if found.measured},
        "rows": crossover_rows(found),
        "costs": cache.to_dict(found)["costs"],
    }


def gpu_lines(status: dict[str, Any]) -> dict[str, str]:
    """The status as text, by heading."""
    named = " and ".join(f"{name} {version}" for name, version in status["packages"].items())
    triton = f"{named} installed" if named else "triton is not installed"
    lines = {}
    if not status["cards"]:
        lines["gpu"] = f"{triton}; no device: {VERIFIED}"
    for card in status["cards"]:
        heading = f"gpu {', '.join(map(str, card['indices']))}"
        lines[heading] = f"{card['name']} ({card['architecture']}); {triton}"
        lines[f"{heading}, launch"] = _launch_text(card["launch"])
        lines[f"{heading}, crossover"] = _cost_text(card["cost"])
        if card["cost"]["failure"]:
            lines[f"{heading}, failed"] = card["cost"]["failure"]
    if status["clash"]:
        lines["triton, clash"] = status["clash"]
    return lines | _first_launch_lines(status["first_launch"])


def _first_launch_lines(needs: list[dict[str, Any]]) -> dict[str, str]:
    """What is there on one line, and each thing that is missing on one of its own."""
    there = [f"{need['name']} {need['found']}" for need in needs if need["found"]]
    lost = [f"{need['name']}: not found; {need['way_out']}" for need in needs if not need["found"]]
    lines = {"first launch has": "; ".join(there)} if there else {}
    return lines | {f"first launch needs {i}": text for i, text in enumerate(lost, 1)}


def _launch_text(launch: dict[str, Any] | str) -> str:
    if isinstance(launch, str):
        return f"none: {launch}"
    return (
        f"{launch['block_m']} queries per program, {launch['num_warps']} warps, "
        f"{launch['num_stages']} stages; fp8 {launch['fp8'] or 'none'}; "
        f"{launch['shared'] // 1024} KB of shared memory; {launch['source']}"
    )


def _cost_text(cost: dict[str, Any]) -> str:
    if cost["source"] == "none":
        return f"dense attention: {cost['state']}; {CALIBRATE}"
    if cost["source"] == "estimate":
        return f"{cost['state']}; {CALIBRATE}"
    unsteady = "" if cost["steady"] else "; not steady: --calibrate again on a quiet card"
    kinds = f"{len(cost['costs'])} of {len(cost_names())} unit costs"
    return (
        f"{cost['state']}, {cost['date']}, in {cost['took']:.1f} s, a median turn "
        f"{cost['noise']:.2f}x the fastest{unsteady}; {kinds}; kept in "
        f"{cost['file'] or cost['why']}"
    )
