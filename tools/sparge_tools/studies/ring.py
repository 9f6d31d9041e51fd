"""What a ring sends, waits for and gets wrong, against a dense ring.

    python -m sparge_tools.studies.ring

Processes over gloo on this machine. Layers are synthetic, or of a model of the zoo: every eighth,
captured on one text. The mass is chosen by bisection to keep the density asked for. `needs` is the
share of remote key blocks that some query of a rank keeps: what skipping alone could save.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import sparge
from sparge import DEFAULT, KeepMass, Recipe
from sparge.cli import BAD_RESULT, OK, Parser
from sparge.cli.arguments import add_json, whole
from sparge.cli.screen import console, deliver
from sparge.parallel import ring_attention, shard, unshard
from sparge.parallel.layout import zigzag
from sparge.synthetic import structured_qkv

from ..machine import machine_text, where_it_runs
from . import study

MOST = 0.6
EVERY, STEPS = 8, 12
CASES = (("causal, zigzag", True, "zigzag"), ("not causal", False, "contiguous"))


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.ring", description=__doc__)
    parser.add_argument("--ranks", type=whole, default=4, help="default: %(default)s")
    parser.add_argument("--length", type=whole, default=8192, help="default: %(default)s")
    parser.add_argument("--density", type=float, default=0.35, help="default: %(default)s")
    parser.add_argument("--precision", default="int8", help="default: %(default)s")
    parser.add_argument("--model", help="a language model of the zoo; default: synthetic")
    add_json(parser)
    args = parser.parse_args(argv)
    rows = [row for layer in layers(args) for row in measure(layer, args)]
    document = {"rows": rows, "most": MOST, **where_it_runs()}

    def show() -> None:
        for row in rows:
            sent = ", ".join(f"{name} {share:.3f}" for name, share in row["sent"].items())
            console().print(
                f"{row['layer']}, {row['case']}, {row['dtype']} {row['precision']}: density "
                f"{row['density']:.3f}, needs {row['needs']:.2f}, bytes {row['bytes_ratio']:.2f} "
                f"of a dense ring's ({sent}); imbalance {row['imbalance']:.2f}, waited "
                f"{row['waited']:.0%} of {row['seconds']:.2f} s, error {row['error']:.1e}"
            )
        console().print(f"machine: {machine_text(document)}")

    deliver(document, args, show)
    causal = [row["bytes_ratio"] for row in rows if row["causal"]]
    return OK if sum(causal) / len(causal) <= MOST else BAD_RESULT


def layers(args: argparse.Namespace) -> Iterator[tuple[str, list[Tensor]]]:
    """Name, and query, key and value `[1, H, L, D]`."""
    if args.model is None:
        qkv = structured_qkv(Hq=9, Hk=3, L=args.length, D=64, dtype=torch.bfloat16)
        yield "synthetic", list(qkv)
        return
    from .. import zoo

    model, tokenizer = zoo.load(args.model)
    seen: dict[str, list[Tensor]] = {}
    ids = tokenizer(zoo.text(), return_tensors="pt").input_ids[:, : args.length]
    with sparge.accelerate(model, backend="dense") as handle, torch.no_grad():
        for layer in handle.report().layers[::EVERY]:

            def keep(q: Tensor, k: Tensor, v: Tensor, _: Any, name: str = layer.name) -> None:
                seen[name] = [x.to(torch.bfloat16).clone() for x in (q, k, v)]

            handle.tap(layer.name, keep)
        model.model(ids)
    yield from seen.items()


def measure(layer: tuple[str, list[Tensor]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    name, qkv = layer
    for case, causal, layout in CASES:
        recipe = replace(DEFAULT, precision=args.precision)
        recipe, kept = by_density(qkv, recipe, causal, args.density)
        found = ring(qkv, recipe, causal, layout, args.ranks)
        yield {
            "layer": name,
            "case": case,
            "causal": causal,
            "dtype": str(qkv[0].dtype).removeprefix("torch."),
            "precision": args.precision,
            "ranks": args.ranks,
            "needs": needs(kept, qkv[1].shape[1], layout, args.ranks),
            **found,
        }


def by_density(
    qkv: list[Tensor], recipe: Recipe, causal: bool, density: float
) -> tuple[Recipe, Tensor]:
    """The recipe whose mass keeps this density, and the blocks that it keeps."""
    low, high = 0.0, 1.0 - 1e-4
    for _ in range(STEPS):
        mass = 1.0 - ((1.0 - low) * (1.0 - high)) ** 0.5
        recipe = replace(recipe, keep=KeepMass(mass))
        plan = sparge.make_plan(*qkv[:2], is_causal=causal, enable_gqa=True, recipe=recipe)
        low, high = (mass, high) if plan.density < density else (low, mass)
    return recipe, plan.to_mask()


def needs(kept: Tensor, Hk: int, layout: str, ranks: int) -> float:
    """Of the key blocks of other ranks, the share that a rank keeps any of."""
    wanted = kept.unflatten(1, (Hk, -1)).any(2)
    n_q, n_k = kept.shape[2:]
    dealt = zigzag(n_q, ranks)
    total = 0
    for rank in range(ranks):
        blocks = range(n_q * rank // ranks, n_q * (rank + 1) // ranks)
        rows = list(blocks) if layout == "contiguous" else []
        rows = rows or [i for piece in dealt.of(rank) for i in range(piece.start, piece.stop)]
        own = torch.zeros(n_k, dtype=torch.bool)
        for i in rows:
            own[2 * i : 2 * i + 2] = True
        total += int((wanted[:, :, rows].any(2) & ~own).sum())
    return total / (kept.shape[0] * Hk * n_k * (ranks - 1))


def ring(
    qkv: list[Tensor], recipe: Recipe, causal: bool, layout: str, ranks: int
) -> dict[str, Any]:
    """What the first rank reports of a second run, and its error against one process."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((qkv, recipe, causal, layout), Path(folder) / "job")
        spawn(_rank, (ranks, folder), nprocs=ranks)
        found: dict[str, Any] = torch.load(Path(folder) / "found", weights_only=False)
    return found


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    qkv, recipe, causal, layout = torch.load(Path(folder) / "job", weights_only=False)
    parts = [shard(x, layout=layout) for x in qkv]
    options: Any = {"is_causal": causal, "recipe": recipe, "enable_gqa": True}
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        with sparge.record() as runs:
            out = ring_attention(*parts, layout=layout, backend="cpu", **options)
        seconds = time.perf_counter() - start
    whole = unshard(out, layout=layout)
    if rank == 0:
        (run,) = runs
        assert run.ring is not None
        want = sparge.attention(*qkv, backend="cpu", **options)
        shares, dense = run.ring.shares, run.ring.dense_bytes
        error = (whole.float() - want.float()).abs().sum() / want.float().abs().sum()
        found = {
            "density": sum(x.kept for x in shares) / sum(x.allowed for x in shares),
            "bytes_ratio": run.ring.bytes_ratio,
            "sent": {name: sum(x.sent[name] for x in shares) / dense for name in shares[0].sent},
            "imbalance": run.ring.imbalance,
            "waited": max(x.waited for x in shares) / seconds,
            "seconds": seconds,
            "error": float(error),
        }
        torch.save(found, Path(folder) / "found")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
