"""Options that say how a diffusers pipeline runs: prompts, seeds, sizes, schedule."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparge import Profile, Schedule
from sparge.cli.arguments import DTYPES, whole

from ..tuning import schedule_of as tuned_schedule
from .arguments import json_object, order, schedule

OF_CALLS = ("prompt", "prompts", "seeds", "steps", "height", "width", "frames", "call")
OF_RENDERS = (*OF_CALLS, "offload", "tiling", "schedule", "dense_first")
"""Options that only a pipeline has a use for."""
_NAMES = {
    "steps": "num_inference_steps",
    "height": "height",
    "width": "width",
    "frames": "num_frames",
}


def add_render_options(parser: argparse.ArgumentParser, seeds: str = "default: 1") -> None:
    group = parser.add_argument_group("of diffusers pipelines")
    add = group.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be repeated")
    add("--prompts", metavar="FILE", help="a file with a prompt in each line")
    add("--seeds", type=whole, metavar="N", help=f"renders of each prompt; {seeds}")
    add("--steps", type=whole, metavar="N", help="of the sampler; default: the pipeline's")
    add("--height", type=whole, metavar="PIXELS", help="default: the pipeline's")
    add("--width", type=whole, metavar="PIXELS", help="default: the pipeline's")
    add("--frames", type=whole, metavar="N", help="of a video; default: the pipeline's")
    about = "more arguments of the pipeline, such as '{\"guidance_scale\": 3.5}'"
    add("--call", type=json_object, metavar="JSON", help=about)
    add("--offload", action="store_true", help="keep idle parts of the pipeline off the GPU")
    add("--tiling", action="store_true", help="decode in tiles, which takes less memory")
    how = group.add_mutually_exclusive_group()
    about = "where in a run attention is sparse: a JSON object, or a file that holds one"
    how.add_argument("--schedule", type=schedule, metavar="JSON", help=about)
    about = "share of the run, from pure noise on, that stays dense; default: 0.2"
    how.add_argument("--dense-first", type=float, metavar="SHARE", help=about)
    about = "of visual tokens in attention: hilbert (the default), row, tiles:4x4x4 and others"
    parser.add_argument("--order", type=order, metavar="NAME", help=about)


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts given, at least one."""
    found = list(args.prompt or [])
    if args.prompts is not None:
        try:
            lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts {args.prompts!r} cannot be read: {error}") from None
        found += [line.strip() for line in lines if line.strip()]
    if not found:
        raise ValueError("a prompt is needed: --prompt TEXT, or --prompts FILE with one in a line")
    return found


def call_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of every call of the pipeline."""
    call = dict(args.call or {})
    for option, name in _NAMES.items():
        if (value := getattr(args, option)) is None:
            continue
        if name in call:
            raise ValueError(f"--{option} and {name} in --call say the same; give one of them")
        call[name] = value
    return call


def schedule_of(args: argparse.Namespace, profile: Profile | None = None) -> Schedule | None:
    """As given, or as the profile was tuned with; None is the default of `accelerate`."""
    if args.schedule is not None:
        given: Schedule = args.schedule
        return given
    if args.dense_first is not None:
        return Schedule(dense_first=args.dense_first)
    return None if profile is None else tuned_schedule(profile)


def open_given(args: argparse.Namespace) -> Any:
    """The pipeline of --model."""
    from .. import zoo
    from ..renders import open_pipeline

    dtype = DTYPES.get(args.dtype) or zoo.best_dtype()
    return open_pipeline(args.model, dtype=dtype, offload=args.offload, tiling=args.tiling)
