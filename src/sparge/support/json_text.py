"""JSON from files and people: bounded reads, no duplicate keys, fields checked by name."""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
MAX_DEPTH = 64
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
_REQUIRED = object()


def read_json_text(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> str:
    """The text of a file; OSError if it is not a regular one, ValueError beyond `limit` bytes."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # before open(), which waits for a pipe
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    with Path(path).open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{os.fspath(path)} must be at most {limit} bytes; it is larger")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} must be UTF-8 text: {error}") from None


def parse_json(text: str, what: str) -> Any:
    """The parsed document. `what` begins the error message, such as "a recipe"."""
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates)
        _check_depth(data)
    except RecursionError:
        raise ValueError(f"{what} must be valid JSON: {_TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"{what} must be valid JSON: {error}") from None
    return data


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(MAX_DEPTH):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [x for each in nested for x in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {short(twice)} stands twice in one object")
    return data


def short(data: Any) -> str:
    """`repr` of at most a line, safe for values of any size and depth."""
    text = reprlib.repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Fields:
    """One JSON object whose fields are read by name; every mistake is a ValueError with its place.

    where: the object's place in the file, "" for the whole. names: the fields that may be there.
    """

    def __init__(self, data: Any, where: str, names: tuple[str, ...], *, what: str) -> None:
        self.where, self.what = where, where or what
        if not isinstance(data, Mapping):
            raise ValueError(f"{self.what} must be a JSON object, got {short(data)}")
        unknown = [name for name in data if name not in names]
        if unknown:
            known = ", ".join(names)
            raise ValueError(
                f"{self.what} has an unknown field {short(unknown[0])}; known: {known}"
            )
        self.data = data

    def place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str, kind: type = object, default: Any = _REQUIRED) -> Any:
        """A field of some type; a field without a default must be there."""
        value = self.data.get(name, default)
        if value is _REQUIRED:
            raise ValueError(f"{self.what} has no {name}")
        if not isinstance(value, kind):
            words: dict[type, str] = {dict: "a JSON object", list: "a list", str: "a string"}
            raise ValueError(f"{self.place(name)} must be {words[kind]}, got {short(value)}")
        return value

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        *,
        above: float = -math.inf,
        least: float = -math.inf,
        most: float = math.inf,
        null: bool = False,
        whole: bool = False,
    ) -> Any:
        """A finite number in a range; `null` allows null, `whole` only integers."""
        value = self.get(name, default=default)
        if value is None and null:
            return None
        kinds: Any = int if whole else int | float
        needed = ("a whole number" if whole else "a number") + (" or null" if null else "")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{self.place(name)} must be {needed}, got {short(value)}")
        for fits, words in (
            (abs(value) <= sys.float_info.max, "finite"),  # NaN too; an int of any size compares
            (value > above, f"greater than {above:g}"),
            (value >= least, f"at least {least:g}"),
            (value <= most, f"at most {most:g}"),
        ):
            if not fits:
                raise ValueError(f"{self.place(name)} must be {words}, got {short(value)}")
        return value
