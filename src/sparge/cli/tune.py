"""`sparge tune`: each head's settings under error bounds, from a model or from a trace of one.

Ctrl-C writes what is there so far; the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ..profile import Profile
from ..recipe import DEFAULT
from ..tune import PRESETS, Trace, bounds_of, tune
from ..tune.presets import check_bounds
from ..tune.trace_directory import MANIFEST
from . import INTERRUPTED, OK, add_json, check_output, console, deliver, progress, show_table
from .explain import read_recipe
from .profile import table_of_layers
from .trace import add_calibration, make_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME|DIR", help="of the zoo, or a path; not needed with a trace")
    add("--trace", metavar="DIR", help="made by sparge trace; or where to keep the trace")
    add("--l1", type=float, metavar="ERROR", help="bound of the first filter, such as 0.08")
    add("--l2", type=float, metavar="ERROR", help="bound of both; default: no second filter")
    add("--preset", choices=PRESETS, help="published bounds of a model family")
    add("--recipe", metavar="JSON", help="precision, sink, local window; default: the default")
    add("--state", metavar="FILE", help="what is done so far; default: in the trace")
    add_calibration(parser)
    add("-o", "--output", dest="profile", required=True, metavar="FILE", help="the profile")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_output(args.profile)
    l1, l2 = bounds_of_arguments(args)
    recipe = DEFAULT if args.recipe is None else read_recipe(args.recipe)
    start = time.perf_counter()
    trace, ours = open_or_make(args)
    with progress("tuning", len(trace.layers)) as step:

        def told(layer: str, seconds: float | None) -> None:
            step()
            if not sys.stderr.isatty():
                how = "kept from before" if seconds is None else f"{seconds:.1f} s"
                print(f"sparge: tuned {layer}: {how}", file=sys.stderr, flush=True)

        profile = tune(trace, l1=l1, l2=l2, recipe=recipe, state=args.state, done=told)
    profile.save(args.profile)
    document = describe(profile, args.profile, time.perf_counter() - start)
    deliver(document, args, lambda: show(profile, document))
    if profile.untuned:
        print(
            f"sparge: interrupted; {len(profile.untuned)} of {len(profile.layers)} layers have the "
            f"default recipe in {args.profile}; the same command goes on",
            file=sys.stderr,
        )
        return INTERRUPTED
    if ours:
        _forget(trace)
    return OK


def bounds_of_arguments(args: argparse.Namespace) -> tuple[float, float | None]:
    if args.preset is not None and (args.l1 is not None or args.l2 is not None):
        raise ValueError("give --preset or --l1 and --l2, not both")
    if args.preset is not None:
        return bounds_of(args.preset)
    if args.l1 is None:
        raise ValueError("an error bound is needed: --l1 0.08 --l2 0.09, or --preset llama")
    return check_bounds(args.l1, args.l2)


def open_or_make(args: argparse.Namespace) -> tuple[Trace, bool]:
    """The trace, and whether it is our own to throw away when all is done."""
    kept = args.trace is not None
    directory = Path(args.trace if kept else f"{args.profile}.trace")
    if kept and args.model is None:
        return Trace.open(directory), False
    if args.model is None:
        needed = "" if not (directory / MANIFEST).is_file() else f", or --trace {directory}"
        raise ValueError(f"give --model NAME|DIR to trace and tune{needed}, or --trace DIR")
    return make_trace(args, directory), not kept


def _forget(trace: Trace) -> None:
    for state in trace.directory.glob("tune-*.json"):
        state.unlink()
    trace.delete()


def describe(profile: Profile, path: str, seconds: float) -> dict[str, Any]:
    return {
        "format": "sparge.tuned/1",
        "profile": path,
        "model": profile.name,
        "bounds": {"l1": profile.bounds[0], "l2": profile.bounds[1]},
        "layers": len(profile.layers),
        "untuned": profile.untuned,
        "density": profile.density,
        "calibration": dict(profile.calibration),
        "took_seconds": seconds,
    }


def show(profile: Profile, document: dict[str, Any]) -> None:
    screen = console()
    show_table(screen, table_of_layers(profile))
    calibration = document["calibration"]
    screen.print(
        f"{document['profile']}: density {document['density']:.3f}, "
        f"{calibration['evaluations_per_head']:g} evaluations of attention per head, "
        f"{document['took_seconds']:.0f} s"
    )
