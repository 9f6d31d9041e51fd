"""Tuned settings of one model, per layer and head, with the errors and densities measured.

A JSON file that people can read, compare and share. Layers are matched by the exact name of their
attention module; heads by their index in the whole model, so that a tensor-parallel rank asks for
its own. A diffusion model may have other settings in bands of its noise level.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..support.atomic_files import replace_file
from ..support.json_text import Fields, parse_json, read_json_text
from .recipe import DEFAULT, KeepMass, Recipe
from .schedule import Schedule

FAMILY = "sparge.profile"
FORMAT, OUTPUT_FORMAT = f"{FAMILY}/2", f"{FAMILY}/3"
READS = (FORMAT, OUTPUT_FORMAT)
"""Format 3 has `output` in the place of bounds."""
Heads = slice | Iterable[int] | None
POOL_FIELDS = ("skipped", "pool_group")
RECIPE_FIELDS = (
    "predictor",
    "precision",
    "sink_blocks",
    "local_blocks",
    "sample_rows",
    "protect",
    *POOL_FIELDS,
)
_HEAD_LIMITS: dict[str, dict[str, Any]] = {
    "mass": {"above": 0, "most": 1},
    "min_similarity": {"least": -1, "most": 1, "null": True},
    "pv_skip": {"above": 0, "null": True},
    "density": {"least": 0, "most": 1},
    "pv_skipped": {"least": 0, "most": 1},
}
SAMPLES = 16
"""Numbers of each weight that go into the digest."""
_SHAPES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_size": "hidden_size",
}


@dataclass(frozen=True)
class Fingerprint:
    """The model that settings were tuned for: `fingerprint(model)`."""

    architecture: str
    shapes: Mapping[str, int]
    weights: str

    def differences(self, other: Fingerprint) -> list[str]:
        """How another model differs, one sentence each; empty for the same model."""
        found = []
        if self.architecture != other.architecture:
            found.append(f"it is a {other.architecture}, not a {self.architecture}")
        for name in dict.fromkeys([*self.shapes, *other.shapes]):
            mine, its = self.shapes.get(name), other.shapes.get(name)
            if mine != its:
                found.append(f"{name} is {its}, not {mine}")
        if not found and self.weights and other.weights and self.weights != other.weights:
            found.append(
                "its weights differ (fine-tuned, quantized or cast to fp16?): "
                f"{other.weights[:19]}…, not {self.weights[:19]}…"
            )
        return found

    @classmethod
    def from_dict(cls, data: Any) -> Fingerprint:
        """From a file's object, which may hold the model's name too."""
        fields = Fields(data, "model", ("name", *cls.__dataclass_fields__), what="the model")
        given = fields.get("shapes", dict)
        sizes = Fields(given, fields.place("shapes"), tuple(given), what="shapes")
        shapes = {name: sizes.number(name, least=0, whole=True) for name in given}
        return cls(fields.get("architecture", str), shapes, fields.get("weights", str))


def fingerprint(model: nn.Module) -> Fingerprint:
    """Architecture, shapes and a digest of the weights; takes well under a second.

    The digest is SHA-256 over every parameter in order of name: its name, its shape and 16 of its
    numbers, evenly spaced, rounded to bf16. So the same weights in fp32 and bf16 have one digest;
    a change that misses all samples, or is smaller than bf16, is not seen. It is empty where the
    numbers are not available: on the meta device, or spread over a tensor-parallel group.
    """
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    config = get_text_config() if callable(get_text_config) else config
    shapes = {
        name: number
        for name, field_name in _SHAPES.items()
        if isinstance(number := getattr(config, field_name, None), int)
    }
    if not shapes:
        shapes = {"parameters": sum(p.numel() for p in model.parameters())}
    return Fingerprint(type(model).__name__, shapes, _digest(model))


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            # A subclass (DTensor, a quantized weight) holds a part, or no plain numbers.
            if weight.is_meta or type(weight.data) is not Tensor:
                return ""
            flat = weight.detach().reshape(-1)
            n = min(SAMPLES, flat.numel())
            at = torch.arange(n) * (flat.numel() - 1) // max(n - 1, 1)
            numbers = flat[at.to(flat.device)].to(torch.bfloat16).cpu().view(torch.int16)
            digest.update(f"{name}{list(weight.shape)}{numbers.tolist()}\n".encode())
    return f"sha256:{digest.hexdigest()}"


@dataclass(frozen=True)
class HeadSettings:
    """One head: what it keeps, and what that gave on the calibration inputs.

    mass: 1.0 is a dense head. density, pv_skipped: means over the inputs. error: relative L1
    against dense attention on the worst input, measured by running these settings; infinite (null
    in the file) where an output was not finite.
    """

    mass: float = 1.0
    min_similarity: float | None = None
    pv_skip: float | None = None
    density: float = 1.0
    pv_skipped: float = 0.0
    error: float = 0.0

    @property
    def is_dense(self) -> bool:
        return self.mass == 1.0 and self.pv_skip is None

    def to_dict(self, head: int) -> dict[str, Any]:
        error = self.error if math.isfinite(self.error) else None
        if self.is_dense:
            return {"head": head, "dense": True, "error": error}
        return {"head": head, **{n: getattr(self, n) for n in _HEAD_LIMITS}, "error": error}

    @classmethod
    def from_dict(cls, data: Any, head: int, where: str) -> HeadSettings:
        fields = Fields(data, where, ("head", "dense", *cls.__dataclass_fields__), what="head")
        if fields.number("head", whole=True) != head:
            raise ValueError(f"{where}: heads must be listed as 0, 1, 2, …; got {data['head']}")
        if data.get("dense", True) is not True or ("dense" in data) == ("mass" in data):
            needed = "dense must be true, in the place of a mass; a head has one of them, not both"
            raise ValueError(f"{where}: {needed}")
        error = fields.number("error", least=0, null=True)
        given = {n: fields.number(n, **limits) for n, limits in _HEAD_LIMITS.items() if n in data}
        return cls(error=math.inf if error is None else error, **given)


@dataclass(frozen=True)
class LayerSettings:
    """One attention module. No heads: it was not tuned, and runs the profile's default recipe.

    inputs, rows: calibration inputs, and query rows of each head that were measured on them.
    noise: of a band, the noise levels `[low, high)` it is for; the last level, 1, belongs to the
    band that ends there. A level is the share of noise in the model's input: 1 is pure noise, 0 a
    clean sample (the sigma of flow matching; timestep / training timesteps).
    bands: settings for some noise levels; the layer's own serve all others.
    """

    heads: tuple[HeadSettings, ...] = ()
    predictor: str = DEFAULT.predictor
    precision: str = DEFAULT.precision
    sink_blocks: int = DEFAULT.sink_blocks
    local_blocks: int = 0
    sample_rows: int = DEFAULT.sample_rows
    protect: tuple[tuple[int, int | None], ...] = ()
    skipped: str = "drop"  # what a file without the field means, whatever the default recipe does
    pool_group: int = 64
    inputs: int = 0
    rows: int = 0
    noise: tuple[float, float] | None = None
    bands: tuple[LayerSettings, ...] = ()

    def __post_init__(self) -> None:
        ranges = sorted(_noise_range(band) for band in self.bands)
        for (low, high), (next_low, next_high) in pairwise(ranges):
            if next_low < high:
                raise ValueError(
                    f"noise bands must not overlap, got [{low:g}, {high:g}] and "
                    f"[{next_low:g}, {next_high:g}]"
                )

    @property
    def is_tuned(self) -> bool:
        return bool(self.heads or self.bands)

    @property
    def density(self) -> float:
        """Mean over the heads, or over the bands of a layer that has only those."""
        each: Sequence[HeadSettings | LayerSettings] = self.heads or self.bands
        return sum(one.density for one in each) / len(each) if each else 1.0

    def at_noise(self, noise: float | None) -> LayerSettings:
        """The settings for a noise level: of its band, or the layer's own outside of all bands."""
        if noise is None and self.bands and not self.heads:
            raise ValueError(
                "noise must be given: this layer has settings for noise bands only; run the model "
                "inside handle.context(noise_level=…)"
            )
        for band in self.bands:
            low, high = _noise_range(band)
            if noise is not None and (low <= noise < high or noise == high == 1.0):
                return band
        return self

    def recipe(self) -> Recipe | None:
        """The recipe of all heads; None where every one of them is dense."""
        return None if all(head.is_dense for head in self.heads) else self.recipe_with(self.heads)

    def recipe_with(self, heads: Sequence[HeadSettings]) -> Recipe:
        """A recipe of this layer's fields with one setting per head."""
        similarity = tuple(head.min_similarity for head in heads)
        pv_skip = tuple(head.pv_skip for head in heads)
        return Recipe(
            keep=KeepMass(tuple(head.mass for head in heads)),
            min_similarity=None if set(similarity) == {None} else similarity,
            pv_skip=None if set(pv_skip) == {None} else pv_skip,
            **_recipe_values(vars(self)),
        )

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {} if self.noise is None else {"noise": list(self.noise)}
        if self.heads:
            out |= {name: getattr(self, name) for name in (*RECIPE_FIELDS, "inputs", "rows")}
            out["protect"] = [list(each) for each in self.protect]
            if self.skipped == "drop":  # as files were before blocks could be pooled
                out = {name: value for name, value in out.items() if name not in POOL_FIELDS}
        out["heads"] = [head.to_dict(h) for h, head in enumerate(self.heads)]
        return out | ({"bands": [band.to_dict() for band in self.bands]} if self.bands else {})

    @classmethod
    def from_dict(cls, data: Any, where: str = "layer") -> LayerSettings:
        fields = Fields(data, where, tuple(cls.__dataclass_fields__), what="layer")
        heads = [
            HeadSettings.from_dict(head, h, f"{where}.heads[{h}]")
            for h, head in enumerate(fields.get("heads", list))
        ]
        bands = [
            cls.from_dict(band, f"{where}.bands[{i}]")
            for i, band in enumerate(fields.get("bands", list, []))
        ]
        values: dict[str, Any] = {"heads": tuple(heads), "bands": tuple(bands)}
        counts = [name for name in ("sample_rows", "inputs", "rows") if name in data]
        values |= {name: fields.number(name, least=0, whole=True) for name in counts}
        if "noise" in data:
            values["noise"] = tuple(fields.get("noise", list))
        try:
            recipe = Recipe(**_recipe_values(data))
            layer = cls(**{n: getattr(recipe, n) for n in RECIPE_FIELDS if n in data} | values)
            layer.recipe()  # checks the heads and the fields together
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from None
        return layer


