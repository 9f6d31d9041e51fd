"""`sparge demo`: a real model reads one long document, dense and with sparge; writes a page."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported
from ..recipe import DEFAULT
from ..report.machine import where_it_runs
from ..support.atomic_files import replace_file
from . import OK
from .arguments import (
    MODEL,
    MODEL_HELP,
    RECIPE_HELP,
    TEXT_HELP,
    add_json,
    check_file,
    read_recipe,
    whole,
)
from .screen import console, deliver, progress, show_table

if TYPE_CHECKING:
    from ..showcase.measure import Prepared
    from ..showcase.result import Showcase

STEPS = 4  # of a run, besides its prefills: loading, warming up, perplexity, attention maps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=whole, default=7500, help="of document and question; default: %(default)s")
    add("--recipe", metavar="JSON", help=RECIPE_HELP)
    add("--model", metavar="NAME|DIR", default=MODEL, help=f"{MODEL_HELP}; default: %(default)s")
    add("--text", metavar="NAME|FILE", default="essays", help=f"{TEXT_HELP}; default: %(default)s")
    add("--repeats", type=whole, metavar="N", default=1, help="prefills of each; default: 1")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", choices=dtypes, default="auto", help="auto: the faster one on this machine")
    add("--seed", type=int, default=0, help="of the needle; default: %(default)s")
    add(
        *("-o", "--output"),
        dest="page",
        metavar="FILE",
        default="report.html",
        help="the page; default: %(default)s",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check_file(args.page)
    recipe = None if args.recipe is None else read_recipe(args.recipe)
    # These import heavy libraries; the checks above need none of them.
    from ..showcase.page import make_page
    from ..showcase.page_figures import make_figures, require_matplotlib

    require_matplotlib()
    prepared = prepare(args)
    show = measure(args, prepared, recipe)
    replace_file(args.page, make_page(show, make_figures(show)).encode())
    deliver(show.to_dict(), args, lambda: print_table(show, args.page))
    return OK


def prepare(args: argparse.Namespace) -> Prepared:
    """Fetch model and text, and check all that can be checked without the weights."""
    try:
        from ..showcase.measure import prepare as prepare_document

        return prepare_document(
            model=args.model, text=args.text, tokens=args.tokens, seed=args.seed
        )
    except Unsupported as refusal:
        raise Unsupported(
            f"the demo needs the model {args.model} and the text {args.text}: {refusal.what}",
            refusal.reasons,
            refusal.way_out,
        ) from None
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"the demo needs {error.name}, which is not installed",
            {},
            'install it with: pip install "sparge[demo]"',
        ) from None


def measure(args: argparse.Namespace, prepared: Prepared, recipe: Any) -> Showcase:
    from ..showcase.measure import measure_showcase

    where = where_it_runs()
    with progress("reading", STEPS + 2 * args.repeats) as step:
        step("loading the model")
        return measure_showcase(
            prepared,
            load(args, prepared),
            recipe=recipe,
            repeats=args.repeats,
            command=shlex.join(["sparge", *sys.argv[1:]]),
            where=where,
            step=step,
        )


def load(args: argparse.Namespace, prepared: Prepared) -> Any:
    from .. import zoo

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        model, _ = zoo.load(os.fspath(prepared.directory.resolve()), dtype=dtype)
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        raise Unsupported(
            f"{args.model} does not call its attention through transformers' attention interface, "
            "so sparge cannot replace it",
            {"transformers": str(error).split(". ", 1)[0]},
            "give a model that does, such as Llama, Qwen or Mistral",
        ) from None
    return model


def print_table(show: Showcase, page: str) -> None:
    from ..showcase.comparison import comparison_table, cost, fallback_lines, verdict

    screen = console()
    screen.print(
        f"sparge {show.where['versions']['sparge']} demo: {show.model['name']} reads "
        f"{show.tokens:,} tokens of {show.text['name']!r} and answers a question about them\n"
        f"recipe: {'default, ' if show.recipe == DEFAULT else ''}{show.recipe.to_json()}\n"
        f"machine: {show.where['machine_line']}, sparge's instruction set: "
        f"{show.where['isa'] or 'none'}\n",
        soft_wrap=True,
    )
    show_table(screen, comparison_table(show))
    needle = show.needle
    screen.print(
        f"\nhidden at token {needle.token:,}: {needle.fact}\nasked: {needle.question}\n"
        f"dense:  {needle.prefix}{_one_line(show.dense.answer)}\n"
        f"sparge: {needle.prefix}{_one_line(show.sparge.answer)}\n",
        soft_wrap=True,
    )
    for line in fallback_lines(show):
        screen.print(f"not sparse {line}", soft_wrap=True)
    screen.print(f"\n{verdict(show)} {cost(show)}\npage: {page}", soft_wrap=True)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
