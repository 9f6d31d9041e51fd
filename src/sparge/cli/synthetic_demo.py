"""`sparge demo --synthetic`: what sparse attention does to structured inputs, without any model."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..api import attend, attention, explain, make_plan
from ..backends.cpu import library as native
from ..blockplan import BlockPlan
from ..dispatch import get_backend
from ..recipe import DEFAULT, KeepAll, KeepFraction, KeepMass, Recipe
from ..record import record
from ..report.machine import load_average, load_text, machine, machine_line, versions
from ..report.measure import cosine_similarity, dense_fp64, relative_l1
from ..report.tables import Column, Table, cosine, error, milliseconds, share
from ..synthetic import structured_qkv
from . import OK, check_output, console, deliver, progress, show_table

# The first that computes sparse attention here: the native core, where it was built.
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
    Column("cosine", "cosine", cosine),
    Column("seconds", "ms", milliseconds),
)
PICTURES = 4
PICTURES_PER_ROW = 2
PICTURE_WIDTH = 32
Inputs = tuple[Tensor, Tensor, Tensor]


def run(args: argparse.Namespace) -> int:
    """args: `length`, `heads`, `seed`, `output` (of the JSON document) and `json`."""
    check_output(args.output)
    document = measure(length=args.length, heads=args.heads, seed=args.seed)
    deliver(document, args, lambda: show(document))
    return OK


def measure(*, length: int, heads: int, seed: int) -> dict[str, Any]:
    """Everything the demo shows, as data."""
    load = load_average()
    kv_heads = heads if heads % 2 else heads // 2
    inputs = structured_qkv(Hq=heads, Hk=kv_heads, L=length, seed=seed)
    truth = dense_fp64(*inputs, is_causal=True)
    rows = []
    with progress("measuring recipes", len(RECIPES)) as step:
        for name, recipe in RECIPES.items():
            rows.append({"recipe_name": name, **measure_recipe(inputs, truth, recipe)})
            step()
    query, key, value = inputs
    plan = make_plan(query, key, is_causal=True, enable_gqa=True, backend=BACKEND)
    auto = explain(query, key, value, is_causal=True, enable_gqa=True)
    return {
        "format": "sparge.demo/2",
        "versions": versions(),
        "machine": machine(),
        "machine_line": machine_line(),
        "load_average": load,
        "backend": BACKEND,
        "about": get_backend(BACKEND).about,
        "inputs": {"B": 1, "Hq": heads, "Hk": kv_heads, "L": length, "D": query.shape[3]}
        | {"dtype": "float32", "causal": True, "seed": seed},
        "default_recipe": DEFAULT.to_dict(),
        "plans": pictures(plan),
        "rows": rows,
        "auto": auto.to_dict(),
        "auto_text": str(auto),
        **race(inputs),
    }


def measure_recipe(inputs: Inputs, truth: Tensor, recipe: Recipe) -> dict[str, Any]:
    """One recipe as it runs, and its two errors apart: the same plan once more, exactly."""
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
        "cosine": cosine_similarity(out, truth),
        "quantization_error": relative_l1(out, exact_out),
        "sparsity_error": relative_l1(exact_out, truth),
        "seconds": runs[0].seconds["total"],
        "stages": {name: s for name, s in runs[0].seconds.items() if name != "total"},
    }


def attend_exactly(inputs: Inputs, recipe: Recipe) -> Tensor:
    """The recipe's own plan and second filter, without its quantization."""
    query, key, value = inputs
    plan = make_plan(query, key, is_causal=True, enable_gqa=True, recipe=recipe, backend=BACKEND)
    exact = replace(recipe, precision="exact")
    out, _ = attend(query, key, value, plan, enable_gqa=True, recipe=exact, backend=BACKEND)
    return out


def race(inputs: Inputs) -> dict[str, float]:
    """Median seconds of torch's dense attention and of ours with the default recipe, in turns."""
    turns: dict[str, Callable[[], Any]] = {
        "dense_seconds": lambda: F.scaled_dot_product_attention(
            *inputs, is_causal=True, enable_gqa=True
        ),
        "sparse_seconds": lambda: attention(
            *inputs, is_causal=True, enable_gqa=True, backend=BACKEND
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(6):
        for name, turn in turns.items():
            start = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def pictures(plan: BlockPlan) -> list[dict[str, Any]]:
    """Some heads drawn, from the first (local) to the last (diffuse)."""
    density = plan.head_density()[0].tolist()
    shown = min(PICTURES, len(density))
    heads = [round(i * (len(density) - 1) / max(shown - 1, 1)) for i in range(shown)]
    return [
        {
            "head": h,
            "density": density[h],
            "picture": plan.picture(h=h, width=PICTURE_WIDTH).split("\n"),
        }
        for h in heads
    ]


def show(document: dict[str, Any]) -> None:
    screen = console()
    facts = document["inputs"]
    screen.print(
        f"sparge {document['versions']['sparge']} demo: causal attention on structured inputs, "
        f"{facts['Hq']} query heads on {facts['Hk']} key heads, {facts['L']} tokens, "
        f"head dim {facts['D']}, {facts['dtype']}, seed {facts['seed']}\n"
        f"backend {document['backend']}: {document['about']}\n"
        f"machine: {document['machine_line']}, load average {load_text(document)}\n"
    )
    screen.print(
        "The block plans of the default recipe (query blocks downwards, key blocks across; "
        "█ kept, blank skipped, · the future):\n"
    )
    per_row = min(PICTURES_PER_ROW, max(1, screen.width // (PICTURE_WIDTH + 4)))
    plans = document["plans"]
    for start in range(0, len(plans), per_row):
        screen.print(f"{side_by_side(plans[start : start + per_row])}\n", no_wrap=True)
    show_table(screen, table_of(document))
    ratio = document["dense_seconds"] / document["sparse_seconds"]
    row = next(row for row in document["rows"] if row["recipe_name"] == "default")
    screen.print(
        f'\nWhat backend="auto" would do with this call: {document["auto_text"]}\n\n'
        f"On this machine, in this run: dense SDPA {document['dense_seconds'] * 1e3:.1f} ms, "
        f"{document['backend']} with the default recipe {document['sparse_seconds'] * 1e3:.1f} ms: "
        f"{ratio:.2f}x the speed, at density {row['density']:.3f} and error {row['error']:.4f}."
    )


def side_by_side(plans: list[dict[str, Any]]) -> str:
    columns = [
        [f"  head {plan['head']}, density {plan['density']:.3f}", *plan["picture"]]
        for plan in plans
    ]
    lines = (
        "".join(part.ljust(PICTURE_WIDTH + 4) for part in line)
        for line in zip(*columns, strict=True)
    )
    return "\n".join(line.rstrip() for line in lines)


def table_of(document: dict[str, Any]) -> Table:
    recipe = Recipe.from_dict(document["default_recipe"])
    notes = (
        "density: kept / allowed blocks. sparsity: skipped QK and PV products / all of them. "
        "error: against dense attention in fp64.",
        "quantization error: against the same blocks in exact precision. sparsity error: those "
        "blocks in exact precision, against dense.",
        f"default: {recipe.keep}, predictor {recipe.predictor!r}, precision {recipe.precision!r}.",
    )
    return Table("Recipes", COLUMNS, document["rows"], notes)
