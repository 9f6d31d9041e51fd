"""Arguments that several commands share: how they are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..values.recipe import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RECIPE_BYTES = 1 << 20  # largest recipe file that is read
Value = TypeVar("Value")


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


def recipe(text: str) -> Recipe:
    """A JSON object, or a file that holds one."""
    return read_json(text, Recipe.from_json)


def read_json(text: str, from_json: Callable[[str], Value]) -> Value:
    """A value of its JSON object, or of a file that holds one."""
    try:
        return from_json(text if text.lstrip().startswith("{") else _read_small(text))
    except (ValueError, TypeError) as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def _read_small(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(RECIPE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"must be a JSON object or a file that holds one; {path!r} does not begin with {{ and "
            f"cannot be read: {error.strerror}"
        ) from None
    if len(text) > RECIPE_BYTES:
        raise ValueError(f"must be a file of at most {RECIPE_BYTES} bytes; {path!r} is longer")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, no text")


def add_recipe(parser: Any, **options: Any) -> None:
    about = {"metavar": "JSON", "help": "a JSON object, or a file that holds one", **options}
    parser.add_argument("--recipe", type=recipe, **about)
