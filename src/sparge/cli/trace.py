"""`sparge trace`: run a model on texts and keep what its layers attend, to be tuned anywhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from ..tune import Trace, trace_model
from ..tune.capture import BLOCKS
from . import OK, add_json, console, deliver, progress, whole

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTH, INPUTS = 4096, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME|DIR", help="of the zoo, or a path")
    add_calibration(parser)
    parser.add_argument("-o", "--output", dest="directory", required=True, metavar="DIR")
    add_json(parser)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", action="append", metavar="NAME|FILE", help="default: essays; may be repeated")
    add("--length", type=whole, default=LENGTH, metavar="N", help="tokens; default: %(default)s")
    add("--inputs", type=whole, default=INPUTS, metavar="N", help="texts; default: %(default)s")
    add("--blocks", type=whole, default=BLOCKS, help="query blocks of each; default: %(default)s")
    add("--layers", action="append", metavar="NAME", help="with * and ?; default: all")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="of the model")
    add("--store", choices=DTYPES, help="dtype of the trace; default: the model's")
    add("--max-gb", type=float, default=16.0, metavar="GB", help="default: %(default)g")


def run(args: argparse.Namespace) -> int:
    trace = make_trace(args, Path(args.directory))
    document = describe(trace)
    deliver(document, args, lambda: console().print(text_of(document)))
    return OK


def make_trace(args: argparse.Namespace, directory: Path) -> Trace:
    from .. import zoo
    from ..tune.tuning_windows import calibration_windows

    model, tokenizer = zoo.load(args.model, dtype=DTYPES.get(args.dtype))
    names = args.text or ["essays"]
    windows = calibration_windows(names, tokenizer, length=args.length, inputs=args.inputs)
    with progress("tracing", len(windows)) as step:
        return trace_model(
            model,
            [window.tokens for window in windows],
            directory,
            blocks=args.blocks,
            layers=args.layers,
            max_bytes=int(args.max_gb * 2**30),
            dtype=None if args.store is None else DTYPES[args.store],
            name=args.model,
            about=[window.about for window in windows],
            calibration={"texts": names, "length": args.length},
            done=lambda digest: _traced(digest, step),
        )


def _traced(digest: str, step: Any) -> None:
    step()
    if not sys.stderr.isatty():
        print(f"sparge: traced input {digest[:12]}", file=sys.stderr, flush=True)


def describe(trace: Trace) -> dict[str, Any]:
    return {
        "format": "sparge.traced/1",
        "directory": str(trace.directory),
        "model": trace.name,
        "architecture": trace.model.architecture,
        "layers": len(trace.layers),
        "inputs": [each.about for each in trace.inputs],
        "blocks": trace.blocks,
        "bytes": trace.bytes,
    }


def text_of(document: dict[str, Any]) -> str:
    return (
        f"{document['directory']}: {document['layers']} layers of {document['model']} on "
        f"{len(document['inputs'])} inputs, {document['bytes'] / 2**20:.0f} MiB\n"
        f"tune it with: sparge tune --trace {document['directory']} --preset llama -o profile.json"
    )
