"""`sparge tune`: the sparsest settings of each head that keep to a bound.

The bound is one of the error of every layer, from a model or from its trace; or, with --max-kl and
--max-perplexity, of the model's output; or, with --min-psnr, of a pipeline's renders.

Ctrl-C writes what is done so far; the same command resumes. Under a target of the output nothing
but the state file is written until it is met on held-out texts or seeds; the state also serves
another target.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparge import DEFAULT, VISION, Profile
from sparge.cli import BAD_RESULT, INTERRUPTED, OK
from sparge.cli.arguments import DTYPES, add_json, add_recipe, whole
from sparge.cli.profile_command import held_out_lines, layers_table
from sparge.cli.screen import console, deliver, show_table

from .. import zoo
from ..optional_libraries import need_libraries
from ..screen import progress
from ..tuning import PRESETS, Trace, bounds_of, tune, tune_renders
from ..tuning.levels import attention_layers
from ..tuning.output_measure import KL, PERPLEXITY
from ..tuning.output_target import TargetNotMet, check_target, steps_in_all, tune_output
from ..tuning.render_target import DENSE_FIRST, MASSES, check_psnr
from ..tuning.tracing import MANIFEST
from ..tuning.tuner import check_bounds
from ..tuning.tuning_windows import disjoint_windows
from .arguments import (
    PIPELINE,
    add_model,
    call_of,
    check_directory,
    check_file,
    given_options,
    kind_of,
    open_given,
    prompts_of,
    refuse_options,
)
from .trace_command import INPUTS, LENGTH, add_calibration, check_kind, make_trace

OUTPUT_INPUTS, RENDER_SEEDS, HELD_OUT = 2, 2, 3
NOT_WITH_OUTPUT = ("l1", "l2", "preset", "trace", "store", "max_gb")
NOT_WITH_RENDERS = (
    *(*NOT_WITH_OUTPUT, "trace_steps", "max_kl", "max_perplexity"),
    *("text", "length", "inputs", "schedule"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, "; not needed with a trace")
    add("--trace", metavar="DIR", help="made by sparge trace; with --model, where to keep it")
    add("--l1", type=float, metavar="ERROR", help="error bound of the first filter, such as 0.08")
    add("--l2", type=float, metavar="ERROR", help="of both filters; default: no second filter")
    add("--preset", choices=PRESETS, help="published bounds of a model family")
    about = "in place of error bounds: the sparsest profile whose"
    kl = "next-token distributions diverge by at most this on held-out text: 0.005"
    add("--max-kl", type=float, metavar="NATS", help=f"{about} {kl}")
    perplexity = "perplexity on held-out text rises by at most this: +0.5%%"
    add("--max-perplexity", type=rise, metavar="+PERCENT", help=f"{about} {perplexity}")
    about = f"held-out texts, or seeds of renders; default: {HELD_OUT}"
    add("--held-out", type=whole, metavar="N", help=about)
    about = "of a pipeline: the sparsest profile whose renders of held-out seeds have this PSNR"
    add("--min-psnr", type=float, metavar="DB", help=f"{about} at least: 30")
    default = "precision, sink and local window; default: sparge.DEFAULT, of pipelines VISION"
    add_recipe(parser, help=default)
    add("--state", metavar="FILE", help="results so far, to resume; default: in the trace")
    inputs = f"default: {INPUTS}; with an output target {OUTPUT_INPUTS}"
    add_calibration(parser, inputs, f"default: 1; with --min-psnr {RENDER_SEEDS}")
    add("-o", "--output", dest="profile", required=True, metavar="FILE", help="the profile")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_file(args.profile)
    check_file(args.state, "--state")
    if args.min_psnr is not None:
        return run_renders(args)
    args.recipe, given = args.recipe or DEFAULT, args.recipe
    if args.model is not None and check_kind(args) == PIPELINE:
        refuse_options(args, ("max_kl", "max_perplexity", "held_out"), PIPELINE)
    if (target := target_of(args)) is not None:
        return run_output(args, *target)
    l1, l2 = bounds_of_arguments(args)
    start = time.perf_counter()
    trace, temporary = open_or_make(args)
    if given is None and "schedule" in trace.calibration:  # of a pipeline
        args.recipe = VISION
    with progress("tuning", len(trace.layers)) as step:

        def done(layer: str, seconds: float | None) -> None:
            step(f"tuned {layer}: {'resumed' if seconds is None else f'{seconds:.1f} s'}")

        profile = tune(trace, l1=l1, l2=l2, recipe=args.recipe, state=args.state, done=done)
    profile.save(args.profile)
    report(profile, args, time.perf_counter() - start)
    if profile.untuned:
        print(
            f"sparge: interrupted; {len(profile.untuned)} of {len(profile.layers)} layers have the "
            f"default recipe in {args.profile}; the same command resumes",
            file=sys.stderr,
        )
        return INTERRUPTED
    if temporary:
        for state in trace.directory.glob("tune-*.json"):
            state.unlink()
        trace.delete()
    return OK


def bounds_of_arguments(args: argparse.Namespace) -> tuple[float, float | None]:
    if args.preset is not None and (args.l1 is not None or args.l2 is not None):
        raise ValueError("--preset cannot be combined with --l1 and --l2; give one of them")
    if args.preset is not None:
        return bounds_of(args.preset)
    if args.l1 is None:
        raise ValueError(
            "an error bound is needed: --l1 0.08 --l2 0.09, or --preset llama; or a target for the "
            "output: --max-kl 0.005 or --max-perplexity +0.5%, or of a pipeline --min-psnr 30"
        )
    return check_bounds(args.l1, args.l2)


def open_or_make(args: argparse.Namespace) -> tuple[Trace, bool]:
    """The trace, and whether it is temporary: deleted after a complete run."""
    kept = args.trace is not None
    directory = Path(args.trace if kept else f"{args.profile}.trace")
    if kept and args.model is None:
        return Trace.open(directory), False
    if args.model is None:
        needed = "" if not (directory / MANIFEST).is_file() else f", or --trace {directory}"
        raise ValueError(f"--model NAME|DIR is needed to trace and tune{needed}, or --trace DIR")
    check_directory(str(directory), "--trace" if kept else "--output")
    return make_trace(args, directory), not kept


def report(profile: Profile, args: argparse.Namespace, seconds: float) -> None:
    """Print the profile; or as JSON what is known of it."""
    facts: dict[str, Any]
    words, see = f"density {profile.density:.3f}", ""
    if profile.bounds is not None:
        bounds = dict(zip(("l1", "l2"), profile.bounds, strict=True))
        facts = {"format": "sparge.tuned/1", "bounds": bounds, "untuned": profile.untuned}
        evaluations = profile.calibration["evaluations_per_head"]
        words += f", {evaluations:g} evaluations of attention per head"
    else:
        output = dict(profile.output or {})
        facts = {"format": "sparge.tuned.output/1"}
        facts |= {name: output[name] for name in ("measure", "target", "held_out")}
        if (schedule := profile.schedule) is not None:  # of a pipeline
            facts |= {"format": "sparge.tuned.renders/1", "schedule": schedule.to_dict()}
            words = f"dense_first {schedule.dense_first:g}, {words} in the sparse part of a run"
            given = f"--model {args.model} --profile {args.profile}"
            see = f"\nsee it with: sparge eval {given} --prompt …"
    document = {
        **facts,
        "profile": args.profile,
        "model": profile.name,
        "layers": len(profile.layers),
        "density": profile.density,
        "calibration": dict(profile.calibration),
        "took_seconds": seconds,
    }

    def show() -> None:
        screen = console()
        show_table(screen, layers_table(profile))
        for line in held_out_lines(profile):
            screen.print(line)
        screen.print(f"{args.profile}: {words}, {seconds:.0f} s{see}", soft_wrap=True)

    deliver(document, args, show)


def rise(text: str) -> float:
    """A percentage such as +0.5%, as a share."""
    try:
        if not text.endswith("%"):
            raise ValueError
        return float(text[:-1]) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a percentage such as +0.5%, got {text!r}"
        ) from None


def target_of(args: argparse.Namespace) -> tuple[str, float] | None:
    """The measure and its target; None where neither is given. Refuses what does not go with it."""
    given = {KL: args.max_kl, PERPLEXITY: args.max_perplexity}
    found = [(judge, target) for judge, target in given.items() if target is not None]
    if not found:
        if args.held_out is not None:
            raise ValueError(
                "--held-out goes with --max-kl, --max-perplexity or --min-psnr; leave it out"
            )
        return None
    if len(found) == 2:
        raise ValueError("--max-kl cannot be combined with --max-perplexity; give one of them")
    judge, target = found[0]
    option = "--max-kl" if judge == KL else "--max-perplexity"
    for other in given_options(args, NOT_WITH_OUTPUT):
        raise ValueError(
            f"{option} cannot be combined with {other}: it runs the model, and chooses the "
            f"error of every layer by its output; leave {other} out"
        )
    if args.model is None:
        raise ValueError(f"{option} needs --model NAME|DIR: the output of the model is measured")
    check_target(judge, target)
    if args.held_out == 1:
        raise ValueError("--held-out must be at least 2, for a standard error; got 1")
    return judge, target


def run_output(args: argparse.Namespace, judge: str, target: float) -> int:
    state = Path(args.state if args.state is not None else f"{args.profile}.state")
    # fp32 measures the attention alone; bf16 adds the rounding of every later layer.
    dtype = torch.float32 if args.dtype == "auto" else DTYPES[args.dtype]
    model, tokenizer = zoo.load(args.model, dtype=dtype)
    names, length = args.text or ["essays"], args.length or LENGTH
    mine, others = disjoint_windows(
        names,
        tokenizer,
        length=length,
        inputs=OUTPUT_INPUTS if args.inputs is None else args.inputs,
        held_out=HELD_OUT if args.held_out is None else args.held_out,
    )
    layers = attention_layers(model, args.layers)

    def tune() -> Profile:
        with progress("tuning", steps_in_all(len(layers), len(mine))) as step:
            return tune_output(
                model,
                [window.tokens for window in mine],
                [window.tokens for window in others],
                max_kl=target if judge == KL else None,
                max_perplexity=target if judge == PERPLEXITY else None,
                recipe=args.recipe,
                layers=args.layers,
                blocks=args.blocks,
                name=args.model,
                about={
                    "texts": names,
                    "length": length,
                    "calibrated_on": [window.about for window in mine],
                    "held_out": [window.about for window in others],
                },
                state=state,
                done=step,
            )

    return write_tuned(args, state, tune)


def write_tuned(args: argparse.Namespace, state: Path, tune: Callable[[], Profile]) -> int:
    """Write and report a profile that meets its target; otherwise nothing but the state is kept."""
    start = time.perf_counter()
    try:
        profile = tune()
    except KeyboardInterrupt:
        print(
            f"sparge: interrupted; no profile was written; the same command resumes from {state}",
            file=sys.stderr,
        )
        return INTERRUPTED
    except TargetNotMet as why:
        print(
            f"sparge: {why}; no profile was written. The measurements are in {state}: the same "
            "command with another target begins from them",
            file=sys.stderr,
        )
        return BAD_RESULT
    profile.save(args.profile)
    if args.state is None:
        state.unlink(missing_ok=True)
    report(profile, args, time.perf_counter() - start)
    return OK


def run_renders(args: argparse.Namespace) -> int:
    check_renders(args)
    state = Path(args.state if args.state is not None else f"{args.profile}.state")
    prompts, call = prompts_of(args), call_of(args)
    seeds, held_out = args.seeds or RENDER_SEEDS, args.held_out or HELD_OUT
    shares = DENSE_FIRST if args.dense_first is None else (args.dense_first,)
    most = len(prompts) * ((len(MASSES) + len(shares)) * seeds + 4 * held_out)

    def tune() -> Profile:
        with progress("tuning", most) as step:
            return tune_renders(
                open_given(args),
                prompts,
                min_psnr=args.min_psnr,
                seeds=range(seeds),
                held_out=range(seeds, seeds + held_out),
                call=call,
                recipe=args.recipe or VISION,
                masses=MASSES,
                dense_first=shares,
                order=args.order,
                layers=args.layers,
                name=args.model,
                state=state,
                done=step,
            )

    return write_tuned(args, state, tune)


def check_renders(args: argparse.Namespace) -> None:
    """Refuse what does not go with --min-psnr, before any work."""
    for option in given_options(args, NOT_WITH_RENDERS):
        raise ValueError(
            f"--min-psnr cannot be combined with {option}: it runs the pipeline, and chooses by "
            "its renders; leave it out"
        )
    if args.model is None or kind_of(args.model) != PIPELINE:
        came = "no model" if args.model is None else args.model
        raise ValueError(
            f"--min-psnr needs --model DIR of a diffusers pipeline (with model_index.json); got "
            f"{came}"
        )
    check_psnr(args.min_psnr)
    if args.held_out == 1:
        raise ValueError("--held-out must be at least 2, for a standard error; got 1")
    libraries = ("skimage", "flip_evaluator")
    need_libraries("renders cannot be compared", *libraries, extra="vision")
