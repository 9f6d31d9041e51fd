"""`sparge doctor`: this machine, the backends that serve it, and a self-check."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from ..backends.cpu.library import ENV_ISA
from ..engine.check import check_call
from ..routing import AUTO, DENSE, ENV_BACKEND, backends, choose
from ..support.errors import Unsupported
from ..values.call import Call
from ..values.recipe import DEFAULT
from . import BAD_RESULT, OK, crossover_status
from .arguments import add_json
from .gpu_status import gpu_lines, gpu_status
from .machine import devices, environment, machine, versions
from .screen import Column, Table, console, deliver, error, show_table
from .self_check import LENGTH, check_backends

BACKEND_COLUMNS = (
    Column("backend", "backend"),
    Column("serves", "serves\nthe call"),
    Column("why_not", "why not"),
    Column("auto", "backend=auto"),
)
CHECK_COLUMNS = (
    Column("backend", "backend"),
    Column("precision", "precision"),
    Column("device", "device"),
    Column("verdict", "verdict"),
    Column("error", "error (rel. L1)", error),
    Column("why", "why"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    calibrate = "measure again where dense attention is faster, and store the result"
    parser.add_argument("--calibrate", action="store_true", help=calibrate)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    # Before the checks: their calls could measure it first.
    gpu = gpu_status(measure=args.calibrate)
    crossover = crossover_status.cached()
    if args.calibrate and (crossover_status.measurable() or not gpu["cards"]):
        crossover = crossover_status.calibrate()
    checks = [asdict(check) for device in devices() for check in check_backends(device)]
    passed = all(check["verdict"] != "failed" for check in checks)
    document = {
        "format": "sparge.doctor/1",
        "versions": versions(),
        "machine": machine(),
        "environment": environment(),
        "native": crossover_status.instruction_sets(),
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
    screen, facts, native = console(), document["machine"], document["native"]
    sets = (facts["instruction_sets"] or {}).items()
    listed = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in sets)
    forced = f"forced by {ENV_ISA}" if native["forced"] else f"{ENV_ISA} forces one"
    has = f"has {', '.join(native['available'])}; runs {native['runs']} ({forced})"
    lines = {
        **{name: version or "not installed" for name, version in document["versions"].items()},
        "CPU": f"{facts['cpu']} ({facts['architecture']})",
        "cores, torch threads": f"{facts['cores']}, {facts['threads']}",
        "torch CPU capability": facts["cpu_capability"],
        "instruction sets": listed or "not listed by this system",
        "native core": has if native["available"] else "missing",
        **crossover_status.status_lines(document["crossover"]),
        "accelerators": ", ".join(facts["accelerators"]) or "none found by torch",
        **gpu_lines(document["gpu"]),
        "environment": " ".join(f"{k}={v}" for k, v in document["environment"].items())
        or f"no SPARGE_ variable set ({ENV_BACKEND} forces a backend)",
    }
    for name, text in lines.items():
        screen.print(f"{name:22}{text}", soft_wrap=True)
    if rows := document["crossover"].get("rows"):
        title = "\nDensity above which dense attention is faster, on long sequences"
        show_table(screen, Table(title, crossover_status.COLUMNS, rows))
    for card in document["gpu"]["cards"]:
        if rows := card["cost"].get("rows"):
            title = f"\nThe same on {card['name']}: {card['cost']['state']}"
            show_table(screen, Table(title, crossover_status.COLUMNS, rows))
    for judged in document["backends"]:
        title = f"\nBackends, for the call {judged['call']}, default recipe"
        show_table(screen, Table(title, BACKEND_COLUMNS, judged["rows"]))
    check = document["self_check"]
    title = f"Self-check: all blocks, {LENGTH} tokens, against torch's dense fp64"
    show_table(screen, Table(title, CHECK_COLUMNS, check["checks"]))
    screen.print("self-check passed" if check["passed"] else "self-check FAILED")
