"""`sparge bench`: sparge's attention, torch's SDPA, Flash- and FlexAttention, in one run.

Contenders take turns within each round; figures are medians over the rounds. Nothing is printed
if a backend fails the self-check or a row is wrong. `sparge bench error`: does an error budget hold
on inputs made to break it? `sparge bench --suite vision`: the shapes of picture and video models.
`sparge bench --busy`: SDPA and `auto` while other processes are at work. `sparge bench --static` is
bench_static.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch

from sparge import DEFAULT, KeepError
from sparge.cli import BAD_RESULT, OK
from sparge.cli.arguments import add_json, add_recipe, whole, wholes
from sparge.cli.machine import devices
from sparge.cli.screen import Column, Table, console, deliver, error, share, show_table
from sparge.cli.self_check import check_backends
from sparge.reorder import check_order
from sparge.routing import backends
from sparge.synthetic import MIN_HEAD_DIM
from sparge.values.call import MAX_HEAD_DIM

from ..bench.bench_table import bench_table, busy_table, vision_table
from ..bench.busy import LIMITS, OTHERS, busy_cases, measure_busy, summarize_busy
from ..bench.cases import Case, add_shares_of_peak, measure_cases
from ..bench.contender import lineup
from ..bench.error_suite import (
    BUDGETS,
    FACTOR,
    FAMILIES,
    OVER,
    SEEN,
    adversaries,
    failures,
    run_suite,
    summarize,
)
from ..bench.gemm_peak import gemm_peaks, gemm_rates
from ..bench.truth import check_sparse
from ..bench.vision_suite import Setting, measure_shape, named_shapes
from ..machine import load_average, where_it_runs
from ..screen import progress
from . import bench_static
from .arguments import budgets, check_file, words

FORMAT = "sparge.bench/3"
LENGTHS = [1024, 4096, 8192]
FULL_LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
HEAD_DIMS = [64, 128]
HEADS = 4
BUSY_LENGTHS = [128, 512, 1024, 2048, 8192]
BUSY_HEADS = [4, 16]
SUITES = ("speed", "error", "vision")
DEVICES = ("auto", "cpu", "cuda", "xpu")
ROW_TOLERANCE = 0.05
"""Largest error of a benchmark row against fp64 over its own blocks: ten times the usual error of
8 bits and a bf16 output."""
NOT_WITH_VISION = ("lengths", "head_dims", "causal", "full", "contenders")
"""Options of the speed suite that the shapes decide."""
NOT_WITH_BUSY = (
    *("static", "full", "backends", "contenders", "cases", "seed", "budgets", "recipe"),
    *("targets", "variants", "draws", "update_ratchet"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "speed (default); error: KeepError on adversarial inputs; vision: shapes of models"
    add("suite", nargs="?", choices=SUITES, help=about)
    add("--suite", choices=SUITES, dest="suite_option", help="the same, as an option")
    add_error_arguments(parser)
    add_vision_arguments(parser)
    bench_static.add_arguments(parser)
    about = "SDPA and backend='auto' while 0, 1 and 2 other processes are at work; many minutes"
    add("--busy", action="store_true", help=about)
    about = "default: 1024,4096,8192; with --full 1024 to 32768; with --busy 128 to 8192"
    add("--lengths", type=wholes, help=about)
    add("--full", action="store_true", help="all lengths, with 1 and with all threads; hours")
    about = f"default: {HEADS}; of --suite vision: by shape; with --busy 4 and 16"
    add("--heads", type=whole, help=about)
    add("--head-dims", type=wholes, help="default: 64,128")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: both")
    add("--threads", type=wholes, metavar="N,M", help="default: all; with --full 1 and all")
    about = "rounds; default: 3 to 25, with --busy 15 to 100, depending on their duration"
    add("--repeat", type=whole, help=about)
    add("--device", choices=DEVICES, default="cpu", help="auto: the accelerator, if there is one")
    about = "default: cpu; on an accelerator triton"
    add("--backends", type=words, metavar="NAME,…", help=about)
    add("--contenders", type=words, default=[], metavar="WORD,…", help="names containing a word")
    add("--output", metavar="FILE", help="also write the JSON document to this file")
    add_json(parser)
    parser.set_defaults(default_of=parser.get_default)


def run(args: argparse.Namespace) -> int:
    args.suite = wanted_suite(args)
    if args.suite != "vision":
        refuse_vision_arguments(args)
    if args.busy:
        check_busy_arguments(args)
    if args.device != "cpu" and (args.suite == "error" or args.static):
        raise ValueError(f"--device is for measuring speed, got --device {args.device}")
    args.device = found_device(args.device)
    if args.backends is None:
        args.backends = ["cpu"] if args.device == "cpu" else ["triton"]
    if args.suite == "error":
        return run_error(args)
    if args.static:
        return bench_static.run(args)
    suite = "busy" if args.busy else args.suite
    form, measured, table = {
        "speed": (FORMAT, measure, bench_table),
        "vision": ("sparge.bench.vision/1", measure_vision, vision_table),
        "busy": ("sparge.bench.busy/1", measure_beside_others, busy_table),
    }[suite]
    if suite == "vision":
        check_vision_arguments(args)
    check_arguments(args)
    if suite == "speed":
        args.entries = lineup(args.backends, args.contenders, args.device)
    checks = check_backends(args.device)
    if suite != "busy":
        checks = [*checks, *check_sparse(args.backends, args.device)]
    red = [check for check in checks if check.verdict == "failed"]
    if red:
        return refuse([f"{check.backend} fails the self-check: {check.why}" for check in red])
    where, start = where_it_runs(), time.perf_counter()
    found = measured(args)
    if suite != "busy" and (wrong := wrong_rows(found["rows"])):
        return refuse(wrong)
    document = {
        "format": form,
        **where,
        "load_average_after": load_average(),
        "took_seconds": time.perf_counter() - start,
        "device": args.device,
        "self_check": [asdict(check) for check in checks],
        **found,
    }
    deliver(document, args, lambda: show_table(console(), table(document)))
    return OK


def wanted_suite(args: argparse.Namespace) -> str:
    """Raises ValueError if two suites are named."""
    named = {name for name in (args.suite, args.suite_option) if name is not None}
    if len(named) > 1:
        raise ValueError(f"suite: one at a time, got {args.suite} and --suite {args.suite_option}")
    return named.pop() if named else "speed"


def found_device(asked: str) -> str:
    """The type of device that is meant. Raises ValueError if torch does not see it."""
    there = devices()
    if asked == "auto":
        return there[-1]
    if asked not in there:
        raise ValueError(
            f"--device {asked}: torch {torch.__version__} sees no such device, only "
            f"{', '.join(there)}; install a torch that was built for it"
        )
    return asked


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for every mistake that can be found before measuring."""
    if args.threads and args.device != "cpu":
        raise ValueError(f"--threads is for --device cpu, got --device {args.device}")
    check_file(args.output)
    for dim in args.head_dims or ():
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"--head-dims must be from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {dim}"
            )
    there = [backend.name for backend in backends()]
    for name in args.backends or [""]:
        if name not in there:
            raise ValueError(f"--backends: unknown backend {name!r}; known: {', '.join(there)}")


