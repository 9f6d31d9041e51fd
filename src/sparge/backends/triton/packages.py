"""Triton as it is installed: one import package, which platforms distribute under several names."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata, util

import torch

NAMES = (
    "triton",
    "triton-windows",
    "triton-rocm",
    "triton-xpu",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
)
OLDEST = (3, 6)
"""What torch 2.10 requires, the oldest torch that sparge takes."""


@dataclass(frozen=True)
class Installation:
    """importable: there is a package `triton`. found: version by name of distribution. system: as
    `platform.system()` names it. built_for: of torch, "cuda", "hip", "xpu" or "". required: what
    torch requires of Triton, such as `triton==3.7.1`, or "".
    """

    importable: bool
    found: dict[str, str]
    system: str
    built_for: str
    required: str

    @property
    def version(self) -> str | None:
        """None where no distribution of a known name is installed."""
        return next(iter(self.found.values()), None)


def installation() -> Installation:
    """That of this process; Triton is not imported."""
    found = {}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    importable = util.find_spec("triton") is not None
    return Installation(importable, found, platform.system(), built_for(), _required_by_torch())


def built_for() -> str:
    """The platform of torch's build; "" if it is for CPUs."""
    for name in ("hip", "xpu", "cuda"):
        if getattr(torch.version, name, None):
            return name
    return ""


def _required_by_torch() -> str:
    try:
        lines = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:  # built in place
        return ""
    for line in lines:
        need, _, marker = line.partition(";")
        if re.match(r"(pytorch-)?triton\b", need) and "extra ==" not in marker:
            return re.sub(r"[\s()]", "", need)
    return ""


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version of Triton; none if it is not known."""
    return tuple(int(x) for x in version.split(".")[:2] if x.isdigit())


def why_unusable(there: Installation) -> str | None:
    """Why Triton cannot be used, and the way out; None if it can."""
    if not there.importable:
        return f"triton is not installed; {way_to_install(there)}"
    version = there.version or ""
    numbers = numbers_of(version)
    if numbers and numbers < OLDEST:
        needed = ".".join(map(str, OLDEST))
        name = next(iter(there.found))
        return f"{name} {version} is too old; {needed} or newer is needed: {way_to_install(there)}"
    return None


def way_to_install(there: Installation) -> str:
    if there.system == "Windows":
        return "install it with: pip install 'triton-windows>=3.6'"
    if there.built_for in ("hip", "xpu"):
        name = {"hip": "ROCm", "xpu": "XPU"}[there.built_for]
        what = there.required or f"triton-{'rocm' if there.built_for == 'hip' else 'xpu'}"
        return f"torch's build for {name} brings {what}; install torch again from its index"
    if there.required:
        return f"torch requires {there.required}: pip install '{there.required}'"
    return "it comes with torch's builds for GPUs"


def clash(there: Installation) -> str | None:
    """Distributions that overwrite each other, and the way out; None if there is one at most."""
    if len(there.found) < 2:
        return None
    names = " and ".join(f"{name} {version}" for name, version in there.found.items())
    return (
        f"{names} are installed, whose files are the same: uninstall all of them, then "
        f"{way_to_install(there)}"
    )


def triton_version() -> str | None:
    """Of the installed package, under any of its names."""
    return installation().version
