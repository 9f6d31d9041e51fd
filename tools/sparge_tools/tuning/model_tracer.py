"""Trace a model: run it on calibration inputs with dense attention, and keep q, k, v of its layers.

Attention is dense, so the activations of every layer are those of the model itself.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparge import accelerate
from sparge.routing import DENSE
from sparge.values.profile import fingerprint

from .capture import BLOCKS, captures_of
from .trace_directory import MANIFEST, Trace, TracedInput, write

MAX_BYTES = 16 << 30
Inputs = Tensor | Mapping[str, Any]


def trace_model(
    model: nn.Module,
    inputs: Sequence[Inputs],
    directory: str | os.PathLike[str],
    *,
    blocks: int = BLOCKS,
    layers: Iterable[str] | Callable[[str], bool] | None = None,
    max_bytes: int = MAX_BYTES,
    dtype: torch.dtype | None = None,
    name: str = "",
    about: Sequence[str] | None = None,
    noise_levels: Sequence[float] | None = None,
    calibration: Mapping[str, Any] | None = None,
    done: Callable[[str], None] = lambda digest: None,
) -> Trace:
    """Run a transformers model on inputs and keep q, k, v of its layers in a directory.

    inputs: token ids `[B, L]`, or the model's keyword arguments. blocks: query blocks to keep of
    each call. layers: names with `*` and `?`, or a function of the name. dtype: to store the
    tensors in, None as they are. about: a few words on each input. noise_levels: of a diffusion
    model, one for each input; None takes the mean of an argument `timestep`, as diffusion models
    name it. done: called with the digest of each input.

    A directory that holds some of these inputs is completed. The model has its own attention again
    when this returns; settings of an earlier `accelerate` are gone.
    """
    for what, said in (("about", about), ("noise_levels", noise_levels)):
        if said is not None and len(said) != len(inputs):
            raise ValueError(f"{what} needs one for each of {len(inputs)} inputs, got {len(said)}")
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    with accelerate(model, backend=DENSE, layers=layers) as handle:
        names = tuple(layer.name for layer in handle.report().layers if layer.recipe is not None)
        trace = Trace(where, fingerprint(model), name, blocks, names, (), dict(calibration or {}))
        trace = completed(trace)
        for i, given in enumerate(inputs):
            digest = inputs_digest(given)
            if all(each.digest != digest for each in trace.inputs):
                left = len(names) * (len(inputs) - i)
                writer = TraceWriter(trace, f"input-{digest[:12]}", dtype, max_bytes, left)
                for layer in names:
                    handle.tap(layer, partial(writer.add, layer))
                _forward(model, given)
                files = {layer: entries for layer, entries in writer.files.items() if entries}
                if not files:
                    raise ValueError(
                        f"inputs must be longer than one token: no attention of "
                        f"{type(model).__name__} ran through sparge on input {i}"
                    )
                level = noise_levels[i] if noise_levels else as_arguments(given).get("timestep")
                if level is not None:
                    level = float(torch.as_tensor(level, dtype=torch.float64).mean())
                traced = TracedInput(digest, about[i] if about else "", level, files)
                trace = replace(trace, inputs=(*trace.inputs, traced))
                trace.save()
            done(digest)
    return trace


def inputs_digest(given: Inputs) -> str:
    """SHA-256 of an input's numbers, the same on every machine."""
    digest = hashlib.sha256()
    for name, value in sorted(as_arguments(given).items()):
        digest.update(name.encode())
        if isinstance(value, Tensor):
            numbers = value.detach().cpu().contiguous()
            digest.update(f"{numbers.dtype}{list(numbers.shape)}".encode())
            digest.update(numbers.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


class TraceWriter:
    """Writes the captures of one input, each to its file, as they come.

    files: of each layer, the manifest entries written. A trace that will not fit in max_bytes is
    refused at its first capture, as if the `left` files to come were as large.
    """

    def __init__(
        self, trace: Trace, stem: str, dtype: torch.dtype | None, max_bytes: int, left: int
    ) -> None:
        self.trace, self.stem, self.dtype = trace, stem, dtype
        self.max_bytes, self.left, self.used = max_bytes, left, trace.bytes
        self.files: dict[str, list[dict[str, Any]]] = {name: [] for name in trace.layers}

    def add(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]
    ) -> None:
        entries, number = self.files[layer], self.trace.layers.index(layer)
        for capture in captures_of(query, key, value, facts, blocks=self.trace.blocks):
            again = f"-{len(entries)}" if entries else ""
            file = f"{self.stem}/layer-{number:03d}{again}.safetensors"
            where = self.trace.directory
            entries.append(write(where, file, capture, dtype=self.dtype, take=self._take))

    def _take(self, size: int) -> None:
        expected, self.left = self.used + size * self.left, 1
        if expected > self.max_bytes:
            raise ValueError(
                f"the trace would take about {expected / 2**20:.0f} MiB and max_bytes allows "
                f"{self.max_bytes / 2**20:.0f} MiB; raise it, or trace fewer or shorter inputs, "
                "fewer layers or blocks, or store bf16"
            )
        self.used += size


def completed(trace: Trace) -> Trace:
    """The trace with the inputs that its directory holds already; another trace is refused."""
    if not (trace.directory / MANIFEST).is_file():
        return trace
    old = Trace.open(trace.directory)
    differs = trace.model.differences(old.model)
    if not differs and (old.blocks, old.layers) != (trace.blocks, trace.layers):
        differs = ["other layers or another number of blocks"]
    if differs:
        raise ValueError(
            f"{str(trace.directory)!r} holds a trace of something else ({'; '.join(differs)}); "
            "give another directory, or remove it"
        )
    whole = []
    for each in old.inputs:
        files = [(trace.directory / entry["file"], entry["bytes"]) for entry in each.entries]
        if all(file.is_file() and file.stat().st_size == size for file, size in files):
            whole.append(each)
    return replace(trace, inputs=tuple(whole))


def as_arguments(given: Inputs) -> dict[str, Any]:
    return {"input_ids": given} if isinstance(given, Tensor) else dict(given)


def _forward(model: nn.Module, given: Inputs) -> None:
    """Without its head: logits of a long input take more memory than all the rest."""
    body = getattr(model, "base_model", model)
    takes = inspect.signature(body.forward).parameters
    arguments = as_arguments(given)
    if "use_cache" in takes:
        arguments.setdefault("use_cache", False)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            body(**moved)
    finally:
        model.train(was_training)
