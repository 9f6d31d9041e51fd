"""`sparge tune`: settings for each head under error bounds, from a model or from its trace; or the
sparsest settings that keep the model's output within a target (`tune_output.py`), or a pipeline's
renders (`tune_pipeline.py`).

Ctrl-C writes what is done so far; the same command resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from sparge import DEFAULT, VISION, Profile
from sparge.cli import INTERRUPTED, OK
from sparge.cli.arguments import add_json, add_recipe
from sparge.cli.profile_command import layers_table
from sparge.cli.screen import console, deliver, progress, show_table

from ..tuning import PRESETS, Trace, bounds_of, tune
from ..tuning.tracing import MANIFEST
from ..tuning.tuner import check_bounds
from .arguments import PIPELINE, add_model, check_directory, check_file, refuse_options
from .trace_command import INPUTS, add_calibration, check_kind, make_trace
from .tune_output import OUTPUT_INPUTS, add_output_target, run_output, target_of
from .tune_pipeline import RENDER_SEEDS, add_render_target, run_renders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, "; not needed with a trace")
    add("--trace", metavar="DIR", help="made by sparge trace; with --model, where to keep it")
    add("--l1", type=float, metavar="ERROR", help="error bound of the first filter, such as 0.08")
    add("--l2", type=float, metavar="ERROR", help="of both filters; default: no second filter")
    add("--preset", choices=PRESETS, help="published bounds of a model family")
    add_output_target(parser)
    add_render_target(parser)
    default = "precision, sink and local window; default: sparge.DEFAULT, of pipelines VISION"
    add_recipe(parser, help=default)
    add("--state", metavar="FILE", help="results so far, to resume; default: in the trace")
    inputs = f"default: {INPUTS}; with an output target {OUTPUT_INPUTS}"
    add_calibration(parser, inputs, f"default: 1; with --min-psnr {RENDER_SEEDS}")
    add("-o", "--output", dest="profile", required=True, metavar="FILE", help="the profile")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_file(args.profile)
    if args.state is not None:
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
    document = {
        "format": "sparge.tuned/1",
        "profile": args.profile,
        "model": profile.name,
        "bounds": dict(zip(("l1", "l2"), profile.bounds or (), strict=True)),
        "layers": len(profile.layers),
        "untuned": profile.untuned,
        "density": profile.density,
        "calibration": dict(profile.calibration),
        "took_seconds": seconds,
    }

    def show() -> None:
        screen = console()
        show_table(screen, layers_table(profile))
        screen.print(
            f"{args.profile}: density {profile.density:.3f}, "
            f"{profile.calibration['evaluations_per_head']:g} evaluations of attention per head, "
            f"{seconds:.0f} s"
        )

    deliver(document, args, show)
