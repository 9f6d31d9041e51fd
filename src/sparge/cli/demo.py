"""`sparge demo`: a real model reads one long document, dense and with sparge; and a page of it.

`--synthetic` is the demo without a model: plans, densities and errors on structured inputs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported
from ..recipe import DEFAULT
from ..support.atomic_files import replace_file
from . import OK, add_json, check_output, console, deliver, show_table, synthetic_demo, whole
from .eval import place
from .explain import read_recipe

if TYPE_CHECKING:
    from ..evaluate.sidebyside import Prepared
    from ..report.showcase import Showcase

MODEL, TEXT, TOKENS, PAGE = "smollm2-135m-instruct", "essays", 7500, "report.html"
DTYPES = ("auto", "float32", "bfloat16")
OF_MODEL = {
    "tokens": TOKENS,
    "recipe": None,
    "model": MODEL,
    "text": TEXT,
    "repeats": 1,
    "dtype": DTYPES[0],
}
OF_SYNTHETIC = {"length": 2048, "heads": 4}
STEPS = 4
"""Of a run, beside its prefills: loading, warming up, perplexity, true attention."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Defaults are filled in later: an argument of the other demo is then seen, and refused.
    add = parser.add_argument
    add("--tokens", type=whole, help=f"of the document and its question; default: {TOKENS}")
    add("--recipe", metavar="JSON", help="a JSON object, or a file that holds one")
    add("--model", metavar="NAME|DIR", help=f"of the zoo, or a directory; default: {MODEL}")
    add("--text", metavar="NAME|FILE", help=f"of the zoo, or a file; default: {TEXT}")
    add("--repeats", type=whole, metavar="N", help="prefills of each; default: 1")
    add("--dtype", choices=DTYPES, help="of the model; default: auto, the faster one here")
    add("--seed", type=int, default=0, help="of needle or inputs; default: %(default)s")
    add(
        *("-o", "--output"),
        dest="target",
        metavar="FILE",
        help=f"the page; default: {PAGE}. With --synthetic, the JSON document",
    )
    add_json(parser)
    add("--synthetic", action="store_true", help="structured inputs: no model, no network")
    add("--length", type=whole, help="with --synthetic: tokens; default: 2048")
    add("--heads", type=whole, help="with --synthetic: default: 4")


def run(args: argparse.Namespace) -> int:
    fill_in(args)
    if args.synthetic:
        args.output = args.target
        return synthetic_demo.run(args)
    page = args.target or PAGE
    check_output(page)
    recipe = None if args.recipe is None else read_recipe(args.recipe)
    # Heavy libraries are behind these; a mistake above needs none of them.
    from ..report.page import page_of
    from ..report.pictures import pictures_of, require

    require()
    prepared = prepare(args)
    show = measure(args, prepared, recipe)
    replace_file(page, page_of(show, pictures_of(show)).encode())
    deliver(show.to_dict(), args, lambda: print_table(show, page))
    return OK


def fill_in(args: argparse.Namespace) -> None:
    mine, others = (OF_SYNTHETIC, OF_MODEL) if args.synthetic else (OF_MODEL, OF_SYNTHETIC)
    for name in others:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} is not used with --synthetic; leave out one of them"
                if args.synthetic
                else f"--{name} is of the demo without a model; add --synthetic, or leave it out"
            )
    for name, default in mine.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def prepare(args: argparse.Namespace) -> Prepared:
    """Model and text are fetched here; offline, say what works without them."""
    without = "without model and network there is: sparge demo --synthetic"
    try:
        from ..evaluate.sidebyside import prepare as prepare_reading

        return prepare_reading(model=args.model, text=args.text, tokens=args.tokens, seed=args.seed)
    except Unsupported as refusal:
        way_out = f"{refusal.way_out}.\nAnd {without}" if refusal.way_out else f"But {without}"
        raise Unsupported(
            f"the demo needs the model {args.model} and the text {args.text}: {refusal.what}",
            refusal.reasons,
            way_out,
        ) from None
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"the demo needs {error.name}, which is not installed here",
            {},
            f'install it with: pip install "sparge[demo]"; {without}',
        ) from None


def measure(args: argparse.Namespace, prepared: Prepared, recipe: Any) -> Showcase:
    from ..evaluate.sidebyside import read_both

    where = place()
    with telling(STEPS + 2 * args.repeats) as told:
        told("loading the model")
        return read_both(
            prepared,
            load(args, prepared),
            recipe=recipe,
            repeats=args.repeats,
            command=shlex.join(["sparge", *sys.argv[1:]]),
            where=where,
            told=told,
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
            "so it cannot be given another",
            {"transformers": str(error).split(". ", 1)[0]},
            "give a model that does, such as Llama, Qwen or Mistral",
        ) from None
    return model


@contextmanager
def telling(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; elsewhere a line for every step, because a run takes a minute."""
    begun = 0
    if not sys.stderr.isatty():

        def tell(what: str) -> None:
            nonlocal begun
            begun += 1
            print(f"sparge: {begun} of {steps}: {what}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress

    # Drawn only when it moves: a thread that redraws would take time from what is measured.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=steps)

        def move(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun, refresh=True)
            begun += 1

        yield move


def print_table(show: Showcase, page: str) -> None:
    from ..report.comparison import cost, fallbacks_of, table_of, verdict

    screen = console()
    screen.print(
        f"sparge {show.where['versions']['sparge']} demo: {show.model['name']} reads "
        f"{show.tokens:,} tokens of {show.text['name']!r} and answers a question about them\n"
        f"recipe: {'default, ' if show.recipe == DEFAULT else ''}{show.recipe.to_json()}\n"
        f"machine: {show.where['machine_line']}, our instruction set: {show.where['isa'] or 'none'}"
        "\n",
        soft_wrap=True,
    )
    show_table(screen, table_of(show))
    hidden = show.needle
    screen.print(
        f"\nhidden at token {hidden.token:,}: {hidden.fact}\nasked: {hidden.question}\n"
        f"dense:  {hidden.prefix}{_one_line(show.dense.answer)}\n"
        f"sparge: {hidden.prefix}{_one_line(show.sparge.answer)}\n",
        soft_wrap=True,
    )
    for line in fallbacks_of(show):
        screen.print(f"not sparse {line}", soft_wrap=True)
    screen.print(f"\n{verdict(show)} {cost(show)}\npage: {page}", soft_wrap=True)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
