"""`sparge eval`: what a model gains with sparge, and what it costs.

Every measurement of a language model is saved in the run directory at once. Interrupted runs
resume: give the same command again. A diffusers pipeline and other modules of the zoo are judged by
their results, dense and sparse: a document, pictures and a page.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from sparge import Profile
from sparge.backends.cpu import library as native
from sparge.cli import OK
from sparge.cli.arguments import DTYPES, add_json, add_recipe, whole, wholes
from sparge.cli.machine import machine, versions
from sparge.cli.screen import console, deliver, show_table, to_json
from sparge.routing import AUTO, ENV_BACKEND
from sparge.support.atomic_files import replace_file

from .. import zoo
from ..evaluate.cells import FORMAT, measure_rows, run_cells
from ..evaluate.eval_report import draw_figures, eval_tables
from ..evaluate.run_directory import DOCUMENT_FILE, KEY_FILE, RunDirectory, open_run
from ..evaluate.settings import MEASURES, TASKS, Cell, Settings, digest_of
from ..evaluate.tested_model import TestedModel
from ..machine import isa_in_use, machine_text, where_it_runs
from ..measuring import threads
from ..optional_libraries import need_libraries
from ..renders import Pair, Renders, compare_renders, compare_results, difference_map
from ..renders.pictures import shown_frames, to_png
from ..screen import progress
from ..showcase.pictures_page import cost, make_pictures_page, pairs_table, verdict
from .arguments import (
    LANGUAGE,
    OF_RENDERS,
    PIPELINE,
    add_model,
    add_render_options,
    add_text,
    call_of,
    check_directory,
    eval_directory,
    fill_in,
    kind_of,
    open_given,
    prompts_of,
    refuse_options,
    schedule_of,
    words,
)

OF_TEXTS = ("lengths", "measures", "text", "depths", "windows", "tasks", "limit", "repeat", "fresh")
PAGE = "eval.html"
INPUTS = 4  # of a module's task
OURS = re.compile(r"pair-\d+(-frame-\d+)?-(dense|sparge|difference)\.png")


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
        refuse_options(args, OF_TEXTS, kind)
        return run_renders(args, kind)
    refuse_options(args, (*OF_RENDERS, "order", "inputs"), kind)
    settings = settings_of(args)
    path = eval_directory(args.directory, settings.model)
    check_directory(str(path))
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


def run_renders(args: argparse.Namespace, kind: str) -> int:
    path = eval_directory(args.directory, args.model)
    check_place(path)
    libraries = ("skimage", "flip_evaluator", "PIL")
    need_libraries("renders cannot be compared", *libraries, extra="vision")
    profile = None if args.profile is None else Profile.load(args.profile)
    measure = eval_pipeline if kind == PIPELINE else eval_module
    with threads(args.threads) if args.threads else nullcontext():
        where = where_it_runs()
        renders = measure(args, profile)
    document = {
        "format": "sparge.eval.renders/1",
        **where,
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "kind": kind,
        "directory": str(path),
        **{f: x for f, x in renders.to_dict().items() if f != "format"},
    }
    written = ", ".join(map(str, write_renders(path, renders, document)))
    title = f"eval: {renders.model}"
    deliver(document, args, lambda: show_renders(document, title, [renders], f"written: {written}"))
    return OK


def check_place(path: Path) -> None:
    """Raise ValueError if the directory cannot be written, or holds something else."""
    check_directory(str(path))
    there = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if KEY_FILE in there or (there and DOCUMENT_FILE not in there):
        raise ValueError(
            f"--output must name a new directory or one of renders; {str(path)!r} holds {there[0]}"
        )


def eval_pipeline(args: argparse.Namespace, profile: Profile | None) -> Renders:
    refuse_options(args, ("inputs",), PIPELINE)
    prompts, call, seeds = prompts_of(args), call_of(args), args.seeds or 1
    schedule = schedule_of(args, profile)
    with progress("rendering", 2 + 2 * len(prompts) * seeds) as step:
        step("loading the pipeline")
        return compare_renders(
            open_given(args),
            prompts,
            seeds=range(args.seed, args.seed + seeds),
            call=call,
            recipe=args.recipe,
            profile=profile,
            schedule=schedule,
            order=args.order,
            name=Path(args.model).resolve().name,
            done=step,
        )


def eval_module(args: argparse.Namespace, profile: Profile | None) -> Renders:
    refuse_options(args, OF_RENDERS, "a module of the zoo")
    inputs = args.inputs or INPUTS
    with progress("running", 2 + 2 * inputs) as step:
        step("loading the model")
        dtype = DTYPES.get(args.dtype, torch.float32)  # modules of the zoo are small
        return compare_results(
            zoo.load_module(args.model, dtype=dtype),
            inputs=inputs,
            seed=args.seed,
            recipe=args.recipe,
            profile=profile,
            order=args.order,
            done=step,
        )


def write_renders(path: Path, renders: Renders, document: dict[str, Any]) -> list[Path]:
    """The pictures, the page, and at last the document; pictures of an earlier run are removed."""
    path.mkdir(parents=True, exist_ok=True)
    for old in path.iterdir():
        if OURS.fullmatch(old.name):
            old.unlink()
    for i, pair in enumerate(renders.pairs):
        for frame, stem in frame_stems(i, pair):
            dense, sparse = pair.dense[frame], pair.sparse[frame]
            trio = {"dense": dense, "sparge": sparse, "difference": difference_map(dense, sparse)}
            for way, picture in trio.items():
                replace_file(path / f"{stem}-{way}.png", to_png(picture))
    title = f"sparge eval · {renders.model}"
    page = make_pictures_page(title, [renders], command=document["command"], where=document)
    replace_file(path / PAGE, page.encode())
    replace_file(path / DOCUMENT_FILE, f"{to_json(document)}\n".encode())
    return [path / DOCUMENT_FILE, path / PAGE]


def frame_stems(i: int, pair: Pair) -> list[tuple[int, str]]:
    """The frames that are written of a pair, and how their files begin."""
    if pair.dense is None:
        return []
    if len(pair.dense) == 1:
        return [(0, f"pair-{i:02d}")]
    return [(f, f"pair-{i:02d}-frame-{f:03d}") for f in shown_frames(len(pair.dense))]


def show_renders(
    document: dict[str, Any], title: str, sections: Sequence[Renders], written: str
) -> None:
    screen = console()
    version, machine = document["versions"]["sparge"], machine_text(document)
    screen.print(f"sparge {version} {title}\nmachine: {machine}\n", soft_wrap=True)
    for renders in sections:
        show_table(screen, pairs_table(renders))
        screen.print()
    screen.print(f"{verdict(sections)} {cost(sections)}\n{written}", soft_wrap=True)
