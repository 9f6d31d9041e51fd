"""Recipes on structured inputs, without a model.

    python -m sparge_tools.studies.synthetic_errors

Density, the three errors and the time of several recipes, and block maps of the default one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.api.attention import attend, attention, explain, make_plan
from sparge.backends.cpu import library as native
from sparge.cli import OK, Parser, exit_code
from sparge.cli.arguments import add_json, check_file, whole
from sparge.cli.machine import load_text, where_it_runs
from sparge.cli.screen import console, deliver, progress, show_table
from sparge.cli.table import Column, Table, error, milliseconds, share
from sparge.cli.truth import Truth, relative_l1
from sparge.engine.recording import record
from sparge.routing import get_backend
from sparge.support.turns import take_turns
from sparge.synthetic import structured_qkv
from sparge.values.blockplan import BlockPlan
from sparge.values.recipe import DEFAULT, KeepAll, KeepFraction, KeepMass, Recipe

BACKEND = "cpu" if native.why_missing() is None else "reference"
RECIPES = {
    "keep all, exact": Recipe(keep=KeepAll(), precision="exact"),
    "keep all, int8": Recipe(keep=KeepAll()),
    "default": DEFAULT,
    "mass 0.95": Recipe(keep=KeepMass(0.95)),
    "fraction 0.3": Recipe(keep=KeepFraction(0.3)),
    "mean, min_similarity 0.4": Recipe(predictor="mean", min_similarity=0.4),
    "default, pv_skip 5": Recipe(pv_skip=5.0),
}
COLUMNS = (
    Column("recipe_name", "recipe"),
    Column("density", "density", share),
    Column("sparsity", "sparsity", share),
    Column("pv_skipped", "PV\nskipped", share),
    Column("error", "error\n(rel. L1)", error),
    Column("quantization_error", "quantization\nerror", error),
    Column("sparsity_error", "sparsity\nerror", error),
    Column("cosine", "cosine", "{:.6f}".format),
    Column("seconds", "ms", milliseconds),
)
MAPS = 4
MAPS_PER_ROW = 2
MAP_WIDTH = 32
Inputs = tuple[Tensor, Tensor, Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse(sys.argv[1:] if argv is None else list(argv))))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m sparge_tools.studies.synthetic_errors", description=__doc__)
    parser.add_argument("--length", type=whole, default=2048, help="tokens; default: %(default)s")
    parser.add_argument("--heads", type=whole, default=4, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", metavar="FILE", help="also write the JSON document here")
    add_json(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(args.output)
    document = measure(length=args.length, heads=args.heads, seed=args.seed)
    deliver(document, args, lambda: show(document))
    return OK


def measure(*, length: int, heads: int, seed: int) -> dict[str, Any]:
    """Everything that is shown, as data."""
    where = where_it_runs()
    kv_heads = heads if heads % 2 else heads // 2
    inputs = structured_qkv(Hq=heads, Hk=kv_heads, L=length, seed=seed)
    truth = Truth(*inputs, rows=torch.arange(length), is_causal=True).dense
    rows = []
    with progress("measuring recipes", len(RECIPES)) as step:
        for name, recipe in RECIPES.items():
            rows.append({"recipe_name": name, **measure_recipe(inputs, truth, recipe)})
            step("")
    query, key, value = inputs
    plan = make_plan(query, key, is_causal=True, enable_gqa=True, backend=BACKEND)
    auto = explain(query, key, value, is_causal=True, enable_gqa=True)
    return {
        "format": "sparge.benchmarks.synthetic_errors/1",
        **where,
        "backend": BACKEND,
        "about": get_backend(BACKEND).about,
        "inputs": {"B": 1, "Hq": heads, "Hk": kv_heads, "L": length, "D": query.shape[3]}
        | {"dtype": "float32", "causal": True, "seed": seed},
        "default_recipe": DEFAULT.to_dict(),
        "plans": block_maps(plan),
        "rows": rows,
        "auto": auto.to_dict(),
        "auto_text": str(auto),
        **times(inputs),
    }


def measure_recipe(inputs: Inputs, truth: Tensor, recipe: Recipe) -> dict[str, Any]:
    """Density, seconds and errors of one recipe. The same plan runs again in exact precision to
    separate the quantization error from the sparsity error."""
    with record() as runs:
        out = attention(*inputs, is_causal=True, enable_gqa=True, recipe=recipe, backend=BACKEND)
    assert isinstance(out, Tensor)
    exact_out = out if recipe.precision == "exact" else attend_exactly(inputs, recipe)
    return {
        "recipe": recipe.to_dict(),
        "density": runs[0].density,
        "sparsity": runs[0].sparsity,
        "pv_skipped": runs[0].pv_skipped,
        "error": relative_l1(out, truth),
        "cosine": float(F.cosine_similarity(out.double().flatten(), truth.flatten(), dim=0)),
        "quantization_error": relative_l1(out, exact_out),
        "sparsity_error": relative_l1(exact_out, truth),
        "seconds": runs[0].seconds["total"],
        "stages": {name: s for name, s in runs[0].seconds.items() if name != "total"},
    }


def attend_exactly(inputs: Inputs, recipe: Recipe) -> Tensor:
    """The recipe's plan and second filter in exact precision."""
    query, key, value = inputs
    plan = make_plan(query, key, is_causal=True, enable_gqa=True, recipe=recipe, backend=BACKEND)
    exact = replace(recipe, precision="exact")
    out, _ = attend(query, key, value, plan, enable_gqa=True, recipe=exact, backend=BACKEND)
    return out


