"""Orders of visual tokens, and the density that each needs.

    python -m sparge_tools.studies.token_orders

For every order: how alike the tokens of a block are (mean of all pairwise cosines; keys without
their mean), and the density at equal error, where skipped blocks are dropped and where they are
pooled. "budget" is `KeepError(error)`; "equal" is `KeepMass` with the mass at which the measured
error is `error`. Inputs are synthetic video tokens, or tensors that were captured from a model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_K, BLOCK_Q, KeepError, KeepMass, Recipe, accelerate, attention, record
from sparge.api.accuracy import spread_rows
from sparge.cli import OK, Parser
from sparge.cli.arguments import add_json, whole
from sparge.cli.screen import Column, Table, console, deliver, error, share, show_table
from sparge.reorder import check_grid, check_order, reorder_tokens, restore_tokens
from sparge.routing import DENSE
from sparge.values.call import in_blocks

from .. import zoo
from ..bench.truth import Truth
from ..commands.arguments import budgets, check_file, words
from ..machine import machine_text, where_it_runs
from ..screen import progress
from ..synthetic_video import video_qkv
from . import study

ORDERS = ("row", "hilbert", "column", "time", "tiles:4x4x4", "tiles:8x8", "random")
SKIPPED: dict[str, dict[str, Any]] = {
    "drop": {"skipped": "drop"},
    "pool 64": {"skipped": "pool", "pool_group": 64},
    "pool 16": {"skipped": "pool", "pool_group": 16},
    "pool 8": {"skipped": "pool", "pool_group": 8},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "still": {"motion": 0.0, "noise": 0.2},
    "moving": {"motion": 1.0, "noise": 0.3},
    "fast, noisy": {"motion": 3.0, "noise": 0.5},
}
LEAST_TOKENS = 2048  # on a grid, of the layers that are captured from a module
SAMPLED_ROWS = 256  # query rows of each head on which errors are measured
LEAST_MASS, MOST_MASS = 0.05, 0.9999
BISECTIONS = 9
Row = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Query, key and value `[B, H, text + T·H·W (+ more), D]`, the grid's in row-major order.
    text: tokens before the grid's."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    grid: tuple[int, int, int]
    text: int = 0


def compare_orders(
    tokens: Tokens,
    *,
    orders: Sequence[str] = ORDERS,
    errors: Sequence[float] = (0.05,),
    skipped: Sequence[str] = tuple(SKIPPED),
    step: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """A row for each order, error and treatment of skipped blocks; not causal.

    The text before the grid is protected. step: called after each order with its name.
    """
    inputs, grid, text = (tokens.query, tokens.key, tokens.value), tokens.grid, tokens.text
    rows = spread_rows(tokens.query.shape[2], SAMPLED_ROWS)
    exact = Truth(*inputs, rows=rows, is_causal=False).dense
    found = []
    for order in orders:
        moved = [reorder_tokens(x, grid, order, start=text) for x in inputs]
        keys = moved[1] - moved[1].mean(2, keepdim=True)
        alike = {
            "q_similarity": self_similarity(moved[0][:, :, text:], BLOCK_Q),
            "k_similarity": self_similarity(keys[:, :, text:], BLOCK_K),
        }
        for budget, way in product(errors, skipped):
            facts = {"name": tokens.name, "order": order, "error": budget, "skipped": way}
            made = densities(tokens, order, moved, rows, exact, way, budget)
            found.append({**facts, **alike, **made})
        step(f"{tokens.name}, {order}")
    return found


def densities(
    tokens: Tokens,
    order: str,
    moved: Sequence[Tensor],
    rows: Tensor,
    exact: Tensor,
    way: str,
    budget: float,
) -> Row:
    """By a budget, and at the mass that has the budget's error; tokens are `moved` to the order."""

    def run(keep: KeepMass | KeepError) -> tuple[float, float]:
        """Density, and relative L1 on the sampled rows, mean of the heads."""
        protect = ((0, tokens.text),) if tokens.text else ()
        recipe = Recipe(keep, protect=protect, **SKIPPED[way])
        with record() as runs:
            out = attention(*moved, recipe=recipe, enable_gqa=True, backend="cpu")
        # The same tokens are looked at in every order.
        back = restore_tokens(out, tokens.grid, order, start=tokens.text)[:, :, rows]
        wrong = (back.double() - exact).abs().sum((-1, -2))
        return runs[0].density, float((wrong / exact.abs().sum((-1, -2))).mean())

    density, measured = run(KeepError(budget))
    mass, equal = density_at_error(lambda mass: run(KeepMass(mass)), budget)
    return {
        "budget_density": density,
        "budget_error": measured,
        "equal_density": equal,
        "equal_mass": mass,
    }


