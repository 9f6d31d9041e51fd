"""`sparge eval`: what a language model gains with sparge, and what it costs.

Every measurement is saved in the run directory at once. Interrupted runs resume: give the same
command again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from contextlib import closing, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import zoo
from ..backends.cpu import library as native
from ..dispatch import AUTO, ENV_BACKEND
from ..evaluate.run_directory import DOCUMENT_FILE, RunDirectory, open_run
from ..evaluate.settings import MEASURES, TASKS, Cell, Settings, digest_of
from ..report.machine import isa_in_use, machine, machine_text, versions, where_it_runs
from ..report.table import to_json
from ..support.atomic_files import replace_file
from ..support.turns import threads
from . import OK
from .arguments import (
    DTYPES,
    add_json,
    add_model,
    add_recipe,
    add_text,
    check_directory,
    whole,
    wholes,
    words,
)
from .screen import console, deliver, progress, show_table

if TYPE_CHECKING:
    from ..evaluate.tested_model import TestedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, required=True)
    how = parser.add_mutually_exclusive_group()
    add_recipe(how)
    how.add_argument("--profile", metavar="FILE", help="tuned recipes, one for each layer")
    lengths = "tokens; default: 2048,4096,8192"
    add("--lengths", type=wholes, default=Settings.lengths, help=lengths)
    add("--measures", type=words, help=f"of {','.join(MEASURES)}; default: all but tasks")
    add_text(parser, default="essays")
    add("--depths", type=whole, default=5, help="needles per length; default: %(default)s")
    add("--windows", type=whole, default=1, help="text windows per length; default: %(default)s")
    add("--tasks", type=words, default=[], metavar="NAME,…", help="lm-eval tasks to run as well")
    add("--limit", type=whole, default=20, help="documents per task; default: %(default)s")
    add("--repeat", type=whole, help="rounds of prefill; default: depending on their duration")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bf16 where it is fast")
    add("--threads", type=whole, metavar="N", help="default: all")
    add("--seed", type=int, default=0, help="of the needles; default: %(default)s")
    add("-o", "--output", dest="directory", metavar="DIR", help="default: ./sparge-eval-MODEL")
    add("--fresh", action="store_true", help="discard what the directory holds")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    # The last part of a path, as a portable file name.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(settings.model).resolve().name) or "model"
    path = Path(args.directory or f"sparge-eval-{name}")
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
