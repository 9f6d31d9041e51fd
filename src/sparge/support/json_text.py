"""JSON from outside: bounded in size and depth, no duplicate keys."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20


def read_text(path: str | os.PathLike[str], *, limit: int = MOST_BYTES) -> str:
    """The text of a file; OSError if it is not a regular one, ValueError beyond `limit` bytes."""
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with file.open("rb") as opened:
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} must be at most {limit} bytes; it is larger")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from None


def parse_json(text: str, what: str) -> Any:
    """The parsed document. `what` begins the error message, such as "a recipe"."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{what} must be valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} must be valid JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"duplicate keys {twice}")
    return found
