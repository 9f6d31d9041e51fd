"""`sparge tune` and `sparge trace` of a diffusers pipeline: --min-psnr, or bounds for each head.

With --min-psnr nothing but the state file is written until the bound is met on held-out seeds;
Ctrl-C keeps it, and the same command resumes, also with another bound.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparge import VISION, Profile
from sparge.cli.arguments import DTYPES
from sparge.cli.profile_command import held_out_lines, layers_table
from sparge.cli.screen import console, deliver, progress, show_table

from ..optional_libraries import need_libraries
from ..tuning import Trace, schedule_of, trace_pipeline, tune_renders
from ..tuning.render_target import DENSE_FIRST, MASSES, check_psnr
from ..tuning.tracing import STEPS
from .arguments import PIPELINE, kind_of
from .pipeline_options import call_of, open_given, prompts_of
from .pipeline_options import schedule_of as given_schedule
from .tune_output import write_tuned

RENDER_SEEDS, HELD_OUT = 2, 3
GB = 2**30
_OTHERS = (
    *("l1", "l2", "preset", "trace", "store", "max_gb", "trace_steps", "max_kl", "max_perplexity"),
    *("text", "length", "inputs", "schedule"),
)


def add_render_target(parser: argparse.ArgumentParser) -> None:
    about = "of a pipeline: the sparsest profile whose renders of held-out seeds have this PSNR"
    parser.add_argument("--min-psnr", type=float, metavar="DB", help=f"{about} at least: 30")


def make_pipeline_trace(args: argparse.Namespace, directory: Path) -> Trace:
    """Trace a pipeline on its prompts and seeds."""
    prompts, call, seeds = prompts_of(args), call_of(args), args.seeds or 1
    with progress("tracing", len(prompts) * seeds) as step:
        return trace_pipeline(
            open_given(args),
            prompts,
            directory,
            seeds=range(seeds),
            call=call,
            steps=args.trace_steps or STEPS,
            schedule=given_schedule(args),
            order=args.order,
            blocks=args.blocks,
            layers=args.layers,
            max_bytes=int((16.0 if args.max_gb is None else args.max_gb) * GB),
            dtype=DTYPES.get(args.store),
            name=args.model,
            calibration={"prompts": prompts, "seeds": seeds},
            done=lambda digest: step(f"traced run {digest[:12]}"),
        )


def run_renders(args: argparse.Namespace) -> int:
    check(args)
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

    return write_tuned(args, state, tune, report)


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go with --min-psnr, before any work."""
    for name in _OTHERS:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--min-psnr cannot be combined with --{name.replace('_', '-')}: it runs the "
                "pipeline, and chooses by its renders; leave it out"
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


def report(profile: Profile, args: argparse.Namespace, seconds: float) -> None:
    output, schedule = dict(profile.output or {}), schedule_of(profile)
    assert schedule is not None
    document = {
        "format": "sparge.tuned.renders/1",
        "profile": args.profile,
        "model": profile.name,
        "measure": output["measure"],
        "target": output["target"],
        "held_out": output["held_out"],
        "schedule": schedule.to_dict(),
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
        screen.print(
            f"{args.profile}: dense_first {schedule.dense_first:g}, density {profile.density:.3f} "
            f"in the sparse part of a run, {seconds:.0f} s\n"
            f"see it with: sparge eval --model {args.model} --profile {args.profile} --prompt …",
            soft_wrap=True,
        )

    deliver(document, args, show)
