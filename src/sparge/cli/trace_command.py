"""`sparge trace`: run a model on texts and save what its layers attend, to tune on any machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..tune import Trace, trace_model
from ..tune.capture import BLOCKS
from . import OK
from .arguments import DTYPES, add_json, add_model, add_text, check_directory, whole
from .screen import console, deliver, progress

INPUTS, MAX_GB = 5, 16.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    add_calibration(parser)
    parser.add_argument(
        "-o", "--output", dest="directory", required=True, metavar="DIR", help="the trace"
    )
    add_json(parser)


def add_calibration(parser: argparse.ArgumentParser, inputs: str = "default: 5") -> None:
    add = parser.add_argument
    add_text(parser, "; may be repeated", action="append")
    add("--length", type=whole, default=4096, metavar="N", help="tokens; default: %(default)s")
    add("--inputs", type=whole, metavar="N", help=f"texts; {inputs}")
    add("--blocks", type=whole, default=BLOCKS, help="query blocks per text; default: %(default)s")
    add("--layers", action="append", metavar="NAME", help="layer names, with * and ?; default: all")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="dtype of the model")
    add("--store", choices=DTYPES, help="dtype of the trace; default: the model's")
    add("--max-gb", type=float, metavar="GB", help=f"size limit; default: {MAX_GB:g}")


def run(args: argparse.Namespace) -> int:
    check_directory(args.directory)
    trace = make_trace(args, Path(args.directory))
    document = {
        "format": "sparge.traced/1",
        "directory": str(trace.directory),
        "model": trace.name,
        "architecture": trace.model.architecture,
        "layers": len(trace.layers),
        "inputs": [each.about for each in trace.inputs],
        "blocks": trace.blocks,
        "bytes": trace.bytes,
    }
    summary = (
        f"{trace.directory}: {len(trace.layers)} layers of {trace.name} on "
        f"{len(trace.inputs)} inputs, {trace.bytes / 2**20:.0f} MiB\n"
        f"tune it with: sparge tune --trace {trace.directory} --preset llama -o profile.json"
    )
    deliver(document, args, lambda: console().print(summary))
    return OK


def make_trace(args: argparse.Namespace, directory: Path) -> Trace:
    from .. import zoo
    from ..tune.tuning_windows import calibration_windows

    model, tokenizer = zoo.load(args.model, dtype=DTYPES.get(args.dtype))
    names = args.text or ["essays"]
    inputs = INPUTS if args.inputs is None else args.inputs
    windows = calibration_windows(names, tokenizer, length=args.length, inputs=inputs)
    with progress("tracing", len(windows)) as step:
        return trace_model(
            model,
            [window.tokens for window in windows],
            directory,
            blocks=args.blocks,
            layers=args.layers,
            max_bytes=int((MAX_GB if args.max_gb is None else args.max_gb) * 2**30),
            dtype=DTYPES.get(args.store),
            name=args.model,
            about=[window.about for window in windows],
            calibration={"texts": names, "length": args.length},
            done=lambda digest: step(f"traced input {digest[:12]}"),
        )
