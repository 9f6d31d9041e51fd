"""`sparge demo`: a real model reads one long document, dense and with sparge; writes a page.

With --vision: masks of photographs by SAM 2, and terrain made of noise, with the pictures.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

import torch

from sparge import DEFAULT, Unsupported
from sparge.cli import OK
from sparge.cli.arguments import add_json, add_recipe, whole
from sparge.cli.screen import console, deliver, show_table
from sparge.support.atomic_files import replace_file

from .. import zoo
from ..machine import machine_text, where_it_runs
from ..optional_libraries import need_libraries
from ..renders import Renders, compare_results
from ..screen import progress
from ..showcase.measure import DemoInputs, measure_showcase, prepare_inputs
from ..showcase.page import (
    comparison_table,
    cost,
    fallback_lines,
    make_figures,
    make_page,
    verdict,
)
from ..showcase.pictures_page import make_pictures_page
from ..showcase.result import Showcase
from .arguments import (
    MODEL,
    MODULE,
    add_model,
    add_text,
    check_file,
    fill_in,
    given_options,
    kind_of,
)
from .eval_command import show_renders

STEPS = 4  # of a run, besides its prefills: loading, warming up, perplexity, attention maps
DEFAULTS = {"tokens": 7500, "model": MODEL, "text": "essays", "repeats": 1, "page": "report.html"}
SHOWN = ("sam2-hiera-tiny", "terrain-consistency-unet")
INPUTS, VISION_PAGE = 4, "vision.html"  # of --vision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # None tells that an option was not given: --vision refuses some of them.
    add("--tokens", type=whole, help="of document and question; default: 7500")
    add_recipe(parser)
    add_model(parser, f"; default: {MODEL}")
    add_text(parser)
    add("--repeats", type=whole, metavar="N", help="prefills of each; default: 1")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", choices=dtypes, default="auto", help="auto: the faster one on this machine")
    add("--seed", type=int, default=0, help="of the needle; default: %(default)s")
    page = "the page; default: report.html, or vision.html"
    add("-o", "--output", dest="page", metavar="FILE", help=page)
    about = f"show {' and '.join(SHOWN)}, which are downloaded once, instead of a language model"
    add("--vision", action="store_true", help=about)
    about = f"with --vision: photographs, and fields of noise; default: {INPUTS}"
    add("--inputs", type=whole, metavar="N", help=about)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.vision:
        return run_vision(args)
    if args.inputs is not None:
        raise ValueError("--inputs goes with --vision; leave it out")
    fill_in(args, DEFAULTS)
    check_file(args.page)
    need_libraries("the demo cannot run", "transformers", "matplotlib", extra="demo")
    show = measure(args, prepare(args))
    replace_file(args.page, make_page(show, make_figures(show)).encode())
    deliver(show.to_dict(), args, lambda: print_table(show, args.page))
    return OK


def prepare(args: argparse.Namespace) -> DemoInputs:
    """Fetch model and text, and check all that can be checked without the weights."""
    try:
        return prepare_inputs(model=args.model, text=args.text, tokens=args.tokens, seed=args.seed)
    except Unsupported as refusal:
        what = f"the demo needs the model {args.model} and the text {args.text}: {refusal.what}"
        raise Unsupported(what, refusal.reasons, refusal.way_out) from None


def measure(args: argparse.Namespace, prepared: DemoInputs) -> Showcase:
    where = where_it_runs()
    with progress("reading", STEPS + 2 * args.repeats) as step:
        step("loading the model")
        return measure_showcase(
            prepared,
            load(args, prepared),
            recipe=args.recipe,
            repeats=args.repeats,
            command=shlex.join(["sparge", *sys.argv[1:]]),
            where=where,
            step=step,
        )


def load(args: argparse.Namespace, prepared: DemoInputs) -> Any:
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        return zoo.load(os.fspath(prepared.directory.resolve()), dtype=dtype)[0]
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        raise Unsupported(
            f"{args.model} does not call its attention through transformers' attention interface, "
            "so sparge cannot replace it",
            {"transformers": str(error).split(". ", 1)[0]},
            "give a model that does, such as Llama, Qwen or Mistral",
        ) from None


def print_table(show: Showcase, page: str) -> None:
    screen, needle = console(), show.needle
    screen.print(
        f"sparge {show.where['versions']['sparge']} demo: {show.model['name']} reads "
        f"{show.tokens:,} tokens of {show.text['name']!r} and answers a question about them\n"
        f"recipe: {'default, ' if show.recipe == DEFAULT else ''}{show.recipe.to_json()}\n"
        f"machine: {machine_text(show.where)}\n",
        soft_wrap=True,
    )
    show_table(screen, comparison_table(show))
    answers = [" ".join(each.answer.splitlines()) for each in (show.dense, show.sparge)]
    lines = [
        f"\nhidden at token {needle.token:,}: {needle.fact}\nasked: {needle.question}",
        f"dense:  {needle.prefix}{answers[0]}\nsparge: {needle.prefix}{answers[1]}\n",
        *(f"not sparse {line}" for line in fallback_lines(show)),
        f"\n{verdict(show)} {cost(show)}\npage: {page}",
    ]
    screen.print("\n".join(lines), soft_wrap=True)


def run_vision(args: argparse.Namespace) -> int:
    for option in given_options(args, ("tokens", "text", "repeats")):
        raise ValueError(f"{option} is for the demo of a language model; --vision has none")
    names = SHOWN if args.model is None else (args.model,)
    if args.model is not None and kind_of(args.model) != MODULE:
        raise ValueError(
            f"--model with --vision must be a module of the zoo, such as {SHOWN[0]}; {args.model} "
            "is none"
        )
    page = args.page or VISION_PAGE
    check_file(page)
    libraries = ("skimage", "flip_evaluator", "PIL", "matplotlib")
    need_libraries("the demo cannot run", *libraries, extra="vision")
    where, command = where_it_runs(), shlex.join(["sparge", *sys.argv[1:]])
    sections = measure_vision(args, names)
    title = "sparge demo · pictures, dense and sparse"
    html = make_pictures_page(title, sections, command=command, where=where)
    replace_file(page, html.encode())
    document = {
        "format": "sparge.showcase.vision/1",
        **where,
        "command": command,
        "page": page,
        "models": [renders.to_dict() for renders in sections],
    }
    title, written = "demo: pictures", f"page: {page}"
    deliver(document, args, lambda: show_renders(document, title, sections, written))
    return OK


def measure_vision(args: argparse.Namespace, names: tuple[str, ...]) -> list[Renders]:
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