def refuse(reasons: list[str]) -> int:
    for why in reasons:
        print(f"sparge: {why}", file=sys.stderr)
    print("sparge: no numbers are printed for wrong results", file=sys.stderr)
    return BAD_RESULT


def measure(args: argparse.Namespace) -> dict[str, Any]:
    wanted, heads = wanted_cases(args), args.heads or HEADS
    counts = sorted({case.threads for case in wanted})
    before = gemm_rates(counts, args.device)
    with progress("measuring", len(wanted)) as step:
        made = measure_cases(
            wanted, args.entries, heads=heads, repeat=args.repeat, step=step, device=args.device
        )
        rows = list(made)
    peaks = gemm_peaks(before, gemm_rates(counts, args.device))
    add_shares_of_peak(rows, {n: peak["peak"] for n, peak in peaks.items()})
    return {
        "heads": heads,
        "threads": counts,
        "cases": [asdict(case) for case in wanted],
        "peaks": {str(n): peak for n, peak in peaks.items()},
        "rows": rows,
    }


def wanted_cases(args: argparse.Namespace) -> list[Case]:
    everything = torch.get_num_threads()
    lengths = args.lengths or (FULL_LENGTHS if args.full else LENGTHS)
    both = args.full and args.device == "cpu"
    threads = args.threads or (sorted({1, everything}) if both else [everything])
    causal = [True, False] if args.causal is None else [args.causal]
    wanted = product(lengths, args.head_dims or HEAD_DIMS, threads, causal)
    return [Case(length, dim, is_causal, n) for length, dim, n, is_causal in wanted]


def wrong_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Messages about sparge's rows whose error against fp64 over the same blocks is too large."""
    return [
        f"{row['contender']} at length {row['length']}, head dim {row['head_dim']}: "
        f"error {row['quantization_error']:.3g} against fp64 over its own blocks"
        for row in rows
        if row["kind"] == "sparse" and row["why_not"] is None
        if not row["quantization_error"] < ROW_TOLERANCE  # also fails for NaN
    ]


def add_error_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sparge bench error")
    add = group.add_argument
    add("--cases", type=whole, default=30, help="of each family; default: %(default)s")
    add("--seed", type=int, default=0, help="of the first case; default: %(default)s")
    add("--budgets", type=budgets, default=BUDGETS, help="default: 0.01,0.02,0.05,0.1")
    add_recipe(group, help="all but its keep is used; default: sparge.DEFAULT")


