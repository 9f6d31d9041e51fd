"""`sparge eval`: what a language model gains with sparge, and what it costs.

Every measurement is kept in the run directory as soon as it is made; the same command, given
again after an interruption, goes on from there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .. import zoo
from ..backends.cpu import library as native
from ..dispatch import AUTO, ENV
from ..evaluate.settings import (
    ERRORS,
    MEASURES,
    NEEDLE,
    PERPLEXITY,
    PREFILL,
    TASKS,
    Cell,
    Settings,
    digest_of,
)
from ..evaluate.store import DOCUMENT_FILE, RunDirectory, open_run
from ..report.machine import load_average, machine, machine_line, versions
from ..report.race import threads
from ..report.tables import to_json
from ..support.atomic_files import replace_file
from . import OK, add_json, console, deliver, progress, show_table, whole, wholes
from .explain import read_recipe

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DEFAULT_MEASURES = [PREFILL, PERPLEXITY, NEEDLE, ERRORS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|DIR", help="of the zoo, or a directory")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--recipe", metavar="JSON", help="a JSON object, or a file that holds one")
    how.add_argument("--profile", metavar="FILE", help="tuned recipes, one for each layer")
    add("--lengths", type=wholes, default=[2048, 4096, 8192], help="default: 2048,4096,8192")
    add("--measures", type=words, help=f"of {','.join(MEASURES)}; default: all but tasks")
    add("--text", default="essays", metavar="NAME|FILE", help="default: %(default)s, of the zoo")
    add("--depths", type=whole, default=5, help="needles in each length; default: %(default)s")
    add("--windows", type=whole, default=1, help="stretches of text; default: %(default)s")
    add("--tasks", type=words, default=[], metavar="NAME,…", help="of lm-eval; adds the measure")
    add("--limit", type=whole, default=20, help="documents of each task; default: %(default)s")
    add("--repeat", type=whole, help="rounds of prefill; default: by the time that one takes")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bf16 where it is fast")
    add("--threads", type=whole, metavar="N", help="default: all")
    add("--seed", type=int, default=0, help="of the needles; default: %(default)s")
    add("-o", "--output", dest="directory", metavar="DIR", help="default: ./sparge-eval-MODEL")
    add("--fresh", action="store_true", help="forget what the directory holds")
    add_json(parser)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    path = Path(args.directory or f"sparge-eval-{short_name(settings.model)}")
    # Heavy libraries are behind these; a mistake above needs none of them.
    from ..evaluate.pictures import draw
    from ..evaluate.run import run_cells
    from ..evaluate.subject import Subject, check

    with threads(args.threads) if args.threads else nullcontext():
        checked = check(settings)
        where = place()
        directory = open_run(path, {**checked.key(), **numbers_depend_on()}, fresh=args.fresh)
        try:
            with finishing(directory, settings), telling(settings) as told:
                run_cells(Subject(checked, path), directory, told)
            document = document_of(settings, checked, where, directory)
            replace_file(path / DOCUMENT_FILE, f"{to_json(document)}\n".encode())
            pictures = draw(document, path)
        finally:
            directory.close()
    deliver(document, args, lambda: show(document, [path / DOCUMENT_FILE, *pictures]))
    return OK


def settings_of(args: argparse.Namespace) -> Settings:
    asked = args.measures if args.measures is not None else list(DEFAULT_MEASURES)
    if args.tasks and TASKS not in asked:
        asked = [*asked, TASKS] if args.measures is None else asked
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
    """Of the last part of a path, what a file name can hold anywhere."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name) or "model"


def place() -> dict[str, Any]:
    there = native.available()
    return {
        "versions": versions(),
        "machine": machine(),
        "machine_line": machine_line(),
        "isa": native.chosen_isa(there) if there else None,
        "load_average": load_average(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def numbers_depend_on() -> dict[str, Any]:
    """Beside the settings: cells of another build or machine do not belong in one document."""
    found, here = versions(), machine()
    return {
        **{name: found[name] for name in ("sparge", "torch", "transformers")},
        "native": library_digest(),
        "isa": native.chosen_isa(there) if (there := native.available()) else None,
        "backend": os.environ.get(ENV, AUTO),
        "cpu": here["cpu"],
        "threads": torch.get_num_threads(),
    }


def library_digest() -> str:
    """Of the native core, which a new build changes while versions stay; "" without one."""
    path = native.library()
    return "" if path is None else digest_of(Path(path).read_bytes())


@contextmanager
def finishing(directory: RunDirectory, settings: Settings) -> Iterator[None]:
    """Whatever stops the run, say that its cells are safe."""
    try:
        yield
    except BaseException:
        wanted = [cell.key for cell in settings.cells()]
        done = sum(key in directory.cells for key in wanted)
        print(
            f"sparge: {done} of {len(wanted)} measurements are kept in {directory.path}; the same "
            "command goes on from there",
            file=sys.stderr,
        )
        raise


@contextmanager
def telling(settings: Settings) -> Iterator[Callable[[Cell, float | None], None]]:
    """A bar on a terminal; elsewhere a line for every cell, because a run takes minutes."""
    cells = settings.cells()
    done = 0
    with progress("evaluating", len(cells)) as step:

        def told(cell: Cell, took: float | None) -> None:
            nonlocal done
            done += 1
            step()
            if not sys.stderr.isatty():
                how = "kept from before" if took is None else f"{took:.1f} s"
                print(f"sparge: {done} of {len(cells)}: {cell}: {how}", file=sys.stderr, flush=True)

        yield told


def document_of(
    settings: Settings, checked: Any, where: dict[str, Any], directory: RunDirectory
) -> dict[str, Any]:
    from ..evaluate.document import Evaluation, rows_of

    text = checked.text
    took = sum(
        entry["took"]
        for cell in settings.cells()
        if (entry := directory.cells.get(cell.key)) is not None
    )
    return Evaluation(
        command=shlex.join(["sparge", *sys.argv[1:]]),
        where=where,
        model=checked.fingerprint,
        text={"name": text.name, "digest": text.digest, "tokens": len(text.tokens)},
        settings=settings.to_dict(),
        took_seconds=took,
        **rows_of(settings, directory.result),
    ).to_dict()


def show(document: dict[str, Any], files: list[Path]) -> None:
    from ..evaluate.tables import tables_of

    screen = console()
    model, text = document["model"], document["text"]
    how = document["settings"]["profile"] or document["settings"]["recipe"]
    screen.print(
        f"sparge {document['versions']['sparge']} eval: {model['name']} ({model['layers']} layers, "
        f"{model['heads']} query and {model['kv_heads']} key heads), "
        f"{document['settings']['dtype']}, text {text['name']}\n"
        f"recipe: {how}\nmachine: {document['machine_line']}, "
        f"our instruction set: {document['isa'] or 'none'}\n"
    )
    for table in tables_of(document):
        show_table(screen, table)
        screen.print()
    screen.print(f"kept: {', '.join(map(str, files))}", soft_wrap=True)
