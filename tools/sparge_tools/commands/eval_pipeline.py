"""`sparge eval` of a diffusers pipeline or of a plain module of the zoo: its results, dense and
sparse, as a document, pictures and a page."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparge import Profile
from sparge.cli import OK
from sparge.cli.arguments import DTYPES
from sparge.cli.machine import machine_text, where_it_runs
from sparge.cli.screen import console, deliver, progress, show_table, to_json
from sparge.support.atomic_files import replace_file
from sparge.support.turns import threads

from ..optional_libraries import need_libraries
from .arguments import PIPELINE, check_directory, eval_directory, refuse_options
from .pipeline_options import OF_RENDERS, call_of, open_given, prompts_of, schedule_of

if TYPE_CHECKING:
    from ..renders import Pair, Renders

FORMAT = "sparge.eval.renders/1"
DOCUMENT, PAGE = "eval.json", "eval.html"
INPUTS = 4  # of a module's task
OURS = re.compile(r"pair-\d+(-frame-\d+)?-(dense|sparge|difference)\.png")


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
        "format": FORMAT,
        **where,
        "command": shlex.join(["sparge", *sys.argv[1:]]),
        "kind": kind,
        "directory": str(path),
        **{f: x for f, x in renders.to_dict().items() if f != "format"},
    }
    written = write(path, renders, document)
    deliver(document, args, lambda: show(document, renders, written))
    return OK


def check_place(path: Path) -> None:
    """Raise ValueError if the directory cannot be written, or holds something else."""
    check_directory(str(path))
    there = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if "run.json" in there or (there and DOCUMENT not in there):
        raise ValueError(
            f"--output must name a new directory or one of renders; {str(path)!r} holds {there[0]}"
        )


def eval_pipeline(args: argparse.Namespace, profile: Profile | None) -> Renders:
    from ..renders import compare_renders

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
    from .. import zoo
    from ..renders import compare_results

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


def write(path: Path, renders: Renders, document: dict[str, Any]) -> list[Path]:
    """The pictures, the page, and at last the document; pictures of an earlier run are removed."""
    from ..renders import difference_map
    from ..renders.pictures import to_png
    from ..showcase.pictures_page import make_pictures_page

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
    replace_file(path / DOCUMENT, f"{to_json(document)}\n".encode())
    return [path / DOCUMENT, path / PAGE]


def frame_stems(i: int, pair: Pair) -> list[tuple[int, str]]:
    """The frames that are written of a pair, and how their files begin."""
    from ..renders.pictures import shown_frames

    if pair.dense is None:
        return []
    if len(pair.dense) == 1:
        return [(0, f"pair-{i:02d}")]
    return [(f, f"pair-{i:02d}-frame-{f:03d}") for f in shown_frames(len(pair.dense))]


def show(document: dict[str, Any], renders: Renders, files: list[Path]) -> None:
    from ..showcase.pictures_page import cost, pairs_table, verdict

    screen = console()
    screen.print(
        f"sparge {document['versions']['sparge']} eval: {renders.model}\n"
        f"machine: {machine_text(document)}\n",
        soft_wrap=True,
    )
    show_table(screen, pairs_table(renders))
    screen.print(f"\n{verdict([renders])} {cost([renders])}", soft_wrap=True)
    screen.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