def density_at_error(
    run: Callable[[float], tuple[float, float]], budget: float
) -> tuple[float, float | None]:
    """The mass at which the error is `budget`, and the density there; None if no mass reaches it.

    run: density and error at a mass. Between the last two masses the density is interpolated.
    """
    sparse, dense = (_as_odds(LEAST_MASS), *run(LEAST_MASS)), (_as_odds(MOST_MASS), *run(MOST_MASS))
    if sparse[2] <= budget:
        return LEAST_MASS, sparse[1]
    if dense[2] > budget:
        return MOST_MASS, None
    for _ in range(BISECTIONS):
        middle = (sparse[0] + dense[0]) / 2
        found = (middle, *run(1 - 10**-middle))
        sparse, dense = (sparse, found) if found[2] <= budget else (found, dense)
    t = (sparse[2] - budget) / (sparse[2] - dense[2])
    odds, density = (a + t * (b - a) for a, b in zip(sparse[:2], dense[:2], strict=True))
    return 1 - 10**-odds, density


def _as_odds(mass: float) -> float:
    """-log10 of what is left out: near 1 a mass changes little and the error much."""
    return -float(torch.tensor(1 - mass, dtype=torch.float64).log10())


def self_similarity(x: Tensor, block: int) -> float:
    """Mean over the whole blocks of the mean of all pairwise cosines within a block."""
    whole_blocks = x[:, :, : x.shape[2] // block * block].float()
    unit = torch.nn.functional.normalize(whole_blocks, dim=-1)
    means = in_blocks(unit, -2, block).mean(-2)
    return float(means.square().sum(-1).mean())


def synthetic_tokens(
    grid: tuple[int, int, int], *, text: int, heads: int, D: int, seed: int
) -> Iterator[Tokens]:
    for name, setting in SETTINGS.items():
        made = video_qkv(grid, text=text, heads=heads, D=D, seed=seed, **setting)
        yield Tokens(name, *made, grid, text)


def captured_tokens(path: Path, grid: tuple[int, int, int], *, text: int) -> Iterator[Tokens]:
    """Files with tensors `query`, `key` and `value`; one file, or all of a directory."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--tensors: {str(path)!r} holds no .safetensors files")
    for file in files:
        found = load_file(file)
        if missing := {"query", "key", "value"} - set(found):
            raise ValueError(f"--tensors: {file.name} has no {', '.join(sorted(missing))}")
        yield Tokens(file.stem, found["query"], found["key"], found["value"], grid, text)


def captured_layers(name: str, inputs: int) -> list[Tokens]:
    """Every layer with at least LEAST_TOKENS on a grid, for some inputs of the module's task."""
    loaded = zoo.load_module(name)
    found: list[Tokens] = []

    def keep(query: Tensor, key: Tensor, value: Tensor, facts: Any) -> None:
        grid = loaded.grids(query.shape[2])
        if grid is not None and prod(grid) >= LEAST_TOKENS:
            query, key, value = (x.detach().float().clone() for x in (query, key, value))
            found.append(Tokens(name, query, key, value, grid))

    with accelerate(loaded.model, backend=DENSE) as handle:
        for layer in handle.report().layers:
            handle.tap(layer.name, keep)
        for given in loaded.task.inputs(inputs):
            loaded.task.run(loaded.model, given)
    return found


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """One row for each order, error and treatment: the mean over tensors of the same name.

    Where no mass reached the error, everything would have to be kept.
    """
    same = ("name", "order", "error", "skipped")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in same), []).append(row)
    merged = []
    for some in groups.values():
        numbers = {
            key: sum(1.0 if row[key] is None else row[key] for row in some) / len(some)
            for key in some[0].keys() - set(same)
        }
        merged.append({**{key: some[0][key] for key in same}, **numbers, "tensors": len(some)})
    return merged


