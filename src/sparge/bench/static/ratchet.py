"""The file of instruction counts that must not grow: each entry says why it is what it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...report.table import to_json
from ...support.atomic_files import replace_file
from ...support.json_text import Fields, parse_json, read_json_text

FORMAT = "sparge.bench.static.ratchet/1"
RATCHET = Path(__file__).with_name("ratchet.json")
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
    document = {
        "format": FORMAT,
        "entries": {
            name: {"numbers": dict(entries[name].numbers), "reason": entries[name].reason}
            for name in sorted(entries)
        },
    }
    replace_file(path, f"{to_json(document)}\n".encode())
    return changed
