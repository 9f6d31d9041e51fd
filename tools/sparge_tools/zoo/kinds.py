"""The kinds of models: how the files of a package become a directory, and that a model.

A directory holds config.json and model.safetensors. Language models are written and loaded by
transformers; the others are plain modules of this package, whose config.json names their kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .vision.sam2 import Sam2, Sam2Config
from .vision.task import Grid, PointToMask, Task, TerrainTask, ZooModule
from .vision.terrain import Terrain, TerrainConfig
from .vision.weights import convert_sam2, convert_terrain

CONFIG, WEIGHTS = "config.json", "model.safetensors"


Parts = tuple[nn.Module, Callable[[int], Grid | None], Task]
"""A module without its weights, and what `ZooModule` adds to it: its grids and its task."""


@dataclass(frozen=True)
class Kind:
    """libraries: which `convert` needs. build: None for language models."""

    libraries: tuple[str, ...]
    convert: Callable[[Sequence[Path], Path], None]
    build: Callable[[Mapping[str, Any]], Parts] | None = None


def load_directory(directory: Path, *, dtype: torch.dtype) -> ZooModule:
    """The model of a directory, in eval mode.

    Raises ValueError if the directory is not one of a plain module.
    """
    from safetensors.torch import load_file

    try:
        facts = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        kind = KINDS[facts["kind"]]
        sizes = facts["sizes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(directory)!r} is no directory of zoo.fetch for a plain module: its {CONFIG} "
            f"names no kind of it ({error}); language models are loaded by zoo.load"
        ) from error
    assert kind.build is not None
    model, grids, task = kind.build(sizes)
    model.load_state_dict(load_file(directory / WEIGHTS))
    return ZooModule(directory.name, model.eval().to(dtype), grids, task)


def square_grid(tokens: int) -> Grid | None:
    """One frame with as many rows as columns, or None."""
    side = round(tokens**0.5)
    return (1, side, side) if side * side == tokens else None


def _convert_language_model(files: Sequence[Path], target: Path) -> None:
    """Float32, which holds every 4-bit value exactly; bfloat16 would round them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (source,) = files
    where = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # The weights are plain numbers now, but transformers refuses to save a GGUF model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target, max_shard_size="100GB")
    tokenizer.save_pretrained(target)


def _write_module(target: Path, kind: str, weights: Mapping[str, Tensor], sizes: Any) -> None:
    """sizes: a dataclass, from which `build` makes the module again."""
    from safetensors.torch import save_file

    target.mkdir()
    save_file({name: t.contiguous() for name, t in weights.items()}, target / WEIGHTS)
    facts = {"kind": kind, "sizes": asdict(sizes)}
    (target / CONFIG).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _convert_terrain(files: Sequence[Path], target: Path) -> None:
    (source,) = files
    _write_module(target, "terrain", convert_terrain(source.read_bytes()), TerrainConfig())


def _build_terrain(sizes: Mapping[str, Any]) -> Parts:
    return Terrain(TerrainConfig(**sizes)), square_grid, TerrainTask()


def _convert_sam2(files: Sequence[Path], target: Path) -> None:
    encoder, decoder = (file.read_bytes() for file in files)
    _write_module(target, "sam2", convert_sam2(encoder, decoder), Sam2Config())


def _build_sam2(sizes: Mapping[str, Any]) -> Parts:
    model = Sam2(Sam2Config(**sizes))
    return model, model.grid_of, PointToMask()


KINDS = {
    "causal-lm": Kind(("transformers", "gguf", "accelerate"), _convert_language_model),
    "terrain": Kind(("onnx",), _convert_terrain, _build_terrain),
    "sam2": Kind(("onnx", "flatbuffers"), _convert_sam2, _build_sam2),
}
