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
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_K, BLOCK_Q, DEFAULT, VISION, KeepAll, KeepError, Recipe, make_plan
from sparge.cli import OK, Parser
from sparge.cli.arguments import add_json, wholes
from sparge.cli.screen import Column, Table, console, deliver, share, show_table
from sparge.synthetic import structured_qkv

from ..commands.arguments import check_file, words
from ..screen import milliseconds, progress
from ..synthetic_video import video_qkv
from . import study

SCALE, PER_HALF, FLOAT = 4, 2, 4
"""Bytes of a scale, of a value in 16 bits, of a pooled number."""


@dataclass(frozen=True)
class Machine:
    """flops: of dense attention, as achieved by a device. link: bytes per second that a device
    receives. latency: seconds per message. block_cost: time of a kept block against a dense one."""

    flops: float = 4e14
    link: float = 5e10
    latency: float = 1e-5
    block_cost: float = 1.0


@dataclass(frozen=True)
class Layer:
    """One attention layer over `world` ranks; `needed`: see `scale_densities`."""

    L: int
    world: int
    Hq: int
    Hk: int
    D: int
    recipe: Recipe
    is_causal: bool = False
    dtype_bytes: int = 2
    density: float = 1.0
    needed: float = 1.0

    @property
    def budget(self) -> bool:
        """Whether the recipe measures errors, for which whole heads travel as they are."""
        return isinstance(self.recipe.keep, KeepError)

    @property
    def plans_per_head(self) -> int:
        """Ranks that plan one key head: several, where there are more ranks than heads and the
        busiest then has less to do. A budget is one number for a head, and planned at once."""
        most = 1 if self.budget else -(-self.world // self.Hk)
        choices = range(1, most + 1)
        return min(choices, key=lambda n: (Fraction(-(-self.Hk * n // self.world), n), n))

    @property
    def busiest(self) -> float:
        """What the rank that plans the most plans, against the mean."""
        plans = self.Hk * self.plans_per_head
        return -(-plans // self.world) * self.world / plans

    @property
    def _received(self) -> float:
        """Share of the sequence that a rank does not hold."""
        return (self.world - 1) / self.world


def dense_ring_bytes(layer: Layer) -> float:
    """That a rank receives: keys and values of all others."""
    return layer._received * layer.L * layer.Hk * 2 * layer.D * layer.dtype_bytes


def ulysses_bytes(layer: Layer) -> float | None:
    """That a rank receives: q, k, v of its heads, and outputs of its rows. None: some rank would
    have no head."""
    if (layer.world - 1) * -(-layer.Hq // layer.world) >= layer.Hq:
        return None
    copies = max(1, layer.world // layer.Hk)  # key heads are repeated until each rank has one
    heads = 2 * layer.Hq + 2 * layer.Hk * copies
    return layer._received * layer.L / layer.world * heads * layer.D * layer.dtype_bytes


def plan_bytes(layer: Layer) -> float:
    """That a rank receives before it can plan, and as the plan of its rows."""
    recipe, D, group = layer.recipe, layer.D, layer.Hq / layer.Hk
    n_q, n_k = layer.L / BLOCK_Q, layer.L / BLOCK_K
    coded = recipe.quantized and not layer.budget
    key = D + SCALE if coded else D * layer.dtype_bytes
    per_head = float(layer.L * key)
    if layer.budget:  # values and queries, too
        per_head += layer.L * D * layer.dtype_bytes * (1 + group)
    else:
        per_head += n_k * (D + 1) * FLOAT * coded
        per_head += group * n_q * (recipe.sample_rows * layer.dtype_bytes * D + (D + 1) * FLOAT)
    heads = layer.Hk * layer.plans_per_head / layer.world
    bits = layer.Hq * n_q / layer.world * n_k / 8
    return layer._received * (heads * per_head + bits)


def block_bytes(layer: Layer) -> float:
    """That a rank receives in the rounds: the blocks that it needs, and what pools the others."""
    recipe, D = layer.recipe, layer.D
    # A rank has the keys of the heads that it planned; there is no plan to keep all.
    known = layer.plans_per_head / layer.world if recipe.keep != KeepAll() else 0.0
    key = value = D * layer.dtype_bytes
    if layer.budget:
        known = 0.0
    elif recipe.quantized:
        key, value = D + SCALE, D * (1 if recipe.precision == "int8-fast" else PER_HALF)
    rows = layer._received * layer.L * layer.Hk
    pooled = (key + value) / recipe.pool_group if recipe.pools else 0.0
    return rows * (layer.needed * ((1 - known) * key + value) + pooled)


def move_bytes(layer: Layer) -> float:
    """That a rank receives where causal rows are dealt so that all have as much: q, and outputs."""
    rows = layer._received * layer.L / layer.world
    return rows * layer.Hq * 2 * layer.D * layer.dtype_bytes if layer.is_causal else 0.0


def compute_seconds(layer: Layer, machine: Machine, *, sparse: bool) -> float:
    """Of one rank, if all have as much to do; without planning."""
    dense = 4.0 * layer.L**2 * layer.Hq * layer.D / layer.world / machine.flops
    dense *= 0.5 if layer.is_causal else 1.0
    return dense * layer.density * machine.block_cost if sparse else dense


def plan_seconds(layer: Layer, machine: Machine) -> float:
    """Scores of the sampled rows, which are half of attention over them; budgets double it."""
    sampled = 0.5 * layer.recipe.sample_rows / BLOCK_Q * (2 if layer.budget else 1)
    return layer.busiest * sampled * compute_seconds(layer, machine, sparse=False)


def ring_seconds(layer: Layer, machine: Machine, n_bytes: float, compute: float) -> float:
    """Rounds, each of which receives while the one before is computed."""
    each = compute / layer.world
    return each + (layer.world - 1) * max(each, receive_seconds(layer, machine, n_bytes))


def receive_seconds(layer: Layer, machine: Machine, n_bytes: float) -> float:
    """Of one round."""
    return n_bytes / (layer.world - 1) / machine.link + machine.latency


def estimate(layer: Layer, machine: Machine) -> dict[str, Any]:
    """Bytes that a rank receives, and seconds of one layer; None for Ulysses with too few heads."""
    dense = compute_seconds(layer, machine, sparse=False)
    sparse = compute_seconds(layer, machine, sparse=True)
    plan = plan_seconds(layer, machine)
    once = 2 * (layer.world - 1) * machine.latency  # an exchange there and back
    through = ulysses_bytes(layer)
    all_to_all = None if through is None else through / machine.link + once
    before = plan_bytes(layer) + move_bytes(layer)
    first = (layer.busiest * plan_bytes(layer) + move_bytes(layer)) / machine.link
    ours = plan + first + once
    # Ulysses plans the heads that it has; some ranks have one more than others.
    uneven = -(-layer.Hq // layer.world) * layer.world / layer.Hq
    through_heads = plan / layer.busiest + sparse
    received = receive_seconds(layer, machine, block_bytes(layer))
    return {
        "L": layer.L,
        "world": layer.world,
        "density": layer.density,
        "needed": layer.needed,
        "dense_ring_bytes": dense_ring_bytes(layer),
        "ulysses_bytes": through,
        "ring_bytes": before + block_bytes(layer),
        "ring_bytes_ratio": (before + block_bytes(layer)) / dense_ring_bytes(layer),
        "dense_ring_seconds": ring_seconds(layer, machine, dense_ring_bytes(layer), dense),
        "dense_ulysses_seconds": None if all_to_all is None else all_to_all + uneven * dense,
        "ulysses_seconds": None if all_to_all is None else all_to_all + uneven * through_heads,
        "ring_seconds": ours + ring_seconds(layer, machine, block_bytes(layer), sparse),
        "ring_waits_for": "links" if received > sparse / layer.world else "computing",
    }


MEASURED = Path(__file__).with_name("scale_densities.json")
RANKS = (2, 4, 8, 16, 32)
Row = dict[str, Any]


def _text(L: int) -> tuple[Tensor, Tensor, Tensor]:
    return structured_qkv(Hq=8, Hk=2, L=L, D=64)  # four heads share a key head, as in the model


def _video(L: int) -> tuple[Tensor, Tensor, Tensor]:
    if L % 1024:
        raise ValueError(f"--lengths of video must be multiples of 1024, got {L}")
    return video_qkv((L // 1024, 32, 32), heads=4, order="hilbert")


INPUTS = {"text": _text, "video": _video}
KINDS = {
    "text": Layer(1, 1, Hq=32, Hk=8, D=128, recipe=DEFAULT, is_causal=True),
    "video": Layer(1, 1, Hq=40, Hk=40, D=128, recipe=VISION),
}
"""Kinds of attention layers, but for their length and number of ranks."""


def measure(name: str, L: int, ranks: Sequence[int] = RANKS) -> Row:
    """A row of the table of densities, from one synthetic layer."""
    kind = KINDS[name]
    query, key, value = INPUTS[name](L)
    groups = query.shape[1] != key.shape[1]
    rest: dict[str, Any] = {"is_causal": kind.is_causal, "enable_gqa": groups, "value": value}
    plan = make_plan(query, key, **rest, recipe=kind.recipe)
    kept = plan.to_mask().unflatten(1, (key.shape[1], -1)).any(2)  # by key head
    needed = {str(world): needed_share(kept, world, kind.is_causal) for world in ranks}
    return {"kind": name, "L": L, "density": plan.density, "needed": needed}


def needed_share(kept: Tensor, world: int, is_causal: bool) -> float:
    """kept: bool `[B, Hk, n_q, n_k]`. Causal queries are dealt in zigzag, as a ring does."""
    n_q, n_k = kept.shape[2:]
    if n_q < 2 * world:
        raise ValueError(
            f"a length must have at least two blocks of {BLOCK_Q} queries for each of {world} "
            f"ranks, got {n_q} blocks"
        )
    shares = []
    for rank in range(world):
        rows = torch.zeros(n_q, dtype=torch.bool)
        parts = [(rank, world)]
        if is_causal:
            parts = [(rank, 2 * world), (2 * world - 1 - rank, 2 * world)]
        for part, of in parts:
            rows[n_q * part // of : n_q * (part + 1) // of] = True
        others = torch.ones(n_k, dtype=torch.bool)
        others[n_k * rank // world : n_k * (rank + 1) // world] = False
        shares.append(kept[:, :, rows][..., others].any(2).float().mean().item())
    return sum(shares) / world


def read(path: Path = MEASURED) -> list[Row]:
    """The rows of a file of densities; anything else in it is refused."""
    try:
        rows = json.loads(path.read_text())["rows"]
        for row in rows:
            shares = [row["density"], *row["needed"].values()]
            if row["kind"] not in KINDS or row["L"] < 1 or not all(0 <= x <= 1 for x in shares):
                raise ValueError(f"row {row}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as mistake:
        raise ValueError(f"--densities must be a file that --measure wrote: {mistake}") from None
    return list(rows)


def at(rows: Sequence[Row], kind: str, L: int, world: int) -> tuple[float, float]:
    """Density and needed share, from the longest length measured that is no longer than L.

    Nothing is extrapolated. What a rank needs grows with its rows, so it is that of a rank measured
    with at least as many; all keys, where none had as many.
    """
    mine = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["L"])
    if not mine:
        raise ValueError(f"--densities must have rows of kind {kind!r}")
    row = next((each for each in reversed(mine) if each["L"] <= L), mine[0])
    by_rows = sorted((row["L"] / int(n), share) for n, share in row["needed"].items())
    needed = next((share for rows_of, share in by_rows if rows_of >= L / world), 1.0)
    return row["density"], max(needed, row["density"])


WORLDS, LENGTHS = [8, 16, 32, 64, 128], [131072, 262144, 524288, 1048576]
MEASURED_LENGTHS = [4096, 8192, 16384, 32768]


def layer_of(kind: str, L: int, world: int, rows: Sequence[Row]) -> Layer:
    density, needed = at(rows, kind, L, world)
    return replace(KINDS[kind], L=L, world=world, density=density, needed=needed)


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.scale_model", description=__doc__)
    parser.add_argument("--kinds", type=words, default=[*KINDS], help="of text,video")
    parser.add_argument("--worlds", type=wholes, default=WORLDS, help="numbers of devices")
    parser.add_argument("--lengths", type=wholes, help="tokens; to measure, or of the model")
    for name, usual in asdict(Machine()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=usual, help="default: %(default)g")
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
