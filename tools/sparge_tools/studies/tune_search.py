"""Sparge's search compared with the paper's, on a real model.

    python -m sparge_tools.studies.tune_search

Evaluations and densities of both searches, seconds, errors on held-out text, density at the same
perplexity, and the error of `KeepError`, which needs no tuning.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparge import KeepError, Profile, Recipe, accelerate
from sparge.cli import OK, Parser, exit_code
from sparge.cli.arguments import add_json, whole
from sparge.cli.machine import where_it_runs
from sparge.cli.screen import Column, Table, console, deliver, error, share, show_table
from sparge.routing import CPU

from .. import zoo
from ..commands.arguments import MODEL, check_file
from ..tuning.tuner import check_bounds
from ..tuning.tuning_windows import held_out_windows
from .paper_search import compare_searches, searches_table
from .profile_quality import bench_traces, compare_quality, quality_table

BUDGET = 0.05
"""Of `KeepError`, whose error is measured on rows that it has not seen."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse(sys.argv[1:] if argv is None else list(argv))))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m sparge_tools.studies.tune_search", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME|DIR", default=MODEL, help="default: %(default)s")
    add("--text", metavar="NAME|FILE", default="essays", help="default: %(default)s")
    add("--length", type=whole, default=4096, metavar="TOKENS", help="default: %(default)s")
    add("--inputs", type=whole, default=5, help="calibration texts; default: %(default)s")
    add("--l1", type=float, default=0.08, help="default: %(default)s")
    add("--l2", type=float, default=0.09, help="default: %(default)s")
    add("--sample", type=whole, default=6, help="heads of the paper's search; default: 6")
    add("--windows", type=whole, default=2, help="held-out texts; default: %(default)s")
    add("--budget-length", type=whole, default=8192, help="tokens for KeepError; default: 8192")
    add("--keep", metavar="FILE", help="also write the profile to this file")
    add("--output", metavar="FILE", help="also write the JSON document to this file")
    add_json(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    for option, path in (("--keep", args.keep), ("--output", args.output)):
        if path is not None:
            check_file(path, option)
    l1, l2 = check_bounds(args.l1, args.l2)
    assert l2 is not None
    where = where_it_runs()
    model, tokenizer = zoo.load(args.model)
    with tempfile.TemporaryDirectory(prefix="sparge-") as folder, torch.inference_mode():
        facts = {"name": args.model, "length": args.length, "inputs": args.inputs}
        say(f"tracing {args.inputs} texts of {args.length} tokens")
        trace, held_out, seconds = bench_traces(
            model,
            tokenizer,
            Path(folder),
            held_out=args.windows,
            texts=(args.text,),
            step=say,
            **facts,
        )
        document = compare_searches(
            trace, l1=l1, l2=l2, held_out=held_out, heads=args.sample, step=say
        )
        profile = Profile.from_dict(document["profile"])
        windows = held_out_windows((args.text,), tokenizer, length=args.length, inputs=args.windows)
        tokens = [window.tokens for window in windows]
        quality = compare_quality(model, tokens, profile, step=say)
        (long,) = held_out_windows((args.text,), tokenizer, length=args.budget_length, inputs=1)
        budget = error_of_budget(model, long.tokens)
    document |= {
        "trace_seconds": seconds,
        "whole_seconds": seconds + document["seconds"],
        "quality": quality,
        "keep_error": budget,
        **where,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    if args.keep is not None:
        profile.save(args.keep)
    deliver(document, args, lambda: show(document))
    return OK


def error_of_budget(model: Any, tokens: Any) -> dict[str, Any]:
    """`KeepError` on a long text: the error of every layer and head, on other rows."""
    say(f"KeepError({BUDGET}) at {tokens.shape[1]} tokens")
    start = time.perf_counter()
    recipe = Recipe(KeepError(BUDGET))
    with accelerate(model, recipe, backend=CPU, measure_error=True) as handle:
        model.base_model(tokens)
        report = handle.report()
    errors = sorted(e for layer in report.layers for e in layer.error_by_head or ())
    return {
        "max_error": BUDGET,
        "length": tokens.shape[1],
        "heads": len(errors),
        "density": report.density,
        "median": statistics.median(errors),
        "p95": errors[int(0.95 * (len(errors) - 1))],
        "seconds": time.perf_counter() - start,
    }


def search_targets(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets of tuning, and whether this run meets them."""
    quality, budget, held = document["quality"], document["keep_error"], document["held_out"]
    saved = quality["saved"]
    lines = [
        ("evaluations, against the paper's search", "<= 1/20", document["evaluations_ratio"], 20),
        (
            "density of the sample, minus the paper's",
            "<= 0",
            document["paper_sample_density"] - document["sample_density"],
            0.0,
        ),
        ("seconds for the whole model", "<= 600", -document["whole_seconds"], -600.0),
        ("held-out heads within 1.15 x bound", ">= 95 %", held["within"], 0.95),
        ("density below one recipe's, same perplexity", "> 0", saved, 1e-9),
        ("KeepError(0.05): median error", "<= 0.05", -budget["median"], -0.05),
        ("KeepError(0.05): 95th percentile", "<= 0.075", -budget["p95"], -0.075),
    ]
    return [
        {
            "target": what,
            "needed": needed,
            "figure": None if value is None else abs(value),
            "verdict": "not reached" if value is None or value < low else "met",
        }
        for what, needed, value, low in lines
    ]


def show(document: dict[str, Any]) -> None:
    screen = console()
    budget = document["keep_error"]
    budget_table = Table(
        f"KeepError({budget['max_error']}) at {budget['length']} tokens, without tuning",
        [
            Column("heads", "heads", str),
            Column("density", "density", share),
            Column("median", "error,\nmedian", error),
            Column("p95", "95th\npercentile", error),
        ],
        [budget],
    )
    targets = Table(
        "Targets of tuning",
        [
            Column("target", "target"),
            Column("needed", "needed"),
            Column("figure", "figure", "{:.3f}".format),
            Column("verdict", "verdict"),
        ],
        search_targets(document),
        [
            f"{document['machine_line']}; {document['threads']} threads, {document['dtype']}; "
            f"trace {document['trace_seconds']:.0f} s + search {document['seconds']:.0f} s"
        ],
    )
    tables = (searches_table(document), quality_table(document["quality"]), budget_table, targets)
    for table in tables:
        show_table(screen, table)
        screen.print()


def say(what: str) -> None:
    print(f"sparge: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