def times(inputs: Inputs) -> dict[str, float]:
    """Median seconds of torch's SDPA and of sparge with the default recipe, in turns."""
    facts: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    calls: dict[str, Callable[[], Any]] = {
        "dense_seconds": partial(F.scaled_dot_product_attention, *inputs, **facts),
        "sparse_seconds": partial(attention, *inputs, backend=BACKEND, **facts),
    }

    def take_turn(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    turns = [partial(take_turn, call) for call in calls.values()]
    found = take_turns(turns, rounds=5, warm_up=float("inf"))
    return {name: statistics.median(own) for name, own in zip(calls, found, strict=True)}


def block_maps(plan: BlockPlan) -> list[dict[str, Any]]:
    """Block maps of some heads, from the first (local) to the last (diffuse)."""
    density = plan.head_density()[0].tolist()
    shown = min(MAPS, len(density))
    heads = [round(i * (len(density) - 1) / max(shown - 1, 1)) for i in range(shown)]
    return [
        {
            "head": h,
            "density": density[h],
            "map": plan.picture(h=h, width=MAP_WIDTH).split("\n"),
        }
        for h in heads
    ]


def show(document: dict[str, Any]) -> None:
    screen = console()
    facts = document["inputs"]
    screen.print(
        f"sparge {document['versions']['sparge']}: causal attention on structured inputs, "
        f"{facts['Hq']} query heads on {facts['Hk']} key heads, {facts['L']} tokens, "
        f"head dim {facts['D']}, {facts['dtype']}, seed {facts['seed']}\n"
        f"backend {document['backend']}: {document['about']}\n"
        f"machine: {document['machine_line']}, load average {load_text(document)}\n"
    )
    screen.print(
        "The block plans of the default recipe (query blocks downwards, key blocks across; "
        "█ kept, blank skipped, · the future):\n"
    )
    per_row = min(MAPS_PER_ROW, max(1, screen.width // (MAP_WIDTH + 4)))
    plans = document["plans"]
    for start in range(0, len(plans), per_row):
        screen.print(f"{side_by_side(plans[start : start + per_row])}\n", no_wrap=True)
    show_table(screen, recipes_table(document))
    ratio = document["dense_seconds"] / document["sparse_seconds"]
    row = next(row for row in document["rows"] if row["recipe_name"] == "default")
    screen.print(
        f'\nbackend="auto" chooses: {document["auto_text"]}\n\n'
        f"On this machine, in this run: dense SDPA {document['dense_seconds'] * 1e3:.1f} ms, "
        f"{document['backend']} with the default recipe {document['sparse_seconds'] * 1e3:.1f} ms: "
        f"{ratio:.2f}x the speed, at density {row['density']:.3f} and error {row['error']:.4f}."
    )


def side_by_side(plans: list[dict[str, Any]]) -> str:
    columns = [
        [f"  head {plan['head']}, density {plan['density']:.3f}", *plan["map"]] for plan in plans
    ]
    lines = (
        "".join(part.ljust(MAP_WIDTH + 4) for part in line) for line in zip(*columns, strict=True)
    )
    return "\n".join(line.rstrip() for line in lines)


def recipes_table(document: dict[str, Any]) -> Table:
    recipe = Recipe.from_dict(document["default_recipe"])
    notes = (
        "density: kept / allowed blocks. sparsity: skipped QK and PV products / all of them. "
        "error: against dense attention in fp64.",
        "quantization error: against the same blocks in exact precision. sparsity error: those "
        "blocks in exact precision, against dense.",
        f"default: {recipe.keep}, predictor {recipe.predictor!r}, precision {recipe.precision!r}.",
    )
    return Table("Recipes", COLUMNS, document["rows"], notes)


if __name__ == "__main__":
    sys.exit(main())
