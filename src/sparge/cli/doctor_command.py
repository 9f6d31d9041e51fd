"""`sparge doctor`: this machine, the crossover to dense attention on its CPU and cards, the
backends that serve it, and a self-check."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from ..backends.cpu import library as native
from ..backends.triton import NAME
from ..backends.triton.architectures import architecture_of
from ..backends.triton.first_launch import needs, this_machine
from ..backends.triton.packages import clash, installation
from ..backends.triton.rates import card_of
from ..engine.check import check_call
from ..routing import AUTO, CPU, DENSE, ENV_BACKEND, backends, choose, cost_file, current_router
from ..routing.crossover import CLEARLY, Crossover
from ..support.errors import Unsupported
from ..values.backend import DENSE_WAY, DTYPES, HEAD_DIMS, cost_names, name_of
from ..values.call import Call
from ..values.recipe import DEFAULT, PRECISIONS
from . import BAD_RESULT, OK
from .arguments import add_json
from .machine import devices, environment, machine, versions
from .screen import Column, Table, console, deliver, error, share, show_table
from .self_check import LENGTH, check_backends

CROSSOVER_COLUMNS = (
    Column("dtype", "dtype"),
    Column("D", "head dim", lambda D: f"{D}"),
    Column(DENSE_WAY, "dense,\nns per pair", lambda seconds: f"{seconds * 1e9:.2f}"),
    *(Column(precision, f"{precision}:\ndense from", share) for precision in PRECISIONS),
)
BACKEND_COLUMNS = (
    Column("backend", "backend"),
    Column("serves", "serves\nthe call"),
    Column("why_not", "why not"),
    Column("auto", "backend=auto"),
)
CHECK_COLUMNS = (
    *(Column(name, name) for name in ("backend", "precision", "device", "verdict")),
    Column("error", "error (rel. L1)", error),
    Column("why", "why"),
)
VERIFIED = "verified by interpreter and ahead-of-time compilation, see docs/backends.md"
CALIBRATE = "`sparge doctor --calibrate` measures it, the first long call its own kind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    calibrate = "measure again where dense attention is faster, and store the result"
    parser.add_argument("--calibrate", action="store_true", help=calibrate)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    # Before the checks: their calls could measure it first.
    gpu = gpu_status(measure=args.calibrate)
    missing = native.why_missing() is not None
    crossover = cpu_status(measure=args.calibrate and not (missing and gpu["cards"]))
    checks = [asdict(check) for device in devices() for check in check_backends(device)]
    passed = all(check["verdict"] != "failed" for check in checks)
    document = {
        "format": "sparge.doctor/1",
        "versions": versions(),
        "machine": machine(),
        "environment": environment(),
        "native": instruction_sets(),
        "crossover": crossover,
        "gpu": gpu,
        "backends": [judge_backends(sample_call(device)) for device in devices()],
        "self_check": {"passed": passed, "checks": checks},
    }
    deliver(document, args, lambda: show(document))
    return OK if passed else BAD_RESULT


def sample_call(device: str) -> Call:
    """The attention of one Llama-like layer at prefill."""
    element = torch.empty((), dtype=torch.bfloat16, device=device)
    query, key = element.expand(1, 32, 8192, 128), element.expand(1, 8, 8192, 128)
    return check_call(query, key, key, is_causal=True, enable_gqa=True, recipe=DEFAULT)


def judge_backends(call: Call) -> dict[str, Any]:
    """For each backend whether it serves the call, and whether `auto` chooses it."""
    names = [*(backend.name for backend in backends()), DENSE]
    try:
        auto = choose(call, AUTO)
        verdicts = {**auto.rejected, auto.backend: f"chosen: {auto.reason}"}
    except (Unsupported, ValueError) as failure:  # such as an unknown name in the environment
        verdicts = dict.fromkeys(names, f"fails: {failure}")
    rows = []
    for name in names:
        try:
            choose(call, name)
            serves, why_not = "yes", None
        except Unsupported as refusal:
            serves, why_not = "no", refusal.reasons[name]
        row = {"backend": name, "serves": serves, "why_not": why_not, "auto": verdicts[name]}
        rows.append(row)
    return {"call": str(call), "rows": rows}


def show(document: dict[str, Any]) -> None:
    screen, facts, core = console(), document["machine"], document["native"]
    sets = (facts["instruction_sets"] or {}).items()
    listed = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in sets)
    forced = f"forced by {native.ENV_ISA}" if core["forced"] else f"{native.ENV_ISA} forces one"
    has, runs = ", ".join(core["available"]), f"{core['runs']}, {core['description']} ({forced})"
    lines = {
        **{name: version or "not installed" for name, version in document["versions"].items()},
        "CPU": f"{facts['cpu']} ({facts['architecture']})",
        "cores, torch threads": f"{facts['cores']}, {facts['threads']}",
        "torch CPU capability": facts["cpu_capability"],
        "instruction sets": listed or "not listed by this system",
        "native core": f"has {has}; runs {runs}" if has else "missing",
        **status_lines(document["crossover"]),
        "accelerators": ", ".join(facts["accelerators"]) or "none found by torch",
        **gpu_lines(document["gpu"]),
        "environment": " ".join(f"{k}={v}" for k, v in document["environment"].items())
        or f"no SPARGE_ variable set ({ENV_BACKEND} forces a backend)",
    }
    for name, text in lines.items():
        screen.print(f"{name:22}{text}", soft_wrap=True)
    if rows := document["crossover"].get("rows"):
        title = "\nDensity above which dense attention is faster, on long sequences"
        show_table(screen, Table(title, CROSSOVER_COLUMNS, rows))
    for card in document["gpu"]["cards"]:
        if rows := card["cost"].get("rows"):
            title = f"\nThe same on {card['name']}: {card['cost']['state']}"
            show_table(screen, Table(title, CROSSOVER_COLUMNS, rows))
    for judged in document["backends"]:
        title = f"\nBackends, for the call {judged['call']}, default recipe"
        show_table(screen, Table(title, BACKEND_COLUMNS, judged["rows"]))
    check = document["self_check"]
    title = f"Self-check: all blocks, {LENGTH} tokens, against torch's dense fp64"
    show_table(screen, Table(title, CHECK_COLUMNS, check["checks"]))
    screen.print("self-check passed" if check["passed"] else "self-check FAILED")


# --- the CPU ----------------------------------------------------------------------------------


def cpu_status(*, measure: bool) -> dict[str, Any]:
    """The crossover of this machine, number of threads and instruction set: as it is cached, or
    measured again and stored."""
    if why := native.why_missing():
        if measure:
            reasons = {"cpu": why}
            raise Unsupported("there is nothing to calibrate:", reasons, "dense attention is used")
        return {"state": "none", "why": why}
    router = current_router()
    key = router.key(CPU, CPU)
    found, why = (router.measure(CPU, CPU), "") if measure else cost_file.read(key)
    status = {"state": "none", "why": why, "key": key, "file": cost_file_path(key)}
    if found is None:
        return {**status, "failure": router.failure(CPU, CPU)}
    if measure and (why := router.adopt(found, CPU, CPU)):
        status |= {"why": why, "file": None}
    names = ("date", "took", "noise", "busy", "steady")
    return {
        **status,
        "state": "measured now" if measure else "measured before",
        **{name: getattr(found, name) for name in names},
        "failure": router.failure(CPU, CPU),
        "rows": crossover_rows(found),
        "costs": cost_file.to_dict(found)["costs"],
    }


def instruction_sets() -> dict[str, Any]:
    """Instruction sets of the native core, without those for tests, and the one in use."""
    there = [name for name in native.available() if not native.isas()[name].for_tests]
    runs = native.chosen_isa(native.available()) if there else None
    return {
        "available": there,
        "runs": runs,
        "description": native.isas()[runs].description if runs else None,
        "forced": os.environ.get(native.ENV_ISA) or None,
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
    took = f"{_took(status)}, {status['busy']:.0%} of the cores used by others"
    if not status["steady"]:
        took += "; not steady: a later process measures again, or --calibrate on a quiet machine"
    return {
        "crossover to dense": f"{status['state']}, {status['date']}, {took}",
        "measured for": facts,
        "kept in": status["file"] or status["why"],
        **failed,
    }


def _took(status: dict[str, Any]) -> str:
    return f"in {status['took']:.1f} s, a median turn {status['noise']:.2f}x the fastest"


def cost_file_path(key: Mapping[str, str]) -> str | None:
    """None without a home directory."""
    try:
        return str(cost_file.path_of(key))
    except RuntimeError:
        return None


# --- accelerators -----------------------------------------------------------------------------


def gpu_status(*, measure: bool) -> dict[str, Any]:
    """triton: its version, or None. packages: version by name of distribution; `clash` says which
    overwrite each other. first_launch: what Triton needs beside itself, each found or with a way
    out; empty for a torch without GPU support. cards: one entry for each kind of card; of several
    equal ones the first is looked at, and calibrated if `measure`."""
    cards: dict[tuple[str, ...], dict[str, Any]] = {}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if accelerator is None else accelerator.type
    for index in range(torch.accelerator.device_count() if kind else 0):
        card = card_of(kind, index)
        key = current_router().key(NAME, kind, index)
        known = cards.setdefault(
            tuple(key.values()),
            {"device": kind, "indices": [], "name": card.name, "architecture": card.architecture},
        )
        known["indices"].append(index)
        if "cost" not in known:
            known["launch"] = _launch(kind, index)
            known["cost"] = _card_costs(kind, index, key, measure=measure)
    packages = installation()
    return {
        "triton": packages.version,
        "packages": packages.found,
        "clash": clash(packages),
        "first_launch": [asdict(need) for need in needs(this_machine())],
        "cards": list(cards.values()),
    }


def _launch(kind: str, index: int) -> dict[str, Any] | str:
    """How kernels are launched, or why they are not."""
    found = architecture_of(kind, index)
    if isinstance(found, str):
        return found
    fp8 = None if found.fp8 is None else str(found.fp8).removeprefix("torch.")
    return {**asdict(found.tiles), "fp8": fp8, "shared": found.shared, "source": found.source}


def _card_costs(kind: str, index: int, key: dict[str, str], *, measure: bool) -> dict[str, Any]:
    router, where = current_router(), (NAME, kind, index)
    if not measure:
        _, why = cost_file.read(key, complete=False)
        return _cost(router.crossover(*where), "measured before", why=why)
    try:
        measured = router.measure(*where)
    except Exception as error:  # a kernel may fail on a card that nobody has tried; doctor goes on
        return _cost(router.crossover(*where), failure=f"{type(error).__name__}: {error}")
    return _cost(measured, "measured now", why=router.adopt(measured, *where))


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
        "costs": cost_file.to_dict(found)["costs"],
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
    needed = status["first_launch"]
    if there := [f"{need['name']} {need['found']}" for need in needed if need["found"]]:
        lines["first launch has"] = "; ".join(there)
    for i, need in enumerate((need for need in needed if not need["found"]), 1):
        lines[f"first launch needs {i}"] = f"{need['name']}: not found; {need['way_out']}"
    return lines


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
    kept = f"kept in {cost['file'] or cost['why']}"
    return f"{cost['state']}, {cost['date']}, {_took(cost)}{unsteady}; {kinds}; {kept}"
