"""`sparge bench`: our attention beside torch's and FlexAttention's, all measured in one run.

Contenders take turns within each round; medians over the rounds; rows where we lose are marked.
A backend that fails the correctness gate gets no numbers printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ..backends.cpu import library as native
from ..dispatch import backends
from ..geometry import MAX_HEAD_DIM
from ..report.benchtables import table_of_rows, table_of_targets
from ..report.cases import Case, cases, estimate, measure_cases
from ..report.entries import Entry, entries
from ..report.gate import Check, check_backends, check_sparse, wrong_rows
from ..report.machine import load_average, machine, machine_line, versions
from ..report.peak import gemm_peaks, larger
from ..report.rows import add_shares_of_peak
from ..report.targets import judge
from ..synthetic import MIN_HEAD_DIM
from . import (
    BAD_ANSWER,
    OK,
    add_json,
    add_output,
    check_output,
    console,
    deliver,
    progress,
    show_table,
    whole,
    wholes,
)
from .bench_tune import add_tune_arguments, run_tune

FORMAT = "sparge.bench/2"
LENGTHS = [1024, 4096, 8192]
FULL_LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
HEAD_DIMS = [64, 128]
WHAT = "attention (default): kernels beside torch's; tune: our search beside the paper's"
QUIET_SECONDS = 60.0
"""A run expected to take longer says so, also where no bar can be drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", choices=["attention", "tune"], default="attention", help=WHAT)
    add("--lengths", type=wholes, help="default: 1024,4096,8192; with --full from 1024 to 32768")
    add("--full", action="store_true", help="every length, with 1 and with all threads; hours")
    add("--heads", type=whole, default=4, help="default: %(default)s")
    add("--head-dims", type=wholes, default=HEAD_DIMS, help="default: 64,128")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: both")
    add("--threads", type=wholes, metavar="N,M", help="default: all; with --full 1 and all")
    add("--repeat", type=whole, help="rounds; default: from 3 to 25, by the time that one takes")
    add("--backends", type=words, default=["cpu"], metavar="NAME,…", help="default: cpu")
    add("--contenders", type=words, default=[], metavar="WORD,…", help="names that contain one")
    add_json(parser)
    add_output(parser)
    add_tune_arguments(parser)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    if args.what == "tune":
        return run_tune(args)
    check_arguments(args)
    taking_part = entries(args.backends, args.contenders)
    checks = [*check_backends(), *check_sparse(args.backends)]
    red = [check for check in checks if check.verdict == "failed"]
    if red:
        return refuse([f"{check.backend} is wrong: {check.why}" for check in red])
    document = measure(args, taking_part, checks)
    if wrong := wrong_rows(document["rows"]):
        return refuse(wrong)
    deliver(document, args, lambda: show(document))
    return OK


def check_arguments(args: argparse.Namespace) -> None:
    """The last of many cases must not fail after minutes of the others."""
    for dim in args.head_dims:
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"--head-dims must be from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {dim}"
            )
    there = [backend.name for backend in backends()]
    for name in args.backends:
        if name not in there:
            raise ValueError(f"--backends: there is no {name!r}; there are {', '.join(there)}")
    if not args.backends:
        raise ValueError(f"--backends needs a name; there are {', '.join(there)}")


def refuse(reasons: list[str]) -> int:
    for why in reasons:
        print(f"sparge: {why}", file=sys.stderr)
    print("sparge: no numbers are printed for wrong results", file=sys.stderr)
    return BAD_ANSWER


def measure(
    args: argparse.Namespace, taking_part: list[Entry], checks: list[Check]
) -> dict[str, Any]:
    load, start = load_average(), time.perf_counter()
    wanted = cases_of(args)
    counts = sorted({case.threads for case in wanted})
    before = gemm_peaks(counts)
    expected = estimate(wanted, taking_part, heads=args.heads, repeat=args.repeat)
    say_how_long(sum(expected))
    # One step of the bar is about a second, so that its own guess of the rest is right too.
    steps = [max(1, round(seconds)) for seconds in expected]
    with progress("measuring", sum(steps)) as step:
        rows = list(
            measure_cases(
                wanted,
                taking_part,
                heads=args.heads,
                repeat=args.repeat,
                reached=pace(steps, step),
            )
        )
    after = gemm_peaks(counts)
    peaks = {n: larger(before[n], after[n]) for n in counts}
    add_shares_of_peak(rows, {n: peak["peak"] for n, peak in peaks.items()})
    there = native.available()
    isa = native.chosen_isa(there) if there else None
    return {
        "format": FORMAT,
        "versions": versions(),
        "machine": machine(),
        "machine_line": machine_line(),
        "isa": isa,
        "load_average": load,
        "load_average_after": load_average(),
        "expected_seconds": sum(expected),
        "took_seconds": time.perf_counter() - start,
        "heads": args.heads,
        "threads": counts,
        "cases": [case.to_dict() for case in wanted],
        "peaks": {str(n): peak for n, peak in peaks.items()},
        "gate": [check.to_dict() for check in checks],
        "rows": rows,
        "targets": judge(rows, isa),
    }


def cases_of(args: argparse.Namespace) -> list[Case]:
    everything = torch.get_num_threads()
    return cases(
        args.lengths or (FULL_LENGTHS if args.full else LENGTHS),
        args.head_dims,
        [True, False] if args.causal is None else [args.causal],
        args.threads or (sorted({1, everything}) if args.full else [everything]),
    )


def say_how_long(seconds: float) -> None:
    if seconds > QUIET_SECONDS or sys.stderr.isatty():
        minutes = max(1, round(seconds / 60))
        about = f"{minutes} min" if minutes < 90 else f"{minutes / 60:.0f} hours"
        print(f"sparge: this takes about {about}; leave the machine alone", file=sys.stderr)


def pace(steps: list[int], step: Callable[[], None]) -> Callable[[int, float], None]:
    """Moves the bar to where the share done of a case should have brought it."""
    done = 0

    def reached(i_case: int, share: float) -> None:
        nonlocal done
        target = sum(steps[:i_case]) + int(share * steps[i_case])
        while done < target:
            step()
            done += 1

    return reached


def show(document: dict[str, Any]) -> None:
    screen = console()
    show_table(screen, table_of_rows(document))
    screen.print()
    show_table(screen, table_of_targets(document))
