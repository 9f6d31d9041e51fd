"""A diffusers pipeline from the directory that `save_pretrained` wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from ..optional_libraries import need_libraries
from ..zoo import no_progress_bars

INDEX = "model_index.json"


def is_pipeline(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a diffusers pipeline. diffusers is not imported."""
    return (Path(path) / INDEX).is_file()


def open_pipeline(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    offload: bool = False,
    tiling: bool = False,
) -> Any:
    """The pipeline of a directory, on the accelerator if there is one.

    offload: keep parts on the CPU while they are not needed; for GPUs that do not hold them all.
    tiling: decode in tiles, which takes less memory; Allegro always needs it.
    Raises ValueError for a directory that diffusers cannot load, Unsupported without diffusers.
    """
    need_libraries(f"{os.fspath(path)} cannot be loaded", "diffusers", extra="vision")
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    device = torch.accelerator.current_accelerator(check_available=True)
    if offload and device is None:
        raise ValueError("offload moves parts between GPU and CPU, and there is no GPU here")
    try:
        with no_progress_bars(logging):
            pipe = DiffusionPipeline.from_pretrained(
                os.fspath(path), dtype=dtype, local_files_only=True
            )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        kind = class_name(path)
        raise ValueError(f"{os.fspath(path)!r} cannot be loaded as a {kind}: {error}") from error
    if tiling:
        if not hasattr(getattr(pipe, "vae", None), "enable_tiling"):
            raise ValueError(f"tiling must be left out: {type(pipe).__name__} cannot tile its VAE")
        pipe.vae.enable_tiling()
    if offload:
        pipe.enable_model_cpu_offload()
    elif device is not None:
        pipe.to(device)
    return pipe


def class_name(path: str | os.PathLike[str]) -> str:
    """The class of a pipeline, as its directory names it."""
    try:
        index = json.loads((Path(path) / INDEX).read_text(encoding="utf-8"))
        return str(index["_class_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return "diffusers pipeline"
