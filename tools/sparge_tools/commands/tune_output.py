"""`sparge tune --max-kl` and `--max-perplexity`: a target of the model's output.

Nothing but the state file is written until the target is met on held-out text; Ctrl-C keeps it,
and the same command resumes, also with another target.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sparge import Profile
from sparge.cli import BAD_RESULT, INTERRUPTED, OK
from sparge.cli.arguments import DTYPES, whole
from sparge.cli.profile_command import held_out_lines, layers_table
from sparge.cli.screen import console, deliver, progress, show_table

from ..tuning.levels import attention_layers
from ..tuning.output_measure import KL, PERPLEXITY
from ..tuning.output_target import TargetNotMet, check_target, steps_in_all, tune_output
from .trace_command import LENGTH

OUTPUT_INPUTS, HELD_OUT = 2, 3
_OTHERS = ("--l1", "--l2", "--preset", "--trace", "--store", "--max-gb")


def add_output_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "in place of error bounds: the sparsest profile whose"
    add(
        "--max-kl",
        type=float,
        metavar="NATS",
        help=f"{about} next-token distributions diverge by at most this on held-out text: 0.005",
    )
    add(
        "--max-perplexity",
        type=rise,
        metavar="+PERCENT",
        help=f"{about} perplexity on held-out text rises by at most this: +0.5%%",
    )
    about = f"held-out texts, or seeds of renders; default: {HELD_OUT}"
    add("--held-out", type=whole, metavar="N", help=about)


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
    (judge, target) = found[0]
    option = "--max-kl" if judge == KL else "--max-perplexity"
    for other in _OTHERS:
        if getattr(args, other[2:].replace("-", "_")) is not None:
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
    from .. import zoo
    from ..tuning.tuning_windows import disjoint_windows

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

    return write_tuned(args, state, tune, report)


def write_tuned(
    args: argparse.Namespace,
    state: Path,
    tune: Callable[[], Profile],
    report: Callable[[Profile, argparse.Namespace, float], None],
) -> int:
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


def report(profile: Profile, args: argparse.Namespace, seconds: float) -> None:
    output = dict(profile.output or {})
    document = {
        "format": "sparge.tuned.output/1",
        "profile": args.profile,
        "model": profile.name,
        "measure": output["measure"],
        "target": output["target"],
        "held_out": output["held_out"],
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
        screen.print(f"{args.profile}: density {profile.density:.3f}, {seconds:.0f} s")

    deliver(document, args, show)
