"""A profile tuned to a KL against one recipe for all layers.

    python -m sparge_tools.studies.output_target

Density at the same KL on held-out text, and what each part of the allocation is worth: one mass
per layer instead of one per head, and every layer as sensitive as the others.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sparge import DEFAULT
from sparge.cli import OK, Parser, exit_code
from sparge.cli.arguments import DTYPES, add_json, whole
from sparge.cli.machine import where_it_runs
from sparge.cli.screen import Column, Table, console, deliver, share, show_table

from .. import zoo
from ..commands.arguments import MODEL, check_file
from ..tuning.levels import MASSES as KNOWN
from ..tuning.levels import (
    Level,
    Levels,
    TunedModel,
    attention_layers,
    base_recipe,
    even_levels,
    levels_of_layers,
    score_layers,
)
from ..tuning.output_measure import LanguageMeasure, OutputState, evaluating
from ..tuning.output_target import Checked, Verifier, request_of, scale_to_target
from ..tuning.sensitivity import Sensitivity, layer_options, measure_sensitivity
from ..tuning.tuning_windows import disjoint_windows

MASSES = (0.99, 0.98, 0.96, 0.94, 0.92, 0.9)
NEEDED, AIM = 0.08, 0.20
"""How much lower the profile's density must be than that of one recipe at the same KL."""
BY_HEAD, BY_LAYER, ALIKE = "profile", "one mass per layer", "every layer counts alike"


