"""`sparge eval`: what a model gains with sparge, and what it costs.

Of a language model here; of a diffusers pipeline and of other modules of the zoo, which are judged
by their results, in eval_pipeline.py.

Every measurement is saved in the run directory at once. Interrupted runs resume: give the same
command again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import closing, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparge.backends.cpu import library as native
from sparge.cli import OK
from sparge.cli.arguments import DTYPES, add_json, add_recipe, fill_in, whole, wholes
from sparge.cli.machine import isa_in_use, machine, machine_text, versions, where_it_runs
from sparge.cli.screen import console, deliver, progress, show_table, to_json
from sparge.routing import AUTO, ENV_BACKEND
from sparge.support.atomic_files import replace_file
from sparge.support.turns import threads

from .. import zoo
from ..evaluate.run_directory import DOCUMENT_FILE, RunDirectory, open_run
from ..evaluate.settings import MEASURES, TASKS, Cell, Settings, digest_of
from .arguments import (
    LANGUAGE,
    add_model,
    add_text,
    check_directory,
    eval_directory,
    kind_of,
    refuse_options,
    words,
)
from .pipeline_options import OF_RENDERS, add_render_options

if TYPE_CHECKING:
    from ..evaluate.tested_model import TestedModel


OF_TEXTS = ("lengths", "measures", "text", "depths", "windows", "tasks", "limit", "repeat", "fresh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    how = parser.add_mutually_exclusive_group()
    add_recipe(how)
    how.add_argument("--profile", metavar="FILE", help="tuned recipes, one for each layer")
    add = parser.add_argument
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bf16 where it is fast")
    add("--threads", type=whole, metavar="N", help="default: all")
    add("--seed", type=int, default=0, help="of needles, or the first render; default: %(default)s")
    add("-o", "--output", dest="directory", metavar="DIR", help="default: ./sparge-eval-MODEL")
    add_json(parser)
    texts = parser.add_argument_group("of language models")
    add = texts.add_argument
    # None tells that an option was not given: the other kinds of models refuse them.
    add("--lengths", type=wholes, help="tokens; default: 2048,4096,8192")
    add("--measures", type=words, help=f"of {','.join(MEASURES)}; default: all but tasks")
    add_text(texts)
    add("--depths", type=whole, help="needles per length; default: 5")
    add("--windows", type=whole, help="text windows per length; default: 1")
    add("--tasks", type=words, metavar="NAME,…", help="lm-eval tasks to run as well")
    add("--limit", type=whole, help="documents per task; default: 20")
    add("--repeat", type=whole, help="rounds of prefill; default: depending on their duration")
    add("--fresh", action="store_true", help="discard what the directory holds")
    add_render_options(parser)
    modules = parser.add_argument_group("of other modules of the zoo")
    modules.add_argument("--inputs", type=whole, metavar="N", help="of its task; default: 4")


def run(args: argparse.Namespace) -> int:
    kind = kind_of(args.model)
    if kind != LANGUAGE:
        from .eval_pipeline import run_renders

        refuse_options(args, OF_TEXTS, kind)
        return run_renders(args, kind)
    refuse_options(args, (*OF_RENDERS, "order", "inputs"), kind)
    settings = settings_of(args)
    path = eval_directory(args.directory, settings.model)
    check_directory(str(path))
    # These import heavy libraries; the checks above need none of them.
    from ..evaluate.eval_figures import draw_figures
    from ..evaluate.tested_model import TestedModel

    with threads(args.threads) if args.threads else nullcontext():
        tested, where = TestedModel(settings, path), where_it_runs()
        key = {**tested.key(), **numbers_depend_on()}
        with closing(open_run(path, key, fresh=args.fresh)) as directory:
            measure(tested, directory)
            document = make_document(tested, where, directory)
            replace_file(path / DOCUMENT_FILE, f"{to_json(document)}\n".encode())
            figures = draw_figures(document, path)
    deliver(document, args, lambda: show(document, [path / DOCUMENT_FILE, *figures]))
    return OK


def settings_of(args: argparse.Namespace) -> Settings:
    if args.measures is None:
        args.measures = [*Settings.measures, *([TASKS] if args.tasks else [])]
    fill_in(args, {each.name: each.default for each in fields(Settings) if each.name in OF_TEXTS})
    args.tasks = list(args.tasks)
    args.dtype = str(DTYPES.get(args.dtype) or zoo.best_dtype()).removeprefix("torch.")
    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})


def numbers_depend_on() -> dict[str, Any]:
    """Build and machine: cells of another build or machine do not belong in one document."""
    found, library = versions(), native.library()
    return {
        **{name: found[name] for name in ("sparge", "torch", "transformers")},
        # A new build changes the native core while the versions stay.
        "native": "" if library is None else digest_of(Path(library).read_bytes()),
        "isa": isa_in_use(),
        "backend": os.environ.get(ENV_BACKEND, AUTO),
        "cpu": machine()["cpu"],
        "threads": torch.get_num_threads(),
    }


def measure(tested: TestedModel, directory: RunDirectory) -> None:
    """Measure all cells. If the run stops early, say that its measurements are saved."""
    from ..evaluate.cells import run_cells

    cells = tested.settings.cells()
    try:
        with progress("evaluating", len(cells)) as step:

            def told(cell: Cell, took: float | None) -> None:
                step(f"{cell.key}: {'resumed' if took is None else f'{took:.1f} s'}")

            run_cells(tested, directory, told)
    except BaseException:
        done = sum(cell.key in directory.cells for cell in cells)
        print(
            f"sparge: {done} of {len(cells)} measurements are saved in {directory.path}; the same "
            "command resumes",
            file=sys.stderr,
        )
        raise


def make_document(
    tested: TestedModel, where: dict[str, Any], directory: RunDirectory
) -> dict[str, Any]:
    from ..evaluate.cells import FORMAT, measure_rows

    settings, text = tested.settings, tested.text
    return {
        "format": FORMAT,
        **where,
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "model": tested.fingerprint,
        "text": {"name": text.name, "digest": text.digest, "tokens": len(text.tokens)},
        "settings": settings.to_dict(),
        "took_seconds": sum(directory.cells[cell.key]["took"] for cell in settings.cells()),
        **measure_rows(settings, directory.result),
    }


def show(document: dict[str, Any], files: list[Path]) -> None:
    from ..evaluate.eval_tables import eval_tables

    screen = console()
    model, settings = document["model"], document["settings"]
    screen.print(
        f"sparge {document['versions']['sparge']} eval: {model['name']} ({model['layers']} layers, "
        f"{model['heads']} query and {model['kv_heads']} key heads), {settings['dtype']}, "
        f"text {document['text']['name']}\nrecipe: {settings['profile'] or settings['recipe']}\n"
        f"machine: {machine_text(document)}\n"
    )
    for table in eval_tables(document):
        show_table(screen, table)
        screen.print()
    screen.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
