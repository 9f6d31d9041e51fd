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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .. import zoo
from ..backends.cpu import library as native
from ..dispatch import AUTO, ENV
from ..evaluate.run_directory import DOCUMENT_FILE, RunDirectory, open_run
from ..evaluate.settings import (
    DEFAULT_LENGTHS,
    DEFAULT_MEASURES,
    MEASURES,
    TASKS,
    Cell,
    Settings,
    digest_of,
)
from ..report.machine import isa_in_use, load_text, machine, versions, where_it_runs
from ..report.table import to_json
from ..support.atomic_files import replace_file
from ..support.turns import threads
from . import OK
from .arguments import (
    MODEL_HELP,
    RECIPE_HELP,
    TEXT_HELP,
    add_json,
    check_directory,
    read_recipe,
    whole,
    wholes,
    words,
)
from .screen import console, deliver, progress, show_table

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|DIR", help=MODEL_HELP)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--recipe", metavar="JSON", help=RECIPE_HELP)
    how.add_argument("--profile", metavar="FILE", help="tuned recipes, one for each layer")
    lengths = ",".join(map(str, DEFAULT_LENGTHS))
    add("--lengths", type=wholes, default=[*DEFAULT_LENGTHS], help=f"tokens; default: {lengths}")
    add("--measures", type=words, help=f"of {','.join(MEASURES)}; default: all but tasks")
    add("--text", default="essays", metavar="NAME|FILE", help=f"{TEXT_HELP}; default: %(default)s")
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
    path = Path(args.directory or f"sparge-eval-{short_name(settings.model)}")
    check_directory(str(path))
    # These import heavy libraries; the checks above need none of them.
    from ..evaluate.eval_figures import draw
    from ..evaluate.measure_cells import run_cells
    from ..evaluate.tested_model import TestedModel, check

    with threads(args.threads) if args.threads else nullcontext():
        checked = check(settings)
        where = where_it_runs()
        directory = open_run(path, {**checked.key(), **numbers_depend_on()}, fresh=args.fresh)
        cells = settings.cells()
        try:
            with tell_what_is_kept(directory, cells), progress("evaluating", len(cells)) as step:

                def told(cell: Cell, took: float | None) -> None:
                    step(f"{cell}: {'resumed' if took is None else f'{took:.1f} s'}")

                run_cells(TestedModel(checked, path), directory, told)
            document = make_document(settings, checked, where, directory)
            replace_file(path / DOCUMENT_FILE, f"{to_json(document)}\n".encode())
            figures = draw(document, path)
        finally:
            directory.close()
    deliver(document, args, lambda: show(document, [path / DOCUMENT_FILE, *figures]))
    return OK


def settings_of(args: argparse.Namespace) -> Settings:
    asked = args.measures
    if asked is None:
        asked = [*DEFAULT_MEASURES, TASKS] if args.tasks else DEFAULT_MEASURES
    return Settings(
        model=args.model,
        recipe=None if args.recipe is None else read_recipe(args.recipe),
        profile=args.profile,
        lengths=tuple(args.lengths),
        measures=tuple(asked),
        text=args.text,
        depths=args.depths,
        windows=args.windows,
        tasks=tuple(args.tasks),
        limit=args.limit,
        repeat=args.repeat,
        dtype=DTYPES.get(args.dtype) or str(zoo.best_dtype()).removeprefix("torch."),
        seed=args.seed,
    )


def short_name(model: str) -> str:
    """The last part of a path, as a portable file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name) or "model"


def numbers_depend_on() -> dict[str, Any]:
    """Build and machine: cells of another build or machine do not belong in one document."""
    found, library = versions(), native.library()
    return {
        **{name: found[name] for name in ("sparge", "torch", "transformers")},
        # A new build changes the native core while the versions stay.
        "native": "" if library is None else digest_of(Path(library).read_bytes()),
        "isa": isa_in_use(),
        "backend": os.environ.get(ENV, AUTO),
        "cpu": machine()["cpu"],
        "threads": torch.get_num_threads(),
    }


@contextmanager
def tell_what_is_kept(directory: RunDirectory, cells: list[Cell]) -> Iterator[None]:
    """If the run stops early, say that its measurements are saved."""
    try:
        yield
    except BaseException:
        done = sum(cell.key in directory.cells for cell in cells)
        print(
            f"sparge: {done} of {len(cells)} measurements are saved in {directory.path}; the same "
            "command resumes",
            file=sys.stderr,
        )
        raise


def make_document(
    settings: Settings, checked: Any, where: dict[str, Any], directory: RunDirectory
) -> dict[str, Any]:
    from ..evaluate.document import FORMAT, measure_rows

    text = checked.text
    entries = [directory.cells.get(cell.key) for cell in settings.cells()]
    return {
        "format": FORMAT,
        **where,
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "model": checked.fingerprint,
        "text": {"name": text.name, "digest": text.digest, "tokens": len(text.tokens)},
        "settings": settings.to_dict(),
        "took_seconds": sum(entry["took"] for entry in entries if entry is not None),
        **measure_rows(settings, directory.result),
    }


def show(document: dict[str, Any], files: list[Path]) -> None:
    from ..evaluate.eval_tables import eval_tables

    screen = console()
    model, text = document["model"], document["text"]
    how = document["settings"]["profile"] or document["settings"]["recipe"]
    screen.print(
        f"sparge {document['versions']['sparge']} eval: {model['name']} ({model['layers']} layers, "
        f"{model['heads']} query and {model['kv_heads']} key heads), "
        f"{document['settings']['dtype']}, text {text['name']}\n"
        f"recipe: {how}\nmachine: {document['machine_line']}, "
        f"sparge's instruction set: {document['isa'] or 'none'}, "
        f"load average at the start: {load_text(document)}\n"
    )
    for table in eval_tables(document):
        show_table(screen, table)
        screen.print()
    screen.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
