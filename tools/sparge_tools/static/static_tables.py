"""The document of `sparge bench --static`: its rows, and the tables that show them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparge.cli.screen import Column, Table

from .chain import MOST_BYTES, MOST_LAUNCHES, Chain
from .roofline import estimate
from .suite import Result


def row_of(result: Result) -> dict[str, Any]:
    """What a kernel became, its estimate and its verdicts, as plain data."""
    made, compiled = result.made, result.made.compiled
    row: dict[str, Any] = {
        "target": made.target,
        "variant": made.variant,
        "kernel": made.kernel,
        "ok": result.ok,
        "verdicts": [asdict(verdict) for verdict in result.verdicts],
    }
    if compiled is None:
        return row
    loops = []
    for i, loop in enumerate(compiled.loops):
        meant = made.intent.loops[i : i + 1]
        guess = estimate(compiled, loop)
        loops.append(
            {
                **asdict(loop),
                "name": meant[0].name if meant else f"loop {i + 1}",
                "per_tile": loop.per_tile,
                "depth": loop.depth,
                "estimate": None if guess is None else asdict(guess),
            }
        )
    return {**row, **asdict(compiled), "loops": loops}


def chain_row(chain: Chain) -> dict[str, Any]:
    return {
        "name": chain.name,
        "launches": [
            {"stage": stage, "kernel": kernel, "bytes": n} for stage, kernel, n in chain.launches
        ],
        "bytes": chain.bytes,
        "least_bytes": chain.least,
        "ratio": chain.ratio,
        "by_kernel": chain.by_kernel,
        "ok": not chain.failures,
    }


def rules_table(document: dict[str, Any]) -> Table:
    columns = (
        Column("target", "target"),
        Column("what", "kernel"),
        Column("registers", "regi-\nsters", "{}".format),
        Column("spills", "spills", "{}".format),
        Column("shared", "shared\nbytes", "{}".format),
        Column("instructions_text", "instructions\nfor a tile", "{}".format),
        Column("matrix_text", "matrix instructions"),
        Column("depth_text", "deep", "{}".format),
        Column("verdict", "verdict"),
    )
    rows = [_rules_row(row) for row in document["rows"]]
    failed = sum(not row["ok"] for row in document["rows"])
    notes = [
        "instructions for a tile: of each innermost loop that multiplies matrices, in order; in "
        "attend over full blocks (no mask), partial blocks (masked), pooled entries. Of kernels "
        "without such a loop: of the whole kernel.",
        "deep: buffers of K and V in shared memory, by loop. spills: bytes stored and loaded by "
        "spilled registers; AMD: vector registers in memory.",
        f"{failed} of {len(rows)} kernels break a rule. Compiled with triton "
        f"{document['triton']} in {document['took_seconds']:.0f} s; nothing was run.",
    ]
    return Table("GPU kernels, compiled and read; not measured", columns, rows, notes)


def _rules_row(row: dict[str, Any]) -> dict[str, Any]:
    what = row["variant"] if row["variant"].startswith("attend") else row["kernel"]
    wrong = [verdict["rule"] for verdict in row["verdicts"] if not verdict["ok"]]
    found = {**row, "what": what, "verdict": "ok" if row["ok"] else f"RED: {', '.join(wrong)}"}
    if "loops" not in row:
        return found
    loops = row["loops"]
    counts = [f"{loop['per_tile']:.0f}" for loop in loops] or [str(row["instructions"])]
    return {
        **found,
        "instructions_text": " / ".join(counts),
        "matrix_text": ", ".join(f"{n} {_short(opcode)}" for opcode, n in row["matrix"].items()),
        "depth_text": "/".join(str(loop["depth"]) for loop in loops) or None,
    }


def _short(opcode: str) -> str:
    return ".".join(opcode.split(".")[:2])


def estimate_table(document: dict[str, Any]) -> Table:
    columns = (
        Column("target", "target"),
        Column("what", "loop"),
        Column("issue", "issue", "{:.0f}".format),
        Column("mufu", "exp2", "{:.0f}".format),
        Column("tensor", "matrix", "{:.0f}".format),
        Column("bound", "bound by"),
        Column("programs", "resident\nprograms", "{}".format),
        Column("limit", "limited by"),
    )
    rows = [
        {"target": row["target"], "what": f"{row['variant']}, {loop['name']}", **loop["estimate"]}
        for row in document["rows"]
        for loop in row.get("loops", ())[:1]
        if loop["estimate"] is not None and row["variant"].startswith("attend")
    ]
    notes = [
        "ESTIMATE, not a measurement: clocks of a multiprocessor per tile that each unit needs at "
        "least, from instruction counts and vendors' rates; without caches, latencies and waits.",
        *(f"{name}: {source}." for name, source in document["targets"].items()),
    ]
    return Table("Static estimate of the first loop of attend", columns, rows, notes)


def chain_table(document: dict[str, Any]) -> Table:
    columns = (
        Column("name", "call, 32768 tokens"),
        Column("n", "launches", "{}".format),
        Column("mb", "MB", "{:.1f}".format),
        Column("ratio", "of the\nleast", "{:.2f}x".format),
        Column("kernels", "MB by kernel"),
    )
    rows = [
        {
            **chain,
            "n": len(chain["launches"]),
            "mb": chain["bytes"] / 1e6,
            "kernels": ", ".join(f"{k} {n / 1e6:.1f}" for k, n in chain["by_kernel"].items()),
        }
        for chain in document["chains"]
    ]
    notes = [
        "the least: q, k, v and output once, and the 8-bit codes of q and k. At most "
        f"{MOST_LAUNCHES} launches and {MOST_BYTES} times the least. Each tensor of a launch "
        "counts once.",
    ]
    return Table("One call: launches, and bytes through memory", columns, rows, notes)
