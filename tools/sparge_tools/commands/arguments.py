"""Arguments that several commands share: how they are read, and checked before any work. Among them
how a diffusers pipeline runs: prompts, seeds, sizes, schedule."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from sparge import KeepError, Profile, Schedule
from sparge.cli.arguments import DTYPES, read_json, whole
from sparge.models.adapters import find_adapter
from sparge.reorder import check_order
from sparge.support.json_text import parse_json, short

from .. import zoo
from ..renders.open_pipeline import is_pipeline, open_pipeline
from ..zoo.kinds import CONFIG, KINDS

MODEL = "smollm2-135m-instruct"
LANGUAGE, PIPELINE, MODULE = "a language model", "a diffusers pipeline", "a module of the zoo"
OF_CALLS = ("prompt", "prompts", "seeds", "steps", "height", "width", "frames", "call")
OF_RENDERS = (*OF_CALLS, "offload", "tiling", "schedule", "dense_first")
"""Options that only a pipeline has a use for."""
_NAMES = {
    "steps": "num_inference_steps",
    "height": "height",
    "width": "width",
    "frames": "num_frames",
}


def words(text: str) -> list[str]:
    """Words, such as prefill,needle."""
    return [word.strip() for word in text.split(",") if word.strip()]


def schedule(text: str) -> Schedule:
    """A JSON object, or a file that holds one."""
    return read_json(text, Schedule.from_json)


def budgets(text: str) -> tuple[float, ...]:
    """Error budgets, such as 0.01,0.05."""
    try:
        return tuple(KeepError(float(part)).max_error for part in text.split(","))  # type: ignore[misc]
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def order(text: str) -> str:
    """The name of an order of tokens."""
    try:
        return check_order(text)
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = parse_json(text, "it")
    except ValueError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {short(found)}")
    return found


def kind_of(model: str) -> str:
    """What kind of model a name or directory is of; a language model where nothing else is seen."""
    if model in zoo.MODELS:
        return LANGUAGE if KINDS[zoo.MODELS[model].kind].build is None else MODULE
    if is_pipeline(model):
        return PIPELINE
    try:
        facts = json.loads((Path(model) / CONFIG).read_text(encoding="utf-8"))
        return MODULE if facts.get("kind") in KINDS else LANGUAGE
    except (OSError, ValueError, AttributeError):
        return LANGUAGE


def load_model(name_or_path: str) -> nn.Module:
    """The module that a profile is for: a language model, or the denoisers of a pipeline."""
    if not is_pipeline(name_or_path):
        model: nn.Module = zoo.load(name_or_path)[0]
        return model
    pipe = open_pipeline(name_or_path, dtype=zoo.best_dtype())
    return find_adapter(pipe)[1].model


def given_options(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of some options that were given, as they are typed."""
    values = {name: getattr(args, name) for name in names}
    given = [name for name, x in values.items() if x is not None and x is not False]  # 0 is given
    return [f"--{name.replace('_', '-')}" for name in given]


def refuse_options(args: argparse.Namespace, names: Iterable[str], kind: str) -> None:
    """Raise ValueError if an option was given that says nothing to this kind of model."""
    for option in given_options(args, names):
        raise ValueError(f"{option} is not for {kind}, which {args.model} is; leave it out")


def eval_directory(given: str | None, model: str) -> Path:
    """Where `sparge eval` writes: as given, or named by the last part of the model's path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name) or "model"
    return Path(given or f"sparge-eval-{name}")


def add_model(parser: argparse.ArgumentParser, more: str = "", **options: Any) -> None:
    about = "a model of the zoo, or a directory that transformers or diffusers can load"
    more = "; default: %(default)s" if "default" in options else more
    parser.add_argument("--model", metavar="NAME|DIR", help=f"{about}{more}", **options)


def add_text(parser: Any, more: str = "", **options: Any) -> None:
    about = f"a text of the zoo, or a file{more}; default: essays"
    parser.add_argument("--text", metavar="NAME|FILE", help=about, **options)


def check_file(path: str | None, option: str = "--output") -> None:
    """Raise ValueError if a file could not be written at `path`; nothing is made. None: no file."""
    if path is None:
        return
    try:
        target = Path(path)
        if not target.name or (target.exists() and not target.is_file()):
            # A device would be replaced by a file, not written to.
            raise ValueError(f"{option} must name a file to make or replace, got {path!r}")
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be written: {error.strerror}") from None


def check_directory(path: str, option: str = "--output") -> None:
    """Raise ValueError if files could not be written in a directory `path`. Nothing is made."""
    try:
        there = next(place for place in (Path(path), *Path(path).parents) if place.exists())
        if not there.is_dir():
            raise ValueError(f"{option} must name a directory, got {path!r}: {there} is a file")
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be written: {error.strerror}") from None


def add_render_options(parser: argparse.ArgumentParser, seeds: str = "default: 1") -> None:
    group = parser.add_argument_group("of diffusers pipelines")
    add = group.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be repeated")
    add("--prompts", metavar="FILE", help="a file with a prompt in each line")
    add("--seeds", type=whole, metavar="N", help=f"renders of each prompt; {seeds}")
    add("--steps", type=whole, metavar="N", help="of the sampler; default: the pipeline's")
    add("--height", type=whole, metavar="PIXELS", help="default: the pipeline's")
    add("--width", type=whole, metavar="PIXELS", help="default: the pipeline's")
    add("--frames", type=whole, metavar="N", help="of a video; default: the pipeline's")
    about = "more arguments of the pipeline, such as '{\"guidance_scale\": 3.5}'"
    add("--call", type=json_object, metavar="JSON", help=about)
    add("--offload", action="store_true", help="keep idle parts of the pipeline off the GPU")
    add("--tiling", action="store_true", help="decode in tiles, which takes less memory")
    how = group.add_mutually_exclusive_group()
    about = "where in a run attention is sparse: a JSON object, or a file that holds one"
    how.add_argument("--schedule", type=schedule, metavar="JSON", help=about)
    about = "share of the run, from pure noise on, that stays dense; default: 0.2"
    how.add_argument("--dense-first", type=float, metavar="SHARE", help=about)
    about = "of visual tokens in attention: hilbert (the default), row, tiles:4x4x4 and others"
    parser.add_argument("--order", type=order, metavar="NAME", help=about)


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts given, at least one."""
    found = list(args.prompt or [])
    if args.prompts is not None:
        try:
            lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts {args.prompts!r} cannot be read: {error}") from None
        found += [line.strip() for line in lines if line.strip()]
    if not found:
        raise ValueError("a prompt is needed: --prompt TEXT, or --prompts FILE with one in a line")
    return found


def call_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of every call of the pipeline."""
    call = dict(args.call or {})
    for option, name in _NAMES.items():
        if (value := getattr(args, option)) is None:
            continue
        if name in call:
            raise ValueError(f"--{option} and {name} in --call say the same; give one of them")
        call[name] = value
    return call


def schedule_of(args: argparse.Namespace, profile: Profile | None = None) -> Schedule | None:
    """As given, or as the profile was tuned with; None is the default of `accelerate`."""
    if args.schedule is not None:
        given: Schedule = args.schedule
        return given
    if args.dense_first is not None:
        return Schedule(dense_first=args.dense_first)
    return None if profile is None else profile.schedule


def open_given(args: argparse.Namespace) -> Any:
    """The pipeline of --model."""
    dtype = DTYPES.get(args.dtype) or zoo.best_dtype()
    return open_pipeline(args.model, dtype=dtype, offload=args.offload, tiling=args.tiling)


def fill_in(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Set options that were not given; until then None tells that."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