def _recipe_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe. "mean" samples no rows, and a recipe refuses a number of them; the
    same goes for the group of a layer that pools nothing."""
    unused = {"sample_rows"} if settings.get("predictor") == "mean" else set()
    unused |= {"pool_group"} if settings.get("skipped", "drop") == "drop" else set()
    return {name: settings[name] for name in RECIPE_FIELDS if name in settings.keys() - unused}


def _noise_range(band: LayerSettings) -> tuple[float, float]:
    noise: Any = band.noise
    kinds = [type(number) for number in noise or ()]
    if len(kinds) != 2 or not {*kinds} <= {int, float} or not 0.0 <= noise[0] < noise[1] <= 1.0:
        raise ValueError(
            f"noise of a band must be [low, high] with 0 <= low < high <= 1, got {noise!r}"
        )
    return noise[0], noise[1]


def _bounds(fields: Fields) -> tuple[float, float | None]:
    bounds = Fields(fields.get("bounds"), "bounds", ("l1", "l2"), what="bounds")
    return bounds.number("l1", above=0), bounds.number("l2", above=0, null=True)


def _output(fields: Fields) -> Mapping[str, Any]:
    output: Mapping[str, Any] = fields.get("output", dict)
    known = Fields(output, "output", tuple(output), what="output")
    known.get("measure", str)
    known.number("target", above=0)
    for i, each in enumerate(known.get("bands", list, [])):
        Fields(each, f"output.bands[{i}]", tuple(each), what="a band").get("held_out", dict)
    if "bands" not in output:
        known.get("held_out", dict)
    return output


@dataclass(frozen=True)
class Profile:
    """Tuned settings of one model.

    layers: by the name of the attention module. default: the recipe of layers that were not tuned.
    bounds: `(l1, l2)` of the first filter and of both; l2 None: no second filter. None where the
    target was the model's output.
    calibration: what it was tuned on, for people to read.
    output: of such a target, its `measure` and `target`, what was measured on `held_out` data (in
    every band, where there are noise bands), and the `sensitivity` of every layer.
    """

    layers: Mapping[str, LayerSettings]
    model: Fingerprint
    bounds: tuple[float, float | None] | None
    default: Recipe = DEFAULT
    name: str = ""
    version: str = ""
    date: str = ""
    machine: str = ""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] | None = None

    def named_settings(self) -> dict[str, LayerSettings]:
        """The settings of every layer and noise band, by names for tables."""
        named = {}
        for name, layer in self.layers.items():
            if layer.heads or not layer.bands:
                named[name] = layer
            for band in layer.bands:
                low, high = _noise_range(band)
                named[f"{name} [noise {low:g} to {high:g}]"] = band
        return named

    @property
    def untuned(self) -> list[str]:
        return [name for name, layer in self.layers.items() if not layer.is_tuned]

    @property
    def density(self) -> float:
        """Mean over the tuned layers, each of its heads."""
        tuned = [layer.density for layer in self.layers.values() if layer.is_tuned]
        return sum(tuned) / len(tuned) if tuned else 1.0

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that a pipeline was tuned with; None where none is named."""
        found = self.calibration.get("schedule")
        return None if found is None else Schedule.from_dict(found)

    def recipe_for(
        self, layer_name: str, heads: Heads = None, *, noise: float | None = None
    ) -> Recipe | None:
        """The recipe of a layer by its whole name; None where it stays dense.

        heads: indices in the whole model of the heads wanted, as a slice or in order, for one rank
        of a tensor-parallel group; None is all of them. noise: the noise level, 0 to 1, for
        settings that have noise bands.
        """
        layer = self.layers.get(layer_name)
        if layer is None:
            near = get_close_matches(layer_name, self.layers, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"layer_name must match exactly, got {layer_name!r}{hint}")
        layer = layer.at_noise(noise)
        if not layer.heads:
            return self.default
        n = len(layer.heads)
        heads = slice(None) if heads is None else heads
        chosen = list(range(*heads.indices(n))) if isinstance(heads, slice) else list(heads)
        if not chosen or not all(0 <= h < n for h in chosen):
            raise ValueError(
                f"heads must be some of the {n} heads of {layer_name}, 0 to {n - 1}; got {heads!r}"
            )
        return replace(layer, heads=tuple(layer.heads[h] for h in chosen)).recipe()

    def mismatches(self, model: nn.Module) -> list[str]:
        """Why this profile does not fit a model, one sentence each; empty where it fits."""
        reasons = self.model.differences(fingerprint(model))
        there = dict(model.named_modules())
        missing = [name for name in self.layers if name not in there]
        if missing:
            reasons.append(f"it has no module {missing[0]} (and {len(missing) - 1} more)")
        return reasons

    def check(self, model: nn.Module, force: bool = False) -> None:
        """Refuse a model that the profile was not tuned for, with the reasons; `force` only warns.

        A missing module is refused even so: its settings would have nowhere to go.
        """
        reasons = self.mismatches(model)
        if not reasons:
            return
        message = f"this profile is not for the {type(model).__name__} given: {'; '.join(reasons)}"
        if not force or reasons[-1].startswith("it has no module"):
            raise ValueError(f"{message}. Tune this model, or give force=True to use it anyway")
        warnings.warn(f"{message}; used anyway because of force=True", stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        target: dict[str, Any] = {"output": self.output}
        if self.bounds is not None:
            target = {"bounds": {"l1": self.bounds[0], "l2": self.bounds[1]}}
        return {
            "format": OUTPUT_FORMAT if self.bounds is None else FORMAT,
            "sparge": self.version,
            "date": self.date,
            "machine": self.machine,
            "model": ({"name": self.name} if self.name else {}) | asdict(self.model),
            **target,
            "calibration": dict(self.calibration),
            "default": self.default.to_dict(),
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        if isinstance(data, Mapping) and (came := data.get("format")) not in READS:
            other_version = isinstance(came, str) and came.startswith(f"{FAMILY}/")
            way_out = "upgrade sparge, or tune again" if other_version else "sparge tune writes one"
            raise ValueError(
                f"its format is {came!r}, and this sparge reads {' and '.join(READS)}; {way_out}"
            )
        names = ("format", "sparge", "date", "machine", "model", "calibration", "default", "layers")
        by_output = isinstance(data, Mapping) and data.get("format") == OUTPUT_FORMAT
        target = "output" if by_output else "bounds"
        fields = Fields(data, "", (*names, target), what="the profile")
        model = fields.get("model", dict)
        try:
            default = Recipe.from_dict(fields.get("default"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"default: {error}") from None
        return cls(
            layers={
                name: LayerSettings.from_dict(layer, where=f"layers[{name!r}]")
                for name, layer in fields.get("layers", dict).items()
            },
            model=Fingerprint.from_dict(model),
            bounds=None if by_output else _bounds(fields),
            default=default,
            name=Fields(model, "model", tuple(model), what="model").get("name", str, ""),
            version=fields.get("sparge", str, ""),
            date=fields.get("date", str, ""),
            machine=fields.get("machine", str, ""),
            calibration=fields.get("calibration", dict, {}),
            output=_output(fields) if by_output else None,
        )

    def to_json(self) -> str:
        """Stable order, one head on a line: files can be compared with any diff."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        # Nothing inside a string matches: quotes and line breaks are escaped there.
        heads = r'{\s+"head": [^{}]*\n *}'
        return re.sub(heads, lambda head: json.dumps(json.loads(head[0])), text) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        replace_file(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file that `save` wrote; ValueError says what is wrong with it, and where."""
        try:
            return cls.from_dict(parse_json(read_json_text(path), "it is damaged: the file"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is not a usable profile: {error}") from None
