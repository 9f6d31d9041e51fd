"""What was measured on this machine, in the user's cache directory.

No call ever fails because of a file here: one that cannot be read counts as none, one that cannot
be written is kept in memory, and `sparge doctor` says what was the matter.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ..support.atomic_files import replace_file
from ..support.cache_directory import cache_directory
from ..support.json_text import parse_json, read_json_text
from ..values.backend import UnitCosts, cost_names
from .crossover import Crossover

FILE_FORMAT = "sparge.crossover/2"


def path_of(key: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:12]
    return cache_directory() / f"crossover-{digest}.json"


def read(key: Mapping[str, str], *, complete: bool = True) -> tuple[Crossover | None, str]:
    """The measurement of a key and "", or None and why there is none. complete: whether one that
    lacks some dtypes or precisions counts as damaged."""
    try:
        path = path_of(key)
        return _parse(read_json_text(path), key, complete), ""
    except FileNotFoundError:
        return None, "nothing was measured yet"
    except (OSError, RuntimeError) as error:  # pathlib raises the latter without a home
        return None, f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return None, f"it is damaged and will be measured again: {error}"


def write(crossover: Crossover) -> str:
    """ "" once it is in its file, or why it is not."""
    try:
        path = path_of(crossover.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{json.dumps(to_dict(crossover), indent=1)}\n".encode())
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        return f"it cannot be written and is kept in memory: {why}"
    return ""


def to_dict(crossover: Crossover) -> dict[str, object]:
    return {
        "format": FILE_FORMAT,
        "key": dict(crossover.key),
        **{name: getattr(crossover, name) for name in ("date", "took", "noise", "busy")},
        "costs": {name: asdict(cost) for name, cost in crossover.costs.items()},
    }


def _parse(text: str, key: Mapping[str, str], complete: bool) -> Crossover:
    data = parse_json(text, "it")
    if data["format"] != FILE_FORMAT:
        raise ValueError(f"its format is {data['format']!r}, needed is {FILE_FORMAT!r}")
    if data["key"] != dict(key):
        raise ValueError("it was measured for another key")
    given = data["costs"]
    costs = {name: UnitCosts(**given[name]) for name in cost_names() if complete or name in given}
    for name, cost in costs.items():
        for number in (cost.call, cost.token, cost.element):
            if isinstance(number, bool) or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be seconds, got {number!r}")
    took, noise, busy = (float(data[name]) for name in ("took", "noise", "busy"))
    return Crossover(costs, dict(key), str(data["date"]), took, noise, busy, measured=True)
