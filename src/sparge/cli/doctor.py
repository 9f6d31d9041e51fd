"""`sparge doctor`: what this machine has, which backends serve it, and a check that runs."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..backends.cpu.library import ENV_ISA
from ..call import Call
from ..dispatch import AUTO, DENSE, ENV, Choice, backends, choose
from ..errors import Unsupported
from ..recipe import DEFAULT
from ..report import crossing
from ..report.gate import LENGTH, check_backends
from ..report.machine import devices, environment, machine, versions
from ..report.tables import Column, Table, error
from . import BAD_ANSWER, OK, add_json, console, deliver, show_table

BACKEND_COLUMNS = (
    Column("backend", "backend"),
    Column("serves", "serves it"),
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
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure anew where dense attention is faster, and keep that in the cache directory",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    # Before the checks, whose calls may be the first that measure.
    crossover = crossing.calibrate() if args.calibrate else crossing.crossing()
    checks = [check.to_dict() for device in devices() for check in check_backends(device)]
    passed = all(check["verdict"] != "failed" for check in checks)
    document = {
        "format": "sparge.doctor/1",
        "versions": versions(),
        "machine": machine(),
        "environment": environment(),
        "native": crossing.instruction_sets(),
        "crossover": crossover,
        "backends": [judge_backends(sample_call(device)) for device in devices()],
        "self_check": {"passed": passed, "checks": checks},
    }
    deliver(document, args, lambda: show(document))
    return OK if passed else BAD_ANSWER


def sample_call(device: str) -> Call:
    """The attention of one Llama-like layer at prefill."""
    D = 128
    return Call(
        B=1,
        Hq=32,
        Hk=8,
        Lq=8192,
        Lk=8192,
        D=D,
        Dv=D,
        dtype=torch.bfloat16,
        device=device,
        scale=D**-0.5,
        recipe=DEFAULT,
        is_causal=True,
    )


def judge_backends(call: Call) -> dict[str, Any]:
    """For each backend whether it serves the call, and what `auto` would make of it."""
    auto = _auto(call)
    rows = []
    for name in (*(backend.name for backend in backends()), DENSE):
        why_not = _refusal(call, name)
        if isinstance(auto, str):
            verdict = f"fails: {auto}"
        else:
            verdict = f"takes it: {auto.reason}" if auto.backend == name else auto.rejected[name]
        rows.append(
            {
                "backend": name,
                "serves": "yes" if why_not is None else "no",
                "why_not": why_not,
                "auto": verdict,
            }
        )
    return {"call": str(call), "rows": rows}


def _auto(call: Call) -> Choice | str:
    """The choice, or why there is none; an unknown name in the environment is one reason."""
    try:
        return choose(call, AUTO)
    except (Unsupported, ValueError) as failure:
        return str(failure)


def _refusal(call: Call, name: str) -> str | None:
    try:
        choose(call, name)
    except Unsupported as refusal:
        return refusal.reasons[name]
    return None


def show(document: dict[str, Any]) -> None:
    screen = console()
    facts = document["machine"]
    sets = facts["instruction_sets"]
    lines = {
        **{name: version or "not installed" for name, version in document["versions"].items()},
        "CPU": f"{facts['cpu']} ({facts['architecture']})",
        "cores, torch threads": f"{facts['cores']}, {facts['threads']}",
        "torch CPU capability": facts["cpu_capability"],
        "instruction sets": "not told by this system" if sets is None else _yes_or_no(sets),
        "native core": _native(document["native"]),
        **crossing.lines_of(document["crossover"]),
        "accelerators": ", ".join(facts["accelerators"]) or "none that torch sees",
        "environment": " ".join(f"{k}={v}" for k, v in document["environment"].items())
        or f"no SPARGE_ variable set ({ENV} forces a backend)",
    }
    for name, text in lines.items():
        screen.print(f"{name:22}{text}", soft_wrap=True)
    if rows := document["crossover"].get("rows"):
        title = "\nWhere dense attention is faster: from this density, on long sequences"
        show_table(screen, Table(title, crossing.COLUMNS, rows))
    for judged in document["backends"]:
        title = f"\nBackends, for the call {judged['call']}, default recipe"
        show_table(screen, Table(title, BACKEND_COLUMNS, judged["rows"]))
    check = document["self_check"]
    title = f"Self-check: all blocks, {LENGTH} tokens, against torch's dense fp64"
    show_table(screen, Table(title, CHECK_COLUMNS, check["checks"]))
    screen.print("self-check passed" if check["passed"] else "self-check FAILED")


def _native(sets: dict[str, Any]) -> str:
    if not sets["available"]:
        return "not there"
    forced = f"forced by {ENV_ISA}" if sets["forced"] else f"{ENV_ISA} forces one"
    return f"has {', '.join(sets['available'])}; runs {sets['runs']} ({forced})"


def _yes_or_no(sets: dict[str, bool]) -> str:
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in sets.items())
