"""`sparge bench --suite vision`: attention at the shapes of picture and video models."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from sparge.cli.machine import load_average, where_it_runs
from sparge.cli.screen import progress
from sparge.cli.self_check import Check
from sparge.reorder import check_order

from ..bench.vision_suite import Setting, VisionShape, measure_shape, named_shapes
from .arguments import words

FORMAT = "sparge.bench.vision/1"
NOT_HERE: dict[str, Any] = {
    "lengths": None,
    "head_dims": None,
    "causal": None,
    "full": False,
    "contenders": [],
}
"""Options of the speed suite that the shapes decide, and what they are if nobody gives them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sparge bench --suite vision")
    add = group.add_argument
    about = "flux, cogvideox, mochi, wan; default: all, minutes; flux alone takes seconds"
    add("--shapes", type=words, metavar="NAME,…", help=about)
    about = "of the visual tokens: hilbert (default), row, column, time, tiles:4x4x4, random"
    add("--order", metavar="NAME", help=about)


def refuse_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that is for this suite alone."""
    for name in ("shapes", "order"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for --suite vision, got --{name} {getattr(args, name)}")


def check_arguments(args: argparse.Namespace) -> list[VisionShape]:
    """The shapes that are wanted. Raises ValueError for an option that has no meaning here."""
    for name, not_given in NOT_HERE.items():
        if getattr(args, name) != not_given:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option} is not for --suite vision, whose shapes are those of models; "
                "choose among them with --shapes"
            )
    args.order = check_order(args.order or Setting.order)
    return named_shapes(args.shapes or [])


def measure(
    args: argparse.Namespace, shapes: list[VisionShape], checks: list[Check]
) -> dict[str, Any]:
    where, start = where_it_runs(), time.perf_counter()
    setting = Setting(args.backends, args.order, args.heads, args.repeat, args.device)
    wanted = list(product(shapes, args.threads or [torch.get_num_threads()]))
    rows: list[dict[str, Any]] = []
    with progress("measuring", len(wanted)) as step:
        for shape, n_threads in wanted:
            rows += measure_shape(shape, setting, n_threads)
            step(f"{shape.name} {n_threads}t")
    return {
        "format": FORMAT,
        **where,
        "load_average_after": load_average(),
        "took_seconds": time.perf_counter() - start,
        "device": args.device,
        "order": args.order,
        "self_check": [asdict(check) for check in checks],
        "rows": rows,
    }