def run_error(args: argparse.Namespace) -> int:
    """Every head of every case, at every budget, against dense attention. Fails if more heads than
    allowed exceed their budget or report a wrong error, or if a larger budget keeps more."""
    check_file(args.output)
    cases = adversaries(args.cases, first_seed=args.seed)
    recipe = replace(args.recipe or DEFAULT, keep=KeepError(args.budgets[0]))
    start = time.perf_counter()
    with progress("measuring", len(cases)) as step:
        outcomes = run_suite(cases, args.budgets, recipe, backend=args.backends[0], step=step)
    by_budget, by_family = (summarize(outcomes, by) for by in ("budget", "family"))
    missed = failures(by_budget)
    document: dict[str, Any] = {
        "format": "sparge.bench.error/1",
        **where_it_runs(),
        "took_seconds": time.perf_counter() - start,
        "recipe": recipe.to_dict(),
        "families": list(FAMILIES),
        "cases": len(cases),
        "by_budget": by_budget,
        "by_family": by_family,
        "missed": missed,
    }

    def show() -> None:
        screen = console()
        for title, rows in (("budget", by_budget), ("family", by_family)):
            show_table(screen, error_table(title, rows, len(cases)))
        for why in missed:
            print(f"sparge: {why}", file=sys.stderr)

    deliver(document, args, show)
    return BAD_RESULT if missed else OK


def error_table(by: str, rows: list[dict[str, Any]], cases: int) -> Table:
    columns = (
        Column("of", by),
        Column("heads", "heads"),
        Column("density", "density", share),
        Column("error", "true error,\nmean", error),
        Column("worst", "largest\nerror / budget", "{:.2f}".format),
        Column("over", f"over {OVER}x\nthe budget", "{:.1%}".format),
        Column("misjudged", f"reported error\noff by > {FACTOR}x", "{:.1%}".format),
        Column("raised", "precision\nraised", "{:.0%}".format),
        Column("rising", "keeps more at\na larger budget"),
    )
    title = (
        f"KeepError on {cases} adversarial cases, by {by}; "
        f"reported errors are judged where the true one is above {SEEN}"
    )
    return Table(title=title, columns=columns, rows=rows)


def add_vision_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sparge bench --suite vision")
    add = group.add_argument
    about = "flux, cogvideox, mochi, wan; default: all, minutes; flux alone takes seconds"
    add("--shapes", type=words, metavar="NAME,…", help=about)
    about = "of the visual tokens: hilbert (default), row, column, time, tiles:4x4x4, random"
    add("--order", metavar="NAME", help=about)


def refuse_vision_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that is for this suite alone."""
    for name in ("shapes", "order"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for --suite vision, got --{name} {getattr(args, name)}")


def check_vision_arguments(args: argparse.Namespace) -> None:
    """The shapes that are wanted. Raises ValueError for an option that has no meaning here."""
    if option := given_option(args, NOT_WITH_VISION):
        raise ValueError(
            f"{option} is not for --suite vision, whose shapes are those of models; "
            "choose among them with --shapes"
        )
    args.order = check_order(args.order or Setting.order)
    args.shapes = named_shapes(args.shapes or [])


def given_option(args: argparse.Namespace, names: Iterable[str]) -> str | None:
    """The first of some options that was given, as it is typed."""
    given = (name for name in names if getattr(args, name) != args.default_of(name))
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def measure_vision(args: argparse.Namespace) -> dict[str, Any]:
    setting = Setting(args.backends, args.order, args.heads, args.repeat, args.device)
    wanted = list(product(args.shapes, args.threads or [torch.get_num_threads()]))
    rows: list[dict[str, Any]] = []
    with progress("measuring", len(wanted)) as step:
        for shape, n_threads in wanted:
            rows += measure_shape(shape, setting, n_threads)
            step(f"{shape.name} {n_threads}t")
    return {"order": args.order, "rows": rows}


def check_busy_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that has no meaning here."""
    if args.suite != "speed":
        raise ValueError(f"--busy measures speed, got the suite {args.suite}")
    if args.device != "cpu":
        raise ValueError(f"--busy is for --device cpu, got --device {args.device}")
    if option := given_option(args, NOT_WITH_BUSY):
        raise ValueError(
            f"{option} is not for --busy, which compares SDPA with backend='auto' and the "
            "default recipe; choose shapes with --lengths, --head-dims, --causal and --heads"
        )


def measure_beside_others(args: argparse.Namespace) -> dict[str, Any]:
    """SDPA and `auto` in turns, beside 0, 1 and 2 busy processes. No ratio makes it fail."""
    wanted = busy_cases(
        args.lengths or BUSY_LENGTHS,
        args.head_dims or HEAD_DIMS,
        [True, False] if args.causal is None else [args.causal],
        [args.heads] if args.heads else BUSY_HEADS,
        args.threads or [torch.get_num_threads()],
    )
    with progress("measuring", len(wanted) * len(OTHERS)) as step:
        rows = list(measure_busy(wanted, repeat=args.repeat, step=step, others=OTHERS))
    return {"limits": LIMITS, "rows": rows, "summary": summarize_busy(rows)}
