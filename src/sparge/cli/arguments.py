"""Arguments that several commands share: how they are read, and checked before any work."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..recipe import Recipe

MODEL = "smollm2-135m-instruct"
MODEL_HELP = "a model of the zoo, or a directory that transformers can load"
RECIPE_HELP = "a JSON object, or a file that holds one"
TEXT_HELP = "a text of the zoo, or a file"
RECIPE_BYTES = 1 << 20  # largest recipe file that is read


def whole(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def wholes(text: str) -> list[int]:
    """Whole numbers, such as 1024,2048."""
    return [whole(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    """Words, such as prefill,needle."""
    return [word.strip() for word in text.split(",") if word.strip()]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, no text")


def check_file(path: str, option: str = "--output") -> None:
    """Raise ValueError if a file could not be written at `path`. Nothing is made."""
    target = Path(path)
    with _refusing(path, option):
        if not target.name or (target.exists() and not target.is_file()):
            # A device would be replaced by a file, not written to.
            raise ValueError(f"{option} must name a file to make or replace, got {path!r}")
        _try_to_write(target.parent)


def check_directory(path: str, option: str = "--output") -> None:
    """Raise ValueError if files could not be written in a directory `path`. Nothing is made."""
    target = Path(path)
    with _refusing(path, option):
        there = next(place for place in (target, *target.parents) if place.exists())
        if not there.is_dir():
            raise ValueError(f"{option} must name a directory, got {path!r}: {there} is a file")
        _try_to_write(there)


def _try_to_write(directory: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".sparge."):
        pass


@contextmanager
def _refusing(path: str, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be written: {error.strerror}") from None


def read_recipe(text: str) -> Recipe:
    """The argument --recipe."""
    try:
        if not text.lstrip().startswith("{"):
            text = _read_small(text)
        return Recipe.from_json(text)
    except TypeError as mistake:  # a value of a wrong type
        raise ValueError(f"--recipe: {mistake}") from None


def _read_small(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(RECIPE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"--recipe must be a JSON object or a file that holds one; {path!r} does not begin "
            f"with {{ and cannot be read: {error.strerror}"
        ) from None
    if len(text) > RECIPE_BYTES:
        raise ValueError(
            f"--recipe must be a file of at most {RECIPE_BYTES} bytes; {path!r} is longer"
        )
    return text
