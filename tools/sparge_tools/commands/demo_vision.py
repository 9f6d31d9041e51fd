"""`sparge demo --vision`: masks of photographs by SAM 2, and terrain made of noise, dense and with
sparge; writes a page with the pictures."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

import torch

from sparge.cli import OK
from sparge.cli.arguments import whole
from sparge.cli.machine import machine_text, where_it_runs
from sparge.cli.screen import console, deliver, progress, show_table
from sparge.support.atomic_files import replace_file

from ..optional_libraries import need_libraries
from .arguments import MODULE, check_file, kind_of

if TYPE_CHECKING:
    from ..renders import Renders

FORMAT = "sparge.showcase.vision/1"
SHOWN = ("sam2-hiera-tiny", "terrain-consistency-unet")
INPUTS, PAGE = 4, "vision.html"
_OF_TEXT = ("tokens", "text", "repeats")


def add_vision_options(parser: argparse.ArgumentParser) -> None:
    about = f"show {' and '.join(SHOWN)}, which are downloaded once, instead of a language model"
    parser.add_argument("--vision", action="store_true", help=about)
    about = f"with --vision: photographs, and fields of noise; default: {INPUTS}"
    parser.add_argument("--inputs", type=whole, metavar="N", help=about)


def run_vision(args: argparse.Namespace) -> int:
    for name in _OF_TEXT:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for the demo of a language model; --vision has none")
    names = SHOWN if args.model is None else (args.model,)
    if args.model is not None and kind_of(args.model) != MODULE:
        raise ValueError(
            f"--model with --vision must be a module of the zoo, such as {SHOWN[0]}; {args.model} "
            "is none"
        )
    page = args.page or PAGE
    check_file(page)
    libraries = ("skimage", "flip_evaluator", "PIL", "matplotlib")
    need_libraries("the demo cannot run", *libraries, extra="vision")
    from ..showcase.pictures_page import make_pictures_page

    where, command = where_it_runs(), shlex.join(["sparge", *sys.argv[1:]])
    sections = measure(args, names)
    title = "sparge demo · pictures, dense and sparse"
    html = make_pictures_page(title, sections, command=command, where=where)
    replace_file(page, html.encode())
    document = {
        "format": FORMAT,
        **where,
        "command": command,
        "page": page,
        "models": [renders.to_dict() for renders in sections],
    }
    deliver(document, args, lambda: show(document, sections, page))
    return OK


def measure(args: argparse.Namespace, names: tuple[str, ...]) -> list[Renders]:
    from .. import zoo
    from ..renders import compare_results

    inputs = args.inputs or INPUTS
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    sections = []
    with progress("running", len(names) * (2 + 2 * inputs)) as step:
        for name in names:
            step(f"loading {name}")
            sections.append(
                compare_results(
                    zoo.load_module(name, dtype=dtype),
                    inputs=inputs,
                    seed=args.seed,
                    recipe=args.recipe,
                    done=step,
                )
            )
    return sections


def show(document: dict[str, Any], sections: list[Renders], page: str) -> None:
    from ..showcase.pictures_page import cost, pairs_table, verdict

    screen = console()
    screen.print(
        f"sparge {document['versions']['sparge']} demo: pictures\n"
        f"machine: {machine_text(document)}\n",
        soft_wrap=True,
    )
    for renders in sections:
        show_table(screen, pairs_table(renders))
        screen.print()
    screen.print(f"{verdict(sections)} {cost(sections)}\npage: {page}", soft_wrap=True)
