"""A trace: captures of every layer on some inputs, in a directory that can be carried elsewhere.

    manifest.json                        what is there, of which model; replaced as a whole
    input-<digest>/layer-003.safetensors the capture of one layer (…-1 for a second call of it)

Files are written while the model runs, one layer at a time, so memory holds one. An input counts
once the manifest names it; an interrupted trace resumes with the inputs it lacks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparge.support.atomic_files import replace_file
from sparge.support.json_text import parse_json, read_json_text
from sparge.values.profile import Fingerprint

from .capture import Capture

FORMAT = "sparge.trace/2"
MANIFEST = "manifest.json"
_FACTS = ("starts", "scale", "is_causal", "offset")
_TENSORS = ("query", "key", "value", "attn_mask")


@dataclass(frozen=True)
class TracedInput:
    """files: of each layer, its captures: the file's name, its size, and the facts of the call."""

    digest: str
    about: str
    noise_level: float | None
    files: Mapping[str, Sequence[Mapping[str, Any]]]

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        return [entry for entries in self.files.values() for entry in entries]


@dataclass(frozen=True)
class Trace:
    """A trace as its manifest describes it; tensors are read, memory-mapped, on demand."""

    directory: Path
    model: Fingerprint
    name: str
    blocks: int
    layers: tuple[str, ...]
    inputs: tuple[TracedInput, ...]
    calibration: Mapping[str, Any]

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Trace:
        path = Path(directory) / MANIFEST
        try:
            data = parse_json(read_json_text(path), "it")
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, this sparge reads {FORMAT}")
            return cls(
                directory=Path(directory),
                model=Fingerprint.from_dict(data["model"]),
                name=str(data["model"]["name"]),
                blocks=int(data["blocks"]),
                layers=tuple(data["layers"]),
                inputs=tuple(TracedInput(**each) for each in data["inputs"]),
                calibration=dict(data["calibration"]),
            )
        except FileNotFoundError:
            raise ValueError(
                f"{os.fspath(directory)!r} holds no trace ({MANIFEST} is not there); sparge trace "
                "writes one"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the trace {path} is damaged: {_words(error)}") from None

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for each in self.inputs for entry in each.entries)

    def captures(self, layer: str) -> list[Capture]:
        """All captures of a layer by its whole name, input after input."""
        if layer not in self.layers:
            raise ValueError(f"the trace has no layer {layer!r}; there is {self.layers[0]}, …")
        return [
            _read(self.directory / entry["file"], entry)
            for each in self.inputs
            for entry in each.files.get(layer, ())
        ]

    def save(self) -> None:
        data = {
            "format": FORMAT,
            "model": {"name": self.name, **asdict(self.model)},
            "blocks": self.blocks,
            "calibration": dict(self.calibration),
            "layers": list(self.layers),
            "inputs": [asdict(each) for each in self.inputs],
        }
        replace_file(self.directory / MANIFEST, f"{json.dumps(data, indent=1)}\n".encode())

    def delete(self) -> None:
        """Remove the files that the manifest names, it, and the directories this leaves empty."""
        (self.directory / MANIFEST).unlink(missing_ok=True)
        files = [self.directory / entry["file"] for each in self.inputs for entry in each.entries]
        for file in files:
            file.unlink(missing_ok=True)
        places = {self.directory, *(file.parent for file in files)}
        for place in sorted(places, key=lambda p: -len(p.parts)):
            with suppress(OSError):  # something else is in it
                place.rmdir()


def write(
    directory: Path,
    file: str,
    capture: Capture,
    *,
    dtype: torch.dtype | None = None,
    take: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Write one capture, its tensors in a dtype (masks as they are); returns its manifest entry.

    take: called with the size in bytes before the file is written.
    """
    from safetensors.torch import save

    given = {name: getattr(capture, name) for name in _TENSORS}
    tensors = {
        name: tensor.cpu().to(dtype if dtype and name != "attn_mask" else tensor.dtype).contiguous()
        for name, tensor in given.items()
        if tensor is not None
    }
    data = save(tensors)
    take(len(data))
    (directory / file).parent.mkdir(parents=True, exist_ok=True)
    replace_file(directory / file, data)
    facts = {name: getattr(capture, name) for name in _FACTS}
    return {"file": file, "bytes": len(data), **facts, "starts": list(capture.starts)}


def _read(path: Path, entry: Mapping[str, Any]) -> Capture:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} of the trace cannot be read: {_words(error)}; trace this input again"
        ) from None
    facts = {name: entry[name] for name in _FACTS}
    return Capture(**tensors, **{**facts, "starts": tuple(facts["starts"])})


def _words(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return " ".join(str(error).split())
