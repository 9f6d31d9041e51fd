"""A trace: captures of every layer on some inputs, in a directory that can be carried elsewhere.

    manifest.json                        what is there, of which model; replaced as a whole
    input-<digest>/layer-003.safetensors the capture of one layer (…-1 for a second call of it)

A model or a diffusers pipeline runs with dense attention, so the activations of every layer are its
own. Of a pipeline an input is one step of one run, with its noise level, and tokens are kept in the
order in which they will be attended.

Files are written while the model runs, one layer at a time, so memory holds one. An input counts
once the manifest names it; an interrupted trace resumes with the inputs it lacks.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparge import DEFAULT, Recipe, Schedule, accelerate
from sparge.models import Layers, choose_layers
from sparge.models.adapters import find_adapter
from sparge.routing import DENSE
from sparge.support.atomic_files import replace_file
from sparge.support.json_text import parse_json, read_json_text
from sparge.values.profile import Fingerprint, fingerprint
from sparge.values.schedule import Context

from ..renders.compare import Given, Prompt, checked_call, plain, quiet_bars, render
from ..renders.pictures import LATENT
from .capture import BLOCKS, Capture, captures_of

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


MAX_BYTES = 16 << 30
Inputs = Tensor | Mapping[str, Any]


def trace_model(
    model: nn.Module,
    inputs: Sequence[Inputs],
    directory: str | os.PathLike[str],
    *,
    blocks: int = BLOCKS,
    layers: Layers = None,
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
        writer = TraceWriter(trace, dtype, max_bytes)
        for i, given in enumerate(inputs):
            digest = inputs_digest(given)
            if all(each.digest != digest for each in trace.inputs):
                writer.left, stem = len(names) * (len(inputs) - i), f"input-{digest[:12]}"
                for layer in names:
                    handle.tap(layer, partial(writer.add, stem, layer))
                _forward(model, given)
                files = writer.files(stem)
                if not files:
                    raise ValueError(
                        f"inputs must be longer than one token: no attention of "
                        f"{type(model).__name__} ran through sparge on input {i}"
                    )
                level = float(noise_levels[i]) if noise_levels else timestep_of(given)
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
    """Writes captures, each to its file, as they come.

    dtype: of the tensors but masks; None as they are. left: files to come. A trace that will not
    fit in max_bytes is refused at the next capture, as if all that are left were as large.
    """

    def __init__(self, trace: Trace, dtype: torch.dtype | None, max_bytes: int) -> None:
        self.trace, self.dtype, self.max_bytes = trace, dtype, max_bytes
        self.left, self.used = 1, trace.bytes
        self._entries: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def files(self, stem: str) -> dict[str, list[dict[str, Any]]]:
        """Of each layer, the manifest entries written in a directory."""
        each = ((layer, self._entries.get((stem, layer))) for layer in self.trace.layers)
        return {layer: entries for layer, entries in each if entries}

    def add(
        self, stem: str, layer: str, q: Tensor, k: Tensor, v: Tensor, facts: dict[str, Any]
    ) -> None:
        """Write the captures of one call of a layer in the directory `stem`."""
        from safetensors.torch import save

        entries = self._entries.setdefault((stem, layer), [])
        for capture in captures_of(q, k, v, facts, blocks=self.trace.blocks):
            again = f"-{len(entries)}" if entries else ""
            file = f"{stem}/layer-{self.trace.layers.index(layer):03d}{again}.safetensors"
            tensors = {name: x for name in _TENSORS if (x := getattr(capture, name)) is not None}
            for name, x in tensors.items():
                dtype = x.dtype if self.dtype is None or name == "attn_mask" else self.dtype
                tensors[name] = x.cpu().to(dtype).contiguous()
            data = save(tensors)
            self._take(len(data))
            path = self.trace.directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
            told = {name: getattr(capture, name) for name in _FACTS}
            told["starts"] = list(capture.starts)
            entries.append({"file": file, "bytes": len(data), **told})

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


def timestep_of(given: Inputs) -> float | None:
    """The mean of an argument `timestep`, as diffusion models name it."""
    level = as_arguments(given).get("timestep")
    return None if level is None else float(torch.as_tensor(level, dtype=torch.float64).mean())


def moved_to(model: nn.Module, given: Inputs) -> dict[str, Any]:
    """The arguments of a call, on the model's device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    arguments = as_arguments(given).items()
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _forward(model: nn.Module, given: Inputs) -> None:
    """Without its head: logits of a long input take more memory than all the rest."""
    body = getattr(model, "base_model", model)
    arguments = moved_to(model, given)
    if "use_cache" in inspect.signature(body.forward).parameters:
        arguments.setdefault("use_cache", False)
    with evaluating(model), torch.no_grad():
        body(**arguments)


STEPS = 4
"""Steps that are kept of each run, evenly spread over its sparse part."""


