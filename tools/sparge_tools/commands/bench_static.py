"""`sparge bench --static`: the GPU kernels compiled for GPUs that are not here, and judged.

Nothing is run or measured. The exit code is 1 if a rule fails: a kernel does not compile, spills
registers, needs too much shared memory, lacks its matrix instructions, loads too little ahead, or
has more instructions than recorded; or a call launches too much.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from sparge.backends.triton.packages import numbers_of
from sparge.cli import BAD_RESULT, OK
from sparge.cli.arguments import whole
from sparge.cli.screen import console, deliver, show_table

from ..machine import where_it_runs
from ..screen import progress
from ..static.chain import CALLS, chain_of
from ..static.compile import need_compiler, triton_version
from ..static.fuzz import compile_draws, draws
from ..static.ratchet import LEAST_REASON, ratchet_of, read_ratchet, update_ratchet
from ..static.static_tables import chain_row, chain_table, estimate_table, row_of, rules_table
from ..static.suite import compile_all, failures, judge, recorded_by, tasks_of
from ..static.targets import TARGETS
from ..static.variants import default_variants, full_variants
from .arguments import check_file, words

FORMAT = "sparge.bench.static/1"
DRAWS_FORMAT = "sparge.bench.static.draws/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sparge bench --static")
    add = group.add_argument
    about = "compile the GPU kernels for GPUs that are not here, and check them; --full: all"
    add("--static", action="store_true", help=about)
    add("--targets", type=words, metavar="NAME,…", help=f"default: {','.join(TARGETS)}")
    add("--variants", type=words, metavar="WORD,…", help="kernel variants containing a word")
    add("--draws", type=whole, metavar="N", help="compile N random calls instead: all must fit")
    add("--update-ratchet", metavar="REASON", help="record the instruction counts, and say why")


def run(args: argparse.Namespace) -> int:
    targets, variants = wanted(args)
    need_compiler()
    version = triton_version()
    targets = [name for name in targets if TARGETS[name].since <= numbers_of(version)]
    if args.draws is not None:
        return run_draws(args, targets, version)
    recorded = ratchet_of(version)
    start = time.perf_counter()
    tasks = tasks_of(variants, targets)
    with progress("compiling", len(tasks)) as step:
        made = compile_all(tasks, step=step)
    chains = [chain_of(variant) for variant in CALLS]
    changed: list[str] = []
    if args.update_ratchet is not None:
        changed = update_ratchet(recorded_by(made), args.update_ratchet, recorded)
    ratchet = read_ratchet(recorded)
    order = {name: i for i, name in enumerate(targets)}
    names = {variant.name: i for i, variant in enumerate(variants)}
    made.sort(key=lambda x: (names[x.variant], x.kernel, order[x.target]))
    results = [judge(each, ratchet) for each in made]
    missed = [*failures(results), *(why for chain in chains for why in chain.failures)]
    document: dict[str, Any] = {
        "format": FORMAT,
        **where_it_runs(),
        "triton": version,
        "took_seconds": time.perf_counter() - start,
        "targets": {name: TARGETS[name].source for name in targets},
        "rows": [row_of(result) for result in results],
        "chains": [chain_row(chain) for chain in chains],
        "ratchet_changed": changed,
        "missed": missed,
    }

    def show() -> None:
        screen = console()
        for table in (rules_table(document), estimate_table(document), chain_table(document)):
            show_table(screen, table)
        for why in missed:
            print(f"sparge: {why}", file=sys.stderr)

    deliver(document, args, show)
    return BAD_RESULT if missed else OK


def run_draws(args: argparse.Namespace, targets: list[str], version: str) -> int:
    start = time.perf_counter()
    tasks = tasks_of(draws(args.draws, args.seed), targets)
    with progress("compiling", len(tasks)) as step:
        found = compile_draws(tasks, step=step)
    unlisted = found.unlisted
    document: dict[str, Any] = {
        "format": DRAWS_FORMAT,
        **where_it_runs(),
        "triton": version,
        "took_seconds": time.perf_counter() - start,
        "draws": args.draws,
        "seed": args.seed,
        "targets": targets,
        **asdict(found),
    }

    def show() -> None:
        for fault in found.faults:
            print(f"sparge: {fault.draw}, {fault.kernel} on {fault.target}: {fault.what}")
        for spill in unlisted:
            what = f"spills {spill.amount}, which is not listed"
            print(f"sparge: {spill.draw}, {spill.kernel} on {spill.target}: {what}")
        print(
            f"{args.draws} draws (seed {args.seed}), {len(targets)} targets, {found.kernels} "
            f"kernels compiled with triton {version}: {len(found.faults)} failures, "
            f"{len(found.spills)} that spill, {len(unlisted)} of them not listed"
        )

    deliver(document, args, show)
    return BAD_RESULT if found.faults or unlisted else OK


def wanted(args: argparse.Namespace) -> tuple[list[str], list[Any]]:
    """The targets and variants that were asked for, or ValueError."""
    check_file(args.output)
    reason = args.update_ratchet
    if reason is not None and len(reason.strip()) < LEAST_REASON:
        raise ValueError(f"--update-ratchet must say why the numbers change, got {reason!r}")
    targets = args.targets or list(TARGETS)
    for name in targets:
        if name not in TARGETS:
            raise ValueError(f"--targets: unknown target {name!r}; known: {', '.join(TARGETS)}")
    every = full_variants() if args.full else default_variants()
    variants = [
        variant
        for variant in every
        if not args.variants or any(word in variant.name for word in args.variants)
    ]
    if not variants:
        known = ", ".join(variant.name for variant in every)
        raise ValueError(f"--variants: none contains {' or '.join(args.variants)}; known: {known}")
    return targets, variants
