"""Recipes and orders on the large layers of a real model.

    python -m sparge_tools.studies.vision_defaults

For a plain module of the zoo: the density of its layers with at least 2048 tokens on a grid, the
error of their attention (relative L1 on exact rows), and what that does to the result of the task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from sparge import VISION, KeepError, Recipe, accelerate
from sparge.cli import OK, Parser
from sparge.cli.arguments import add_json, whole
from sparge.cli.screen import Column, Table, console, deliver, error, share, show_table
from sparge.routing import DENSE

from .. import zoo
from ..machine import machine_text, where_it_runs
from ..screen import progress
from ..zoo.vision.task import ZooModule
from . import study
from .token_orders import LEAST_TOKENS

BUDGET = KeepError(0.05)
CASES: dict[str, tuple[Recipe, str]] = {
    "row, dropped, 4 rows": (Recipe(BUDGET), "row"),
    "hilbert, dropped, 4 rows": (Recipe(BUDGET), "hilbert"),
    "row, pooled by 8, 8 rows": (VISION, "row"),
    "default: hilbert, pooled by 8, 8 rows": (VISION, "hilbert"),
    "hilbert, pooled by 4, 8 rows": (replace(VISION, pool_group=4), "hilbert"),
}
Row = dict[str, Any]


def compare_cases(
    loaded: ZooModule, inputs: int, step: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """A row for each case; all figures are means over the inputs, `worst` is of the metric."""
    given = loaded.task.inputs(inputs)
    rows = []
    with torch.no_grad():
        large = large_layers(loaded, given[0])
        dense = [loaded.task.run(loaded.model, each) for each in given]
        for name, (recipe, order) in CASES.items():
            found = [
                _measure(loaded, each, wanted, large, recipe, order)
                for each, wanted in zip(given, dense, strict=True)
            ]
            metrics = [each["metric"] for each in found]
            # A metric in which equal results have the figure 1 is worst where it is smallest.
            equal = loaded.task.compare(dense[0], dense[0])[loaded.task.metric]
            worst = min(metrics) if equal == 1 else max(metrics)
            means = {key: mean(each[key] for each in found) for key in found[0]}
            rows.append({"case": name, **means, "worst": worst})
            step(name)
    base = rows[0]["density"]
    return [{**row, "of_first": row["density"] / base} for row in rows]


def _measure(
    loaded: ZooModule, given: Any, dense: Any, large: Sequence[str], recipe: Recipe, order: str
) -> Row:
    options: dict[str, Any] = {"grid": loaded.grids, "order": order, "measure_error": True}
    with accelerate(loaded.model, recipe, backend="cpu", layers=large, **options) as handle:
        sparse = loaded.task.run(loaded.model, given)
        layers = [each for each in handle.report().layers if each.name in large]
    return {
        "density": sum(each.kept for each in layers) / sum(each.allowed for each in layers),
        "error": mean(each.error or 0.0 for each in layers),
        "metric": loaded.task.compare(dense, sparse)[loaded.task.metric],
    }


def large_layers(loaded: ZooModule, given: Any) -> list[str]:
    """Layers with at least LEAST_TOKENS tokens on a grid; the others stay as they are."""
    found: dict[str, None] = {}

    def note(name: str, query: Tensor, *others: Any) -> None:
        grid = loaded.grids(query.shape[2])
        if grid is not None and prod(grid) >= LEAST_TOKENS:
            found[name] = None

    with accelerate(loaded.model, backend=DENSE) as handle:
        for layer in handle.report().layers:
            handle.tap(layer.name, partial(note, layer.name))
        loaded.task.run(loaded.model, given)
    if not found:
        raise ValueError(f"no layer has {LEAST_TOKENS} tokens on a grid; take larger inputs")
    return list(found)


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.vision_defaults", description=__doc__)
    add = parser.add_argument
    add("--module", default="sam2-hiera-tiny", metavar="NAME", help="default: %(default)s")
    add("--inputs", type=whole, default=4, help="of its task; default: %(default)s")
    add_json(parser)
    args = parser.parse_args(argv)
    where = where_it_runs()
    loaded = zoo.load_module(args.module)
    with progress("measuring", len(CASES)) as step:
        rows = compare_cases(loaded, args.inputs, step)
    document = {
        "format": "sparge.benchmarks.vision_defaults/1",
        **where,
        "module": args.module,
        "inputs": args.inputs,
        "metric": loaded.task.metric,
        "rows": rows,
    }

    def show() -> None:
        columns = [
            Column("case", "order, skipped blocks, scored rows"),
            Column("density", "density", share),
            Column("of_first", "of the\nfirst", share),
            Column("error", "error", error),
            Column("metric", loaded.task.metric, "{:.4f}".format),
            Column("worst", "worst", "{:.4f}".format),
        ]
        screen = console()
        title = f"{args.module}: KeepError(0.05), {args.inputs} inputs"
        show_table(screen, Table(title, columns, rows))
        screen.print(f"machine: {machine_text(document)}.")

    deliver(document, args, show)
    return OK


if __name__ == "__main__":
    sys.exit(main())
