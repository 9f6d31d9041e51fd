"""`sparge bench error`: does an error budget hold on inputs made to break it?

Every head of every case, at every budget, against dense attention. The exit code is 1 if more
heads than allowed exceed their budget or report a wrong error, or if a larger budget keeps more.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

from sparge import DEFAULT, KeepError
from sparge.cli import BAD_RESULT, OK
from sparge.cli.arguments import add_recipe, whole
from sparge.cli.machine import where_it_runs
from sparge.cli.screen import Column, Table, console, deliver, error, progress, share, show_table

from ..bench.adversarial import FAMILIES, adversaries
from ..bench.error_suite import BUDGETS, FACTOR, OVER, SEEN, failures, run_suite, summarize
from .arguments import check_file

FORMAT = "sparge.bench.error/1"
PER_FAMILY = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sparge bench error")
    add = group.add_argument
    add("--cases", type=whole, default=PER_FAMILY, help="of each family; default: %(default)s")
    add("--seed", type=int, default=0, help="of the first case; default: %(default)s")
    add("--budgets", type=_budgets, default=BUDGETS, help="default: 0.01,0.02,0.05,0.1")
    add_recipe(group, help="all but its keep is used; default: sparge.DEFAULT")


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(args.output)
    cases = adversaries(args.cases, first_seed=args.seed)
    recipe = replace(args.recipe or DEFAULT, keep=KeepError(args.budgets[0]))
    start = time.perf_counter()
    with progress("measuring", len(cases)) as step:
        outcomes = run_suite(cases, args.budgets, recipe, backend=args.backends[0], step=step)
    by_budget, by_family = (summarize(outcomes, by) for by in ("budget", "family"))
    missed = failures(by_budget)
    document: dict[str, Any] = {
        "format": FORMAT,
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


def _budgets(text: str) -> tuple[float, ...]:
    try:
        return tuple(KeepError(float(part)).max_error for part in text.split(","))  # type: ignore[misc]
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None
