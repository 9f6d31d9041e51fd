"""`sparge bench`: sparge's attention, torch's SDPA, Flash- and FlexAttention, in one run.

Contenders take turns within each round; figures are medians over the rounds. Nothing is printed
if a backend fails the self-check or a row is wrong. `sparge bench error` is bench_error.py,
`sparge bench --suite vision` is bench_vision.py, `sparge bench --static` is bench_static.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from sparge.cli import BAD_RESULT, OK
from sparge.cli.arguments import add_json, whole, wholes
from sparge.cli.machine import devices, load_average, where_it_runs
from sparge.cli.screen import console, deliver, progress, show_table
from sparge.cli.self_check import Check, check_backends, check_sparse
from sparge.routing import backends
from sparge.synthetic import MIN_HEAD_DIM
from sparge.values.geometry import MAX_HEAD_DIM

from ..bench.bench_table import bench_table, vision_table
from ..bench.cases import Case, add_shares_of_peak, measure_cases
from ..bench.gemm_peak import gemm_peaks, gemm_rates
from ..bench.lineup import Entry, lineup
from . import bench_error, bench_static, bench_vision
from .arguments import check_file, words

FORMAT = "sparge.bench/3"
LENGTHS = [1024, 4096, 8192]
FULL_LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
HEAD_DIMS = [64, 128]
HEADS = 4
SUITES = ("speed", "error", "vision")
DEVICES = ("auto", "cpu", "cuda", "xpu")
ROW_TOLERANCE = 0.05
"""Largest error of a benchmark row against fp64 over its own blocks: ten times the usual error of
8 bits and a bf16 output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "speed (default); error: KeepError on adversarial inputs; vision: shapes of models"
    add("suite", nargs="?", choices=SUITES, help=about)
    add("--suite", choices=SUITES, dest="suite_option", help="the same, as an option")
    bench_error.add_arguments(parser)
    bench_vision.add_arguments(parser)
    bench_static.add_arguments(parser)
    add("--lengths", type=wholes, help="default: 1024,4096,8192; with --full 1024 to 32768")
    add("--full", action="store_true", help="all lengths, with 1 and with all threads; hours")
    add("--heads", type=whole, help=f"default: {HEADS}; of --suite vision: by shape")
    add("--head-dims", type=wholes, help="default: 64,128")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: both")
    add("--threads", type=wholes, metavar="N,M", help="default: all; with --full 1 and all")
    add("--repeat", type=whole, help="rounds; default: 3 to 25, depending on their duration")
    add("--device", choices=DEVICES, default="cpu", help="auto: the accelerator, if there is one")
    about = "default: cpu; on an accelerator triton"
    add("--backends", type=words, metavar="NAME,…", help=about)
    add("--contenders", type=words, default=[], metavar="WORD,…", help="names containing a word")
    add("--output", metavar="FILE", help="also write the JSON document to this file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    args.suite = wanted_suite(args)
    if args.suite != "vision":
        bench_vision.refuse_arguments(args)
    if args.device != "cpu" and (args.suite == "error" or args.static):
        raise ValueError(f"--device is for measuring speed, got --device {args.device}")
    args.device = found_device(args.device)
    if args.backends is None:
        args.backends = ["cpu"] if args.device == "cpu" else ["triton"]
    if args.suite == "error":
        return bench_error.run(args)
    if args.static:
        return bench_static.run(args)
    is_vision = args.suite == "vision"
    shapes = bench_vision.check_arguments(args) if is_vision else []
    check_arguments(args)
    entries = [] if is_vision else lineup(args.backends, args.contenders, args.device)
    checks = [*check_backends(args.device), *check_sparse(args.backends, args.device)]
    red = [check for check in checks if check.verdict == "failed"]
    if red:
        return refuse([f"{check.backend} fails the self-check: {check.why}" for check in red])
    if is_vision:
        document = bench_vision.measure(args, shapes, checks)
    else:
        document = measure(args, entries, checks)
    if wrong := wrong_rows(document["rows"]):
        return refuse(wrong)
    table = vision_table if is_vision else bench_table
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
    if args.output is not None:
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


def measure(args: argparse.Namespace, entries: list[Entry], checks: list[Check]) -> dict[str, Any]:
    where, start = where_it_runs(), time.perf_counter()
    wanted, heads = wanted_cases(args), args.heads or HEADS
    counts = sorted({case.threads for case in wanted})
    before = gemm_rates(counts, args.device)
    with progress("measuring", len(wanted)) as step:
        made = measure_cases(
            wanted, entries, heads=heads, repeat=args.repeat, step=step, device=args.device
        )
        rows = list(made)
    peaks = gemm_peaks(before, gemm_rates(counts, args.device))
    add_shares_of_peak(rows, {n: peak["peak"] for n, peak in peaks.items()})
    return {
        "format": FORMAT,
        **where,
        "load_average_after": load_average(),
        "took_seconds": time.perf_counter() - start,
        "device": args.device,
        "heads": heads,
        "threads": counts,
        "cases": [asdict(case) for case in wanted],
        "peaks": {str(n): peak for n, peak in peaks.items()},
        "self_check": [asdict(check) for check in checks],
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
