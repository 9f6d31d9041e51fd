"""`sparge trace`: run a model and save what its layers attend, to tune on any machine.

A language model reads texts; a diffusers pipeline renders prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparge.cli import OK
from sparge.cli.arguments import DTYPES, add_json, whole
from sparge.cli.screen import console, deliver

from .. import zoo
from ..screen import progress
from ..tuning import Trace, trace_model, trace_pipeline
from ..tuning.capture import BLOCKS
from ..tuning.tracing import STEPS
from ..tuning.tuner import preset_of
from ..tuning.tuning_windows import calibration_windows
from .arguments import (
    LANGUAGE,
    MODULE,
    OF_RENDERS,
    PIPELINE,
    add_model,
    add_render_options,
    add_text,
    call_of,
    check_directory,
    kind_of,
    open_given,
    prompts_of,
    refuse_options,
    schedule_of,
)

INPUTS, LENGTH, MAX_GB = 5, 4096, 16.0
OF_TEXTS = ("text", "length", "inputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    add_calibration(parser)
    parser.add_argument(
        "-o", "--output", dest="directory", required=True, metavar="DIR", help="the trace"
    )
    add_json(parser)


def add_calibration(
    parser: argparse.ArgumentParser, inputs: str = "default: 5", seeds: str = "default: 1"
) -> None:
    add = parser.add_argument
    add("--blocks", type=whole, default=BLOCKS, help="query blocks per call; default: %(default)s")
    add("--layers", action="append", metavar="NAME", help="layer names, with * and ?; default: all")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="dtype of the model")
    add("--store", choices=DTYPES, help="dtype of the trace; default: the model's")
    add("--max-gb", type=float, metavar="GB", help=f"size limit; default: {MAX_GB:g}")
    texts = parser.add_argument_group("of language models")
    # None tells that an option was not given: pipelines refuse them.
    add_text(texts, "; may be repeated", action="append")
    texts.add_argument("--length", type=whole, metavar="N", help=f"tokens; default: {LENGTH}")
    texts.add_argument("--inputs", type=whole, metavar="N", help=f"texts; {inputs}")
    add_render_options(parser, seeds)
    about = "steps to trace of each run, evenly spread over its sparse part; default: 4"
    add("--trace-steps", type=whole, metavar="N", help=about)


def run(args: argparse.Namespace) -> int:
    check_directory(args.directory)
    check_kind(args)
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
    preset = preset_of(trace.model.architecture)
    summary = (
        f"{trace.directory}: {len(trace.layers)} layers of {trace.name} on "
        f"{len(trace.inputs)} inputs, {trace.bytes / 2**20:.0f} MiB\n"
        f"tune it with: sparge tune --trace {trace.directory} --preset {preset} -o profile.json"
    )
    deliver(document, args, lambda: console().print(summary))
    return OK


def check_kind(args: argparse.Namespace) -> str:
    """The kind of --model; refuses options that are not for it, and modules without texts."""
    kind = kind_of(args.model)
    if kind == MODULE:
        raise ValueError(
            f"--model {args.model} is {MODULE}, which this command cannot run; in Python, "
            "sparge_tools.tuning.tune takes captures of each layer"
        )
    others = (*OF_RENDERS, "order", "trace_steps") if kind == LANGUAGE else OF_TEXTS
    refuse_options(args, others, kind)
    return kind


def make_trace(args: argparse.Namespace, directory: Path) -> Trace:
    """Run the model on its texts, or the pipeline on its prompts and seeds."""
    max_gb = MAX_GB if args.max_gb is None else args.max_gb
    options: dict[str, Any] = {
        "blocks": args.blocks,
        "layers": args.layers,
        "max_bytes": int(max_gb * 2**30),
        "dtype": DTYPES.get(args.store),
        "name": args.model,
    }
    if check_kind(args) == PIPELINE:
        prompts, call, seeds = prompts_of(args), call_of(args), args.seeds or 1
        with progress("tracing", len(prompts) * seeds) as step:
            return trace_pipeline(
                open_given(args),
                prompts,
                directory,
                seeds=range(seeds),
                call=call,
                steps=args.trace_steps or STEPS,
                schedule=schedule_of(args),
                order=args.order,
                calibration={"prompts": prompts, "seeds": seeds},
                done=lambda digest: step(f"traced run {digest[:12]}"),
                **options,
            )
    model, tokenizer = zoo.load(args.model, dtype=DTYPES.get(args.dtype))
    names, length = args.text or ["essays"], args.length or LENGTH
    inputs = INPUTS if args.inputs is None else args.inputs
    windows = calibration_windows(names, tokenizer, length=length, inputs=inputs)
    with progress("tracing", len(windows)) as step:
        return trace_model(
            model,
            [window.tokens for window in windows],
            directory,
            about=[window.about for window in windows],
            calibration={"texts": names, "length": length},
            done=lambda digest: step(f"traced input {digest[:12]}"),
            **options,
        )