@dataclass(frozen=True)
class Row:
    """saved: against the density that one recipe has at this KL; None outside of its masses."""

    what: str
    density: float
    kl: float
    kl_error: float
    relative: float
    relative_error: float
    saved: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse(sys.argv[1:] if argv is None else list(argv))))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m sparge_tools.studies.output_target", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME|DIR", default=MODEL, help="default: %(default)s")
    add("--text", metavar="NAME|FILE", default="essays", help="default: %(default)s")
    add("--length", type=whole, default=4096, metavar="TOKENS", help="default: %(default)s")
    add("--inputs", type=whole, default=2, help="calibration texts; default: %(default)s")
    add("--windows", type=whole, default=3, help="held-out texts; default: %(default)s")
    add("--max-kl", type=float, nargs="+", default=[0.005, 0.01], help="default: 0.005 0.01")
    add("--masses", type=float, nargs="+", default=MASSES, help="of one recipe for all layers")
    add("--dtype", choices=DTYPES, default="fp32", help="default: %(default)s")
    add("--parts", action="store_true", help="also without each part of the allocation")
    add("--state", metavar="FILE", help="results so far, to resume; as of sparge tune")
    add("--output", metavar="FILE", help="also write the JSON document to this file")
    add_json(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    for option, path in (("--state", args.state), ("--output", args.output)):
        if path is not None:
            check_file(path, option)
    where = where_it_runs()
    model, tokenizer = zoo.load(args.model, dtype=DTYPES[args.dtype])
    mine, others = disjoint_windows(
        [args.text], tokenizer, length=args.length, inputs=args.inputs, held_out=args.windows
    )
    tuned = TunedModel(model, LanguageMeasure(model), attention_layers(model), base_recipe(DEFAULT))
    inputs, held_out = ([window.tokens for window in each] for each in (mine, others))
    with tempfile.TemporaryDirectory(prefix="sparge-") as folder:
        path = Path(args.state or f"{folder}/state.json")
        state = OutputState(path, request_of(tuned, inputs, held_out))
        with evaluating(model), torch.inference_mode():
            rows = measure(
                tuned, inputs, held_out, args.max_kl, state, masses=args.masses, parts=args.parts
            )
    document = {
        "format": "sparge.benchmarks.output_target/1",
        **where,
        "model": args.model,
        "length": args.length,
        "inputs": args.inputs,
        "windows": args.windows,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "rows": [vars(row) for row in rows],
    }
    deliver(document, args, lambda: show(document))
    return OK


def measure(
    tuned: TunedModel,
    inputs: Sequence[Any],
    held_out: Sequence[Any],
    targets: Sequence[float],
    state: OutputState,
    *,
    masses: Sequence[float],
    parts: bool,
) -> list[Row]:
    layers = score_layers(tuned, inputs, state, say)
    levels = levels_of_layers(layers)
    sensitivities = measure_sensitivity(tuned, inputs, layers, levels, state, say)
    by_mass = levels_of_layers(layers, even_levels)
    ways: dict[str, tuple[Levels, Mapping[str, Sensitivity]]] = {BY_HEAD: (levels, sensitivities)}
    if parts:
        one = dict.fromkeys(layers, Sensitivity((0.0, 1.0), (0.0, 1.0)))
        ways |= {BY_LAYER: (by_mass, sensitivities), ALIKE: (levels, one)}
    verifier, curve = Verifier(tuned, held_out, layers, by_mass, state, say), []
    for mass in masses:
        alike = {name: _option_of(by_mass[name], mass) for name in layers}
        curve.append(_row(f"mass {mass:g}", verifier.check(alike)))
    rows = list(curve)
    for what, (each, sensitivity) in ways.items():
        options = layer_options(layers, each, sensitivity)
        verifier = Verifier(tuned, held_out, layers, each, state, say)
        for target in targets:
            # Where every layer counts alike, the sum of changes has another scale than KL.
            total = sum(one[-1].change for one in options.values())
            first = target if what != ALIKE else min(0.002 * len(layers), total)
            found = scale_to_target(
                options,
                verifier.check,
                lambda checked: float(checked.figures["kl"]),
                target=target,
                first=first,
            )
            if found is not None:
                row = _row(f"{what}, KL {target:g}", found)
                same = density_at(curve, row.kl)
                saved = None if same is None else 1.0 - row.density / same
                rows.append(replace(row, saved=saved))
    return rows


def _option_of(levels: Sequence[Level], mass: float) -> int:
    """The number of the option with one mass for all heads; the first option is dense."""
    found = [i for i, level in enumerate(levels) if level.masses[0] == mass]
    if not found:
        known = ", ".join(f"{each:g}" for each in KNOWN)
        raise ValueError(f"--masses must be of {known}; got {mass:g}")
    return found[0] + 1


def _row(what: str, checked: Checked) -> Row:
    names = ("kl", "kl_error", "relative", "relative_error")
    return Row(what, checked.density, *(checked.figures[name] for name in names))


def density_at(curve: Sequence[Row], kl: float) -> float | None:
    """The density of one recipe at a KL: linear in log KL between its masses; None outside."""
    points = sorted(curve, key=lambda row: row.kl)
    for a, b in pairwise(points):
        if a.kl <= kl <= b.kl and 0.0 < a.kl < b.kl:
            t = math.log(kl / a.kl) / math.log(b.kl / a.kl)
            return a.density + t * (b.density - a.density)
    return None


def show(document: dict[str, Any]) -> None:
    table = Table(
        f"{document['model']}, {document['length']} tokens: a profile tuned to a KL, and one "
        "recipe for all layers",
        [
            Column("what", "what"),
            Column("density", "density", share),
            Column("kl", "KL", "{:.5f}".format),
            Column("kl_error", "±", "{:.5f}".format),
            Column("relative", "perplexity", "{:+.2%}".format),
            Column("relative_error", "±", "{:.2%}".format),
            Column("saved", "density below\none recipe's", "{:.1%}".format),
        ],
        document["rows"],
        [
            f"on {document['windows']} held-out texts; calibrated on {document['inputs']} others",
            *verdicts(document["rows"]),
            f"{document['machine_line']}; {document['threads']} threads, {document['dtype']}",
        ],
    )
    show_table(console(), table)


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether each profile saves what is needed."""
    told = []
    for row in rows:
        if row["what"].startswith(BY_HEAD):
            saved = row["saved"]
            verdict = "not reached" if saved is None or saved < NEEDED else "met"
            verdict = "aim met" if saved is not None and saved >= AIM else verdict
            told.append(f"{row['what']}: needed {NEEDED:.0%}, aim {AIM:.0%}: {verdict}")
    return told


def say(what: str) -> None:
    print(f"sparge: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
