"""Tune a whole model from its trace: layer by layer, kept as it goes, stopped at any time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..dispatch.choose import AUTO
from ..fingerprint import Fingerprint
from ..profile import LayerSettings, Profile
from ..recipe import DEFAULT, Recipe
from ..support.atomic_files import replace_file
from ..support.cpuinfo import cpu_name
from ..support.json_text import parse_json, read_json_text
from .capture import BLOCKS, Capture, captures_of
from .layer import PREDICTORS, TunedLayer, recipe_with, tune_layer
from .presets import check_bounds
from .search import Setting
from .trace_directory import Trace

STATE_FORMAT = "sparge.tune/1"
Captures = Mapping[str, Sequence[Capture]]
Told = Callable[[str, float | None], None]


def tune(
    trace: Trace | Captures | str | os.PathLike[str],
    *,
    l1: float,
    l2: float | None = None,
    recipe: Recipe = DEFAULT,
    predictors: Sequence[str] = PREDICTORS,
    backend: str = AUTO,
    state: str | os.PathLike[str] | None = None,
    done: Told = lambda layer, seconds: None,
) -> Profile:
    """The sparsest settings of every head whose error is at most l1 on every input, then at most
    l2 with the second filter. Each was run, and met its bound.

    trace: a `Trace`, its directory, or captures of each layer by its name.
    l2: None leaves the second filter off. recipe: precision, sink, local window and sampled rows.
    state: a file of the layers done, from which the same call resumes. A trace has its own.
    done: called with each layer and its seconds; None where it was done before.

    Ctrl-C returns the layers done so far: `profile.untuned` names those with the default recipe.
    """
    check_bounds(l1, l2)
    _check_predictors(predictors)
    if isinstance(trace, str | os.PathLike):
        trace = Trace.open(trace)
    names = list(trace.layers) if isinstance(trace, Trace) else list(trace)
    if not names or (isinstance(trace, Trace) and not trace.inputs):
        raise ValueError("there is nothing to tune: the trace has no layer or no input")
    asked = _asked(trace, l1, l2, recipe, predictors)
    kept = _State(_state_path(trace, asked, state), asked)
    try:
        for name in names:
            if name in kept.layers:
                done(name, None)
                continue
            captures = trace.captures(name) if isinstance(trace, Trace) else trace[name]
            start = time.perf_counter()
            facts: dict[str, Any] = {"base": recipe, "predictors": predictors, "backend": backend}
            tuned = _tune_one(captures, l1=l1, l2=l2, **facts)
            kept.add(name, tuned, time.perf_counter() - start)
            done(name, kept.seconds[name])
    except KeyboardInterrupt:
        pass
    layers = {name: kept.layers.get(name, LayerSettings()) for name in names}
    facts_of_trace: dict[str, Any] = {"model": Fingerprint("", {}, "")}
    calibration = kept.summary()
    if isinstance(trace, Trace):
        facts_of_trace = {"model": trace.model, "name": trace.name}
        calibration = {**trace.calibration, "query_blocks": trace.blocks, **calibration}
        levels = {each.noise_level for each in trace.inputs} - {None}
        if levels:
            calibration["noise_levels"] = sorted(levels)
    return Profile(
        layers=layers,
        bounds=(l1, l2),
        default=recipe,
        version=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        calibration=calibration,
        **facts_of_trace,
    )


def tune_head_settings(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    l1: float,
    l2: float | None = None,
    blocks: int = 2 * BLOCKS,
    backend: str = AUTO,
) -> Recipe:
    """Tune the heads of one call: predictor `"mean"`, one mass, min_similarity and pv_skip each.

    A head with nothing to gain has mass 1.0; l2 None leaves the second filter off.
    """
    check_bounds(l1, l2)
    facts = {"is_causal": is_causal, "scale": scale}
    captures = captures_of(query, key, value, facts, blocks=blocks)
    plain = replace(DEFAULT, local_blocks=0)  # as the original, whose users call this
    tuned = tune_layer(captures, l1=l1, l2=l2, base=plain, predictors=("mean",), backend=backend)
    settings = [Setting(h.mass, h.min_similarity, h.pv_skip) for h in tuned.settings.heads]
    return recipe_with(settings, plain, "mean")


def _tune_one(captures: Sequence[Capture], **facts: Any) -> TunedLayer:
    # A layer that the inputs never reached is left untuned.
    return tune_layer(captures, **facts) if captures else TunedLayer(LayerSettings(), 0)


class _State:
    """The layers done, in memory and, where there is a file, in it after every layer."""

    def __init__(self, path: Path | None, asked: dict[str, Any]) -> None:
        self.path, self.asked = path, asked
        self.layers: dict[str, LayerSettings] = {}
        self.evaluations: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            data = parse_json(read_json_text(path))
            if data["format"] != STATE_FORMAT or data["asked"] != self.asked:
                raise ValueError("it is of another trace, or of other bounds or settings")
            for name, each in data["layers"].items():
                self.layers[name] = LayerSettings.from_dict(each["settings"], where=name)
                self.evaluations[name], self.seconds[name] = each["evaluations"], each["seconds"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be continued: {error}; remove it to begin again"
            ) from None

    def add(self, name: str, tuned: TunedLayer, seconds: float) -> None:
        self.layers[name], self.evaluations[name] = tuned.settings, tuned.evaluations
        self.seconds[name] = round(seconds, 3)
        if self.path is None:
            return
        layers = {
            name: {
                "settings": settings.to_dict(),
                "evaluations": self.evaluations[name],
                "seconds": self.seconds[name],
            }
            for name, settings in self.layers.items()
        }
        data = {"format": STATE_FORMAT, "asked": self.asked, "layers": layers}
        replace_file(self.path, f"{json.dumps(data, indent=1)}\n".encode())

    def summary(self) -> dict[str, Any]:
        n = max(len(self.layers), 1)
        return {
            "inputs": max((layer.inputs for layer in self.layers.values()), default=0),
            "evaluations_per_head": round(sum(self.evaluations.values()) / n, 1),
            "tuning_seconds": round(sum(self.seconds.values()), 1),
        }


def _asked(
    trace: Trace | Captures,
    l1: float,
    l2: float | None,
    recipe: Recipe,
    predictors: Sequence[str],
) -> dict[str, Any]:
    """What the result depends on; a state of anything else is not resumed."""
    of: dict[str, Any] = {}
    if isinstance(trace, Trace):
        of = {"model": trace.model.weights, "inputs": [each.digest for each in trace.inputs]}
    return {
        "l1": l1,
        "l2": l2,
        "recipe": recipe.to_dict(),
        "predictors": list(predictors),
        **of,
    }


def _state_path(
    trace: Trace | Captures, asked: dict[str, Any], state: str | os.PathLike[str] | None
) -> Path | None:
    if state is not None:
        return Path(state)
    if not isinstance(trace, Trace):
        return None
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    return trace.directory / f"tune-{digest}.json"


def _check_predictors(predictors: Sequence[str]) -> None:
    if not predictors or not set(predictors) <= set(PREDICTORS):
        raise ValueError(f"predictors must be some of {', '.join(PREDICTORS)}; got {predictors!r}")
