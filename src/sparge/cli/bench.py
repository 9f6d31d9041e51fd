"""`sparge bench`: every backend beside torch's dense attention, all measured in one run.

Contenders take turns within each round, so that a machine that slows down slows all of them;
medians over the rounds. A backend that fails the correctness gate gets no numbers printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..backends import backends
from ..geometry import MAX_HEAD_DIM
from ..recipe import DEFAULT, KeepAll, Recipe
from ..report.contender import Contender
from ..report.gate import check_backends
from ..report.machine import load_average, load_text, machine, machine_line, versions
from ..report.measure import dense_fp64, relative_l1, score_elements
from ..report.tables import Column, Table, error, milliseconds, share, times
from ..synthetic import MIN_HEAD_DIM, structured_qkv
from . import (
    BAD_ANSWER,
    OK,
    add_json,
    add_output,
    check_output,
    console,
    deliver,
    progress,
    show_table,
    whole,
    wholes,
)

SDPA = "torch SDPA"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RECIPES = {"keep all": Recipe(keep=KeepAll()), "default": DEFAULT}
COLUMNS = (
    Column("length", "L", "{}".format),
    Column("head_dim", "D", "{}".format),
    Column("dtype", "dtype"),
    Column("contender", "contender"),
    Column("density", "density", share),
    Column("error", "error\n(rel. L1)", error),
    Column("seconds", "ms", milliseconds),
    Column("spread", "max /\nmin", "{:.2f}".format),
    Column("plan", "plan\nms", milliseconds),
    Column("quantize", "quantize\nms", milliseconds),
    Column("attend", "attend\nms", milliseconds),
    Column("speed", "speed\nvs SDPA", times),
    Column("ns_per_score", "ns per\nscore", "{:.3f}".format),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=wholes, default=[1024, 2048], help="default: 1024,2048")
    parser.add_argument("--heads", type=whole, default=4, help="default: %(default)s")
    parser.add_argument("--head-dims", type=wholes, default=[64], help="default: 64")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=whole, metavar="N", help="default: torch's own choice")
    parser.add_argument("--repeat", type=whole, default=3, help="rounds; default: %(default)s")
    add_json(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    check_head_dims(args.head_dims)
    with threads(args.threads):
        red = [check for check in check_backends() if check.verdict == "failed"]
        if red:
            for check in red:
                print(f"sparge: {check.backend} is wrong: {check.why}", file=sys.stderr)
            print("sparge: no numbers are printed for wrong results", file=sys.stderr)
            return BAD_ANSWER
        document = measure(args)
    deliver(document, args, lambda: show(document))
    return OK


def check_head_dims(dims: list[int]) -> None:
    """The last of many cases must not fail after minutes of the others."""
    for dim in dims:
        if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"--head-dims must be from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {dim}"
            )


@contextmanager
def threads(n: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n or before)
        yield
    finally:
        torch.set_num_threads(before)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    load = load_average()
    cases = [(length, dim) for length in args.lengths for dim in args.head_dims]
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    with progress("measuring rounds", len(cases) * (args.repeat + 1)) as step:
        for length, dim in cases:
            found = [(c, c.refusal()) for c in contenders(length, dim, args.heads, args.causal)]
            refused |= {f"{c.name}, {c.dtype}": why for c, why in found if why is not None}
            able = [c for c, why in found if why is None]
            race(able, args.repeat, step)
            rows += rows_of(able)
    return {
        "format": "sparge.bench/1",
        "versions": versions(),
        "machine": machine(),
        "machine_line": machine_line(),
        "load_average": load,
        "heads": args.heads,
        "causal": args.causal,
        "repeat": args.repeat,
        "refused": refused,
        "rows": rows,
    }


def contenders(length: int, dim: int, heads: int, is_causal: bool) -> list[Contender]:
    query, key, value = structured_qkv(Hq=heads, Hk=heads, L=length, D=dim)
    found = []
    for name, dtype in DTYPES.items():
        inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
        found.append(Contender(SDPA, name, inputs, is_causal))
        for backend in backends():
            for recipe_name, recipe in RECIPES.items():
                title = f"{backend.name}, {recipe_name}"
                found.append(Contender(title, name, inputs, is_causal, backend.name, recipe))
    return found


def race(measured: list[Contender], rounds: int, step: Callable[[], None]) -> None:
    for contender in measured:
        contender.warm_up()
    step()
    for _ in range(rounds):
        for contender in measured:
            contender.take_turn()
        step()


def rows_of(measured: list[Contender]) -> list[dict[str, Any]]:
    sdpa = {c.dtype: statistics.median(c.seconds) for c in measured if c.backend is None}
    truth = {
        c.dtype: dense_fp64(*c.inputs, is_causal=c.is_causal) for c in measured if c.backend is None
    }
    return [row_of(c, truth[c.dtype], sdpa[c.dtype]) for c in measured]


def row_of(contender: Contender, truth: Tensor, sdpa_seconds: float) -> dict[str, Any]:
    assert contender.out is not None
    B, Hq, L, D = contender.inputs[0].shape
    seconds = statistics.median(contender.seconds)
    run = contender.runs[0] if contender.runs else None
    row = {
        "length": L,
        "head_dim": D,
        "dtype": contender.dtype,
        "contender": contender.name,
        "backend": contender.backend,
        "recipe": None if contender.recipe is None else contender.recipe.to_dict(),
        "isa": None if run is None else run.isa,
        "density": 1.0 if run is None else run.density,
        "sparsity": 0.0 if run is None else run.sparsity,
        "error": relative_l1(contender.out, truth),
        "seconds": seconds,
        "seconds_each": contender.seconds,
        "spread": max(contender.seconds) / min(contender.seconds),
        "speed": sdpa_seconds / seconds,
        "ns_per_score": seconds * 1e9 / score_elements(B, Hq, L, is_causal=contender.is_causal),
    }
    for stage in run.seconds if run is not None else ():
        if stage != "total":
            row[stage] = statistics.median(each.seconds[stage] for each in contender.runs)
    return row


def show(document: dict[str, Any]) -> None:
    kind = "causal" if document["causal"] else "full"
    notes = [
        f"machine: {document['machine_line']}",
        f"rounds: {document['repeat']}, contenders in turn, medians. speed: SDPA's time of the "
        "same dtype / this time, below 1 is a loss. error: against dense fp64 of the same inputs.",
        "ns per score: time / query-key pairs of dense attention. max / min: of the rounds; far "
        f"from 1, other work disturbed them (load average at the start: {load_text(document)}).",
        *(f"refused: {name}: {why}" for name, why in document["refused"].items()),
    ]
    title = f"{kind} attention, {document['heads']} heads, structured inputs"
    show_table(console(), Table(title, COLUMNS, document["rows"], notes))
