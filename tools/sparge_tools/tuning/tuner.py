"""Tune a whole model from its trace: layer by layer, kept as it goes, stopped at any time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparge import DEFAULT, Profile, Recipe
from sparge.routing import AUTO
from sparge.support.atomic_files import replace_file
from sparge.support.json_text import parse_json, read_json_text
from sparge.values.profile import Fingerprint, LayerSettings

from .capture import BLOCKS, Capture, captures_of, stamp
from .layer import PREDICTORS, TunedLayer, tune_layer
from .tracing import Trace

Bounds = tuple[float, float | None]

PRESETS: dict[str, Bounds] = {
    "llama": (0.08, 0.09),
    "cogvideox": (0.05, 0.06),
    "mochi": (0.05, 0.06),
    "sd3.5": (0.07, 0.08),
    "flux": (0.07, 0.08),
    "open-sora-plan": (0.03, 0.035),
}

_DENOISERS = {
    "CogVideoX": "cogvideox",
    "Mochi": "mochi",
    "SD3": "sd3.5",
    "Flux": "flux",
    "OpenSora": "open-sora-plan",
    "Wan": "cogvideox",
    "Hunyuan": "cogvideox",
    "LTX": "cogvideox",
    "QwenImage": "flux",
}
"""How class names begin. Of families without published bounds, those of the nearest kind."""


def preset_of(architecture: str) -> str:
    """The preset to begin with for a model's class, such as FluxTransformer2DModel."""
    names = [name for start, name in _DENOISERS.items() if architecture.startswith(start)]
    return names[0] if names else "llama"


def check_bounds(l1: float, l2: float | None) -> Bounds:
    for name, bound in (("l1", l1), ("l2", l2)):
        if bound is not None and not 0.0 < bound < 1.0:
            raise ValueError(f"{name} must be a relative error between 0 and 1, got {bound}")
    if l2 is not None and l2 < l1:
        raise ValueError(
            f"l2 bounds both filters together and must be at least l1, got l1={l1}, l2={l2}; "
            "None leaves the second filter off"
        )
    return l1, l2


def bounds_of(preset: str) -> Bounds:
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    return PRESETS[preset]


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
    if not predictors or not set(predictors) <= set(PREDICTORS):
        raise ValueError(f"predictors must be some of {', '.join(PREDICTORS)}; got {predictors!r}")
    if isinstance(trace, str | os.PathLike):
        trace = Trace.open(trace)
    # The result depends on these; a state with others is not resumed.
    asked: dict[str, Any] = {"l1": l1, "l2": l2, "recipe": recipe.to_dict()}
    asked["predictors"] = list(predictors)
    about: dict[str, Any] = {"model": Fingerprint("", {}, "")}
    calibration: dict[str, Any] = {}
    noise_levels: set[float] = set()
    read: Callable[[str], Sequence[Capture]]
    if isinstance(trace, Trace):
        names, read = trace.layers if trace.inputs else (), trace.captures
        asked |= {"model": trace.model.weights, "inputs": [each.digest for each in trace.inputs]}
        if state is None:
            digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
            state = trace.directory / f"tune-{digest}.json"
        about = {"model": trace.model, "name": trace.name}
        calibration = {**trace.calibration, "query_blocks": trace.blocks}
        noise_levels = {x.noise_level for x in trace.inputs if x.noise_level is not None}
    else:
        names, read = tuple(trace), trace.__getitem__
    if not names:
        raise ValueError("there is nothing to tune: the trace has no layer or no input")
    path = None if state is None else Path(state)
    tuned = _read_state(path, asked) if path is not None and path.is_file() else {}
    try:
        for name in names:
            seconds = None
            if name not in tuned:
                captures = read(name)
                start = time.perf_counter()
                # A layer that the inputs never reached is left untuned.
                layer = TunedLayer()
                if captures:
                    how: dict[str, Any] = {"predictors": predictors, "backend": backend}
                    layer = tune_layer(captures, l1=l1, l2=l2, base=recipe, **how)
                seconds = round(time.perf_counter() - start, 3)
                tuned[name] = replace(layer, seconds=seconds)
                if path is not None:
                    _write_state(path, asked, tuned)
            done(name, seconds)
    except KeyboardInterrupt:
        pass
    calibration |= _summary(list(tuned.values()))
    calibration |= {"noise_levels": sorted(noise_levels)} if noise_levels else {}
    return Profile(
        layers={name: tuned.get(name, TunedLayer()).settings for name in names},
        bounds=(l1, l2),
        default=recipe,
        **stamp(),
        calibration=calibration,
        **about,
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
    # As the original, whose users call this.
    plain = replace(DEFAULT, local_blocks=0, skipped="drop")
    tuned = tune_layer(captures, l1=l1, l2=l2, base=plain, predictors=("mean",), backend=backend)
    return tuned.settings.recipe_with(tuned.settings.heads)


def _read_state(path: Path, asked: dict[str, Any]) -> dict[str, TunedLayer]:
    """The layers done, by name; refuses a file of another request."""
    try:
        data = parse_json(read_json_text(path), "it")
        if data["format"] != STATE_FORMAT or data["asked"] != asked:
            raise ValueError("it is of another trace, or of other bounds or settings")
        return {
            name: TunedLayer(
                **{**each, "settings": LayerSettings.from_dict(each["settings"], name)}
            )
            for name, each in data["layers"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be resumed: {error}; remove it to begin again") from None


def _write_state(path: Path, asked: dict[str, Any], tuned: Mapping[str, TunedLayer]) -> None:
    layers = {
        name: {**vars(each), "settings": each.settings.to_dict()} for name, each in tuned.items()
    }
    data = {"format": STATE_FORMAT, "asked": asked, "layers": layers}
    replace_file(path, f"{json.dumps(data, indent=1)}\n".encode())


def _summary(tuned: Sequence[TunedLayer]) -> dict[str, Any]:
    evaluations = sum(layer.evaluations for layer in tuned) / max(len(tuned), 1)
    return {
        "inputs": max((layer.settings.inputs for layer in tuned), default=0),
        "evaluations_per_head": round(evaluations, 1),
        "tuning_seconds": round(sum(layer.seconds for layer in tuned), 1),
    }