def trace_pipeline(
    pipe: Any,
    prompts: Sequence[Prompt],
    directory: str | os.PathLike[str],
    *,
    seeds: Sequence[int] = (0,),
    call: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    schedule: Schedule | None = None,
    order: str | None = None,
    blocks: int = BLOCKS,
    layers: Layers = None,
    max_bytes: int = MAX_BYTES,
    dtype: torch.dtype | None = None,
    name: str = "",
    calibration: Mapping[str, Any] | None = None,
    done: Callable[[str], None] = lambda digest: None,
) -> Trace:
    """Run a pipeline on every prompt and seed, and keep q, k, v of some steps in a directory.

    call: arguments of every call of the pipeline. steps: how many to keep of each run. schedule:
    steps that it leaves dense are not kept; None is `Schedule()`. order: of visual tokens. blocks
    to done: as in `trace_model`. A directory that holds some of these runs is completed.

    The pipeline has its own attention again when this returns; settings of an earlier `accelerate`
    are gone.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    given = checked_call(pipe, prompts, seeds, call or {})
    schedule = Schedule() if schedule is None else schedule
    names, model = chosen_layers(pipe, layers)
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    facts = {"schedule": schedule.to_dict(), **({} if order is None else {"order": order})}
    facts |= {"call": plain(call or {}), **(calibration or {})}
    trace = completed(Trace(where, fingerprint(model), name, blocks, names, (), facts))
    runs = [(each, seed) for each in given for seed in seeds]
    writer = TraceWriter(trace, dtype, max_bytes)
    with quiet_bars(pipe), torch.no_grad():
        for i, (one, seed) in enumerate(runs):
            asked = {"seed": seed, "steps": steps, "schedule": schedule.to_json(), "order": order}
            stem = inputs_digest({**one.arguments, **{f"sparge {n}": x for n, x in asked.items()}})
            if all(not each.digest.startswith(stem) for each in trace.inputs):
                writer.left = len(names) * steps * (len(runs) - i)
                place = f"input-{stem[:12]}"
                levels = _trace_run(pipe, one, seed, steps, schedule, order, writer, place)
                about = f"{one.caption}, seed {seed}"
                traced = [
                    TracedInput(
                        f"{stem}-{step}",
                        f"{about}, step {step}",
                        level,
                        writer.files(f"{place}-{step:03d}"),
                    )
                    for step, level in sorted(levels.items())
                ]
                trace = replace(trace, inputs=(*trace.inputs, *traced))
                trace.save()
            done(stem)
    return trace


def chosen_layers(pipe: Any, layers: Layers = None) -> tuple[tuple[str, ...], nn.Module]:
    """The attention modules of a pipeline that `layers` chooses, and the denoiser they are of."""
    _, found = find_adapter(pipe)
    return tuple(choose_layers(list(found.modules), layers)), found.model


def _trace_run(
    pipe: Any,
    given: Given,
    seed: int,
    steps: int,
    schedule: Schedule,
    order: str | None,
    writer: TraceWriter,
    place: str,
) -> dict[int, float | None]:
    """Run a pipeline once, and write some of its steps; returns their noise levels."""
    levels: dict[int, float | None] = {}
    kept: set[int] = set()
    now = Context()

    def recipe(context: Context) -> Recipe | None:
        """None in steps that are not kept: they run the pipeline's own attention."""
        nonlocal kept, now
        if context.step == 0 and now != context:  # the steps of this run are known now
            kept = _spread(_sparse_steps(pipe.scheduler, schedule), steps)
        now = context
        return DEFAULT if context.step in kept else None

    def add(layer: str, *call: Any) -> None:
        assert now.step is not None
        levels.setdefault(now.step, now.noise_level)
        writer.add(f"{place}-{now.step:03d}", layer, *call)

    layers = writer.trace.layers
    chosen: dict[str, Any] = {"layers": {*layers}.__contains__, "backend": DENSE}
    with accelerate(pipe, recipe, schedule=schedule, order=order, **chosen) as handle:
        for layer in layers:
            handle.tap(layer, partial(add, layer))
        render(pipe, {**given.arguments, "output_type": LATENT}, seed)
    if not levels:
        raise ValueError(
            f"no attention of {type(pipe).__name__} was sparse in this run; give more "
            "steps, or a schedule that leaves fewer of them dense"
        )
    return levels


def _sparse_steps(scheduler: Any, schedule: Schedule) -> list[int]:
    """The steps of a scheduler's run that a schedule does not leave dense."""
    from sparge.models.clock import context_of

    begin = getattr(scheduler, "begin_index", None) or 0
    found = []
    for step in range(len(scheduler.timesteps) - begin):
        position = schedule.position(context_of(scheduler, begin, step))
        if position is not None and schedule.recipe_at(position, DEFAULT) is not None:
            found.append(step)
    return found


def _spread(steps: Sequence[int], n: int) -> set[int]:
    """n of some steps, the first and the last among them."""
    n = min(n, len(steps))
    return {steps[i * (len(steps) - 1) // max(n - 1, 1)] for i in range(n)}