def orders_table(name: str, rows: Sequence[Row], budget: float) -> Table:
    """One line for each order."""
    ways = list(dict.fromkeys(row["skipped"] for row in rows))
    lines: dict[str, Row] = {}
    for row in rows:
        line = lines.setdefault(row["order"], dict(row))
        line[f"budget {row['skipped']}"] = row["budget_density"]
        line[f"equal {row['skipped']}"] = row["equal_density"]
    columns = [
        Column("order", "order"),
        Column("q_similarity", "alike\nq", share),
        Column("k_similarity", "alike\nk", share),
        *(Column(f"budget {way}", f"budget\n{way}", share) for way in ways),
        *(Column(f"equal {way}", f"equal\n{way}", share) for way in ways),
    ]
    return Table(f"{name}: density at error {error(budget)}", columns, list(lines.values()))


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.token_orders", description=__doc__)
    add = parser.add_argument
    add("--grid", type=grid_sizes, default=(8, 24, 32), help="default: 8x24x32")
    add("--text", type=int, default=64, help="tokens before the grid's; default: %(default)s")
    add("--heads", type=whole, default=3, help="of synthetic tokens; default: %(default)s")
    add("--head-dim", type=whole, default=64, help="of synthetic tokens; default: %(default)s")
    add("--seed", type=int, default=0, help="of synthetic tokens; default: %(default)s")
    about = "a file or directory of safetensors with query, key and value; default: synthetic"
    add("--tensors", type=Path, metavar="PATH", help=about)
    about = "a plain module of the zoo, whose large layers are captured and averaged"
    add("--module", metavar="NAME", help=about)
    add("--inputs", type=whole, default=2, help="of the module's task; default: %(default)s")
    add("--orders", type=words, default=list(ORDERS), help=f"default: {','.join(ORDERS)}")
    add("--errors", type=budgets, default=(0.05,), help="default: 0.05")
    add("--output", metavar="FILE", help="also write the JSON document here")
    add_json(parser)
    return run(parser.parse_args(argv))


def grid_sizes(text: str) -> tuple[int, int, int]:
    """Such as 8x24x32 or 64x64."""
    try:
        return check_grid([int(part) for part in text.split("x")])
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def run(args: argparse.Namespace) -> int:
    check_file(args.output)
    for order in args.orders:
        check_order(order)
    options = {"grid": args.grid, "text": args.text}
    if args.module is not None:
        if args.tensors is not None:
            raise ValueError("--module cannot be combined with --tensors; give one of them")
        every = captured_layers(args.module, args.inputs)
    elif args.tensors is None:
        made = {"heads": args.heads, "D": args.head_dim, "seed": args.seed}
        every = list(synthetic_tokens(**options, **made))
    else:
        every = list(captured_tokens(args.tensors, **options))
    rows: list[Row] = []
    where = where_it_runs()
    with progress("comparing", len(every) * len(args.orders)) as step:
        for tokens in every:
            rows += compare_orders(tokens, orders=args.orders, errors=args.errors, step=step)
    rows = mean_rows(rows)
    settings = SETTINGS if args.tensors is None and args.module is None else {}
    document = {
        "format": "sparge.benchmarks.token_orders/1",
        **where,
        "grid": list(args.grid),
        "text": args.text,
        "settings": settings,
        "rows": rows,
    }
    deliver(document, args, lambda: show(document))
    return OK


def show(document: dict[str, Any]) -> None:
    screen = console()
    rows = document["rows"]
    for name in dict.fromkeys(row["name"] for row in rows):
        for budget in dict.fromkeys(row["error"] for row in rows):
            some = [row for row in rows if (row["name"], row["error"]) == (name, budget)]
            show_table(screen, orders_table(name, some, budget))
    screen.print(f"machine: {machine_text(document)}.")
    for name, setting in document["settings"].items():
        screen.print(f"{name}: {', '.join(f'{what} {value}' for what, value in setting.items())}.")


if __name__ == "__main__":
    sys.exit(main())
