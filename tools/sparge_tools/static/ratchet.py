"""Instruction counts that must not grow, a file for each version of Triton: they compile the same
kernel to different code. Each entry says why it is what it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparge.support.atomic_files import replace_file
from sparge.support.json_text import Fields, parse_json, read_json_text

FORMAT = "sparge.bench.static.ratchet/1"
FITS_TORCH = "3.7.1"
"""The Triton that the pinned torch asks for; the suite compiles with it."""
VERSIONS = ("3.6.0", FITS_TORCH, "3.8.0", "3.9.0")
"""What users have, by their torch, and the next one."""


def ratchet_of(version: str) -> Path:
    return Path(__file__).with_name("ratchet") / f"{version}.json"


RATCHET = ratchet_of(FITS_TORCH)
LEAST_REASON = 8


@dataclass(frozen=True)
class Entry:
    """numbers: by loop, or of the whole kernel. reason: of the last change."""

    numbers: Mapping[str, int]
    reason: str


def read_ratchet(path: str | os.PathLike[str] = RATCHET) -> dict[str, Entry]:
    """Entries by `kernel variant on target`; none if there is no file yet."""
    if not Path(path).exists():
        return {}
    whole = Fields(
        parse_json(read_json_text(path), "the ratchet"),
        "",
        ("format", "entries"),
        what="the ratchet",
    )
    if whole.get("format") != FORMAT:
        raise ValueError(f"the ratchet's format must be {FORMAT!r}, got {whole.get('format')!r}")
    entries = {}
    for name, data in whole.get("entries", dict).items():
        one = Fields(data, name, ("numbers", "reason"), what="an entry of the ratchet")
        numbers = Fields(one.get("numbers"), name, tuple(one.get("numbers", dict)), what=name)
        counts = {key: numbers.number(key, least=0, whole=True) for key in numbers.data}
        entries[name] = Entry(counts, one.get("reason", str))
    return entries


def update_ratchet(
    found: Mapping[str, Mapping[str, int]],
    reason: str,
    path: str | os.PathLike[str] = RATCHET,
) -> list[str]:
    """Record these numbers; the names of entries that changed. Others stay, with their reasons."""
    if len(reason.strip()) < LEAST_REASON:
        raise ValueError(
            f"--update-ratchet must say why the numbers change, in at least {LEAST_REASON} "
            f"characters; got {reason!r}"
        )
    entries = read_ratchet(path)
    changed = [
        name
        for name, numbers in found.items()
        if name not in entries or dict(entries[name].numbers) != dict(numbers)
    ]
    entries |= {name: Entry(dict(found[name]), reason.strip()) for name in changed}
    replace_file(path, _text(entries).encode())
    return changed


def _text(entries: Mapping[str, Entry]) -> str:
    """JSON with a line for each entry, so that a change of one is a change of one line."""
    lines = [
        f"    {json.dumps(name)}: {json.dumps({'numbers': dict(x.numbers), 'reason': x.reason})}"
        for name, x in sorted(entries.items())
    ]
    body = ",\n".join(lines)
    return f'{{\n  "format": "{FORMAT}",\n  "entries": {{\n{body}\n  }}\n}}\n'
