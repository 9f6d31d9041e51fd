"""A model of one attention layer over 8 to 128 devices.

    python -m sparge_tools.studies.scale_model

It computes bytes and seconds of a dense ring, of Ulysses and of `sparge.parallel.ring_attention`
from densities that were measured (`--measure` measures them again) and from the speed of devices
and links, which are arguments. It is a model: nothing in it was run on such machines.

  compute   4·L²·Hq·D operations over all ranks (half if causal); times the density if sparse
  plan      what prediction adds: exact scores of `sample_rows` of 128 query rows
  Ulysses   q, k, v and the output change hands before and after; nothing overlaps
  ring      in world - 1 rounds, each hidden by the computing of the one before
  our ring  the plan's messages first, hidden by nothing; then a ring of the blocks that are needed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparge import BLOCK_Q
from sparge.cli import OK, Parser, exit_code
from sparge.cli.arguments import add_json, wholes
from sparge.cli.screen import (
    Column,
    Table,
    console,
    deliver,
    milliseconds,
    progress,
    share,
    show_table,
)

from ..commands.arguments import check_file, words
from .scale_costs import Layer, Machine, estimate
from .scale_densities import KINDS, MEASURED, RANKS, at, measure, read

WORLDS, LENGTHS = [8, 16, 32, 64, 128], [131072, 262144, 524288, 1048576]
MEASURED_LENGTHS = [4096, 8192, 16384, 32768]


def layer_of(kind: str, L: int, world: int, rows: Sequence[dict[str, Any]]) -> Layer:
    of = KINDS[kind]
    density, needed = at(rows, kind, L, world)
    sizes: dict[str, Any] = {"Hq": of.Hq, "Hk": of.Hk, "D": of.D, "recipe": of.recipe}
    return Layer(L, world, **sizes, is_causal=of.is_causal, density=density, needed=needed)


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    usual = Machine()
    parser = Parser(prog="python -m sparge_tools.studies.scale_model", description=__doc__)
    parser.add_argument("--kinds", type=words, default=[*KINDS], help="of text,video")
    parser.add_argument("--worlds", type=wholes, default=WORLDS, help="numbers of devices")
    parser.add_argument("--lengths", type=wholes, help="tokens; to measure, or of the model")
    parser.add_argument("--flops", type=float, default=usual.flops, help="default: %(default)g")
    parser.add_argument("--link", type=float, default=usual.link, help="default: %(default)g")
    parser.add_argument("--latency", type=float, default=usual.latency, help="default: %(default)g")
    parser.add_argument("--block-cost", type=float, default=1.0, help="default: %(default)g")
    parser.add_argument("--densities", type=Path, default=MEASURED, help="a file of --measure")
    parser.add_argument("--measure", action="store_true", help="densities, on this machine")
    parser.add_argument("--output", help="write the document to this file, too")
    add_json(parser)
    args = parser.parse_args(argv)
    for name in args.kinds:
        if name not in KINDS:
            raise ValueError(f"--kinds must be of {', '.join(KINDS)}, got {name!r}")
    for name in ("flops", "link", "block_cost"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ValueError(
                f"--{name.replace('_', '-')} must be over 0, got {getattr(args, name)}"
            )
    if not 0 <= args.latency < float("inf"):
        raise ValueError(f"--latency must be at least 0, got {args.latency}")
    if args.output is not None:
        check_file(args.output)
    document = _measured(args) if args.measure else _modelled(args)

    def show() -> None:
        for table in _tables(document):
            show_table(console(), table)

    deliver(document, args, show)
    return OK


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    lengths = args.lengths or MEASURED_LENGTHS
    rows = []
    with progress("measuring", len(lengths) * len(args.kinds)) as step:
        for kind in args.kinds:
            for L in lengths:
                ranks = [n for n in RANKS if 2 * n * BLOCK_Q <= L]
                rows.append(measure(kind, L, ranks))
                step(f"{kind} {L}")
    return {"format": "sparge.scale_densities/1", "rows": rows}


def _modelled(args: argparse.Namespace) -> dict[str, Any]:
    if min(args.worlds) < 2:
        raise ValueError(f"--worlds must be at least 2, got {min(args.worlds)}")
    measured = read(args.densities)
    machine = Machine(args.flops, args.link, args.latency, args.block_cost)
    rows = [
        {"kind": kind, **estimate(layer_of(kind, L, world, measured), machine)}
        for kind in args.kinds
        for L in args.lengths or LENGTHS
        for world in args.worlds
    ]
    return {"format": "sparge.scale_model/1", "machine": asdict(machine), "rows": rows}


def _megabytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.0f}" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.1f}"


def _tables(document: dict[str, Any]) -> list[Table]:
    rows = document["rows"]
    if "machine" not in document:
        shown = [
            {**row, "text": ", ".join(f"{n}: {x:.2f}" for n, x in row["needed"].items())}
            for row in rows
        ]
        columns = [Column("kind", "kind"), Column("L", "tokens", "{:d}".format)]
        columns += [Column("density", "density", share), Column("text", "needed by ranks")]
        return [Table("densities measured on synthetic layers", columns, shown)]
    machine = Machine(**document["machine"])
    columns = [
        Column("L", "tokens", "{:d}".format),
        Column("world", "devices", "{:d}".format),
        Column("density", "density", share),
        Column("needed", "needed", share),
        Column("dense_ring_bytes", "dense\nring MB", _megabytes),
        Column("ulysses_bytes", "Ulysses\nMB", _megabytes),
        Column("ring_bytes", "our ring\nMB", _megabytes),
        Column("dense_ring_seconds", "dense\nring ms", milliseconds),
        Column("dense_ulysses_seconds", "dense\nUlysses ms", milliseconds),
        Column("ulysses_seconds", "sparse\nUlysses ms", milliseconds),
        Column("ring_seconds", "our ring\nms", milliseconds),
        Column("ring_waits_for", "our ring\nwaits for"),
    ]
    note = (
        f"A model, not a measurement: {machine.flops:g} operations/s, {machine.link:g} bytes/s and "
        f"{machine.latency:g} s per message; bytes are those that one device receives."
    )
    return [
        Table(
            f"one layer, {kind}: {KINDS[kind].Hq} heads on {KINDS[kind].Hk}, {KINDS[kind].D} wide",
            columns,
            [row for row in rows if row["kind"] == kind],
            [note],
        )
        for kind in dict.fromkeys(row["kind"] for row in rows)
    ]


if __name__ == "__main__":
    sys.exit(main())
