"""NOUN tuned settings of one model, per layer and head, with what they reach and where they came
from: a JSON file that people can read, compare and share.

Layers go by the name of their attention module, matched exactly; heads by their index in the whole
model, so that a rank of a tensor-parallel group asks for its own. Nothing in the file is ever run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .profileschema import FAMILY, FORMAT, SCHEMA, check_document
from .recipe import DEFAULT, KeepMass, Recipe
from .support.atomic_files import replace_file

SAMPLES = 16
"""Numbers of each weight that go into the digest."""
RECIPE_FIELDS = ("predictor", "precision", "sink_blocks", "local_blocks", "sample_rows", "protect")
_SHAPES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_size": "hidden_size",
}


@dataclass(frozen=True)
class HeadSettings:
    """One head: what it keeps, and what that gave on the calibration inputs.

    mass: 1.0 is a dense head. density, pv_skipped: means over the inputs. error: relative L1
    against dense attention, of the input where it is largest; measured by running these settings,
    and infinite (null in the file) where an output was not finite.
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
        names = ("mass", "min_similarity", "pv_skip", "density", "pv_skipped")
        return {"head": head, **{name: getattr(self, name) for name in names}, "error": error}


@dataclass(frozen=True)
class LayerSettings:
    """One attention module. No heads: it was not tuned, and runs the profile's default recipe.

    inputs, rows: calibration inputs, and query rows of each head that were measured on them.
    """

    heads: tuple[HeadSettings, ...] = ()
    predictor: str = DEFAULT.predictor
    precision: str = DEFAULT.precision
    sink_blocks: int = DEFAULT.sink_blocks
    local_blocks: int = 0
    sample_rows: int = DEFAULT.sample_rows
    protect: tuple[tuple[int, int | None], ...] = ()
    inputs: int = 0
    rows: int = 0

    @property
    def is_tuned(self) -> bool:
        return bool(self.heads)

    @property
    def density(self) -> float:
        return sum(head.density for head in self.heads) / len(self.heads) if self.heads else 1.0

    def recipe(self, heads: Iterable[int] | None = None) -> Recipe | None:
        """The recipe of these heads, in their order; None where all of them are dense."""
        chosen = self.heads if heads is None else [self.heads[h] for h in heads]
        if all(head.is_dense for head in chosen):
            return None
        similarity = tuple(head.min_similarity for head in chosen)
        pv_skip = tuple(head.pv_skip for head in chosen)
        return Recipe(
            keep=KeepMass(tuple(head.mass for head in chosen)),
            min_similarity=None if set(similarity) == {None} else similarity,
            pv_skip=None if set(pv_skip) == {None} else pv_skip,
            **{name: getattr(self, name) for name in RECIPE_FIELDS},
        )

    def to_dict(self) -> dict[str, Any]:
        if not self.is_tuned:
            return {"heads": []}
        out = {name: getattr(self, name) for name in (*RECIPE_FIELDS, "inputs", "rows")}
        out["protect"] = [list(each) for each in self.protect]
        return {**out, "heads": [head.to_dict(h) for h, head in enumerate(self.heads)]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "layer") -> LayerSettings:
        values = dict(data)
        values["protect"] = tuple(tuple(each) for each in data.get("protect", ()))
        heads = []
        for h, line in enumerate(values.pop("heads")):
            numbers = {k: v for k, v in line.items() if k not in ("head", "dense", "error")}
            error = math.inf if line["error"] is None else line["error"]
            if line["head"] != h:
                raise ValueError(f"{where}: heads must be listed as 0, 1, 2, …; got {line['head']}")
            if ("dense" in line) == ("mass" in line):
                raise ValueError(f"{where}: head {h} must have a mass or be dense, one of the two")
            heads.append(HeadSettings(**numbers, error=error))
        layer = cls(heads=tuple(heads), **values)
        if layer.is_tuned:
            try:
                layer.recipe()  # what its fields say together, such as a judge without "mean"
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from None
        return layer


@dataclass(frozen=True)
class Fingerprint:
    """Which model settings were tuned for: `fingerprint(model)`."""

    architecture: str
    shapes: Mapping[str, int]
    weights: str

    def differences(self, other: Fingerprint) -> list[str]:
        """What is different in another model, in words; empty for the same."""
        found = []
        if self.architecture != other.architecture:
            found.append(f"it is a {other.architecture}, not a {self.architecture}")
        names = list(dict.fromkeys([*self.shapes, *other.shapes]))
        for name in names:
            mine, its = self.shapes.get(name), other.shapes.get(name)
            if mine != its:
                found.append(f"{name} is {its}, not {mine}")
        if not found and self.weights and other.weights and self.weights != other.weights:
            found.append(
                "its weights are others (fine-tuned, quantized or cast to fp16, perhaps): "
                f"{other.weights[:19]}…, not {self.weights[:19]}…"
            )
        return found


@dataclass(frozen=True)
class Profile:
    """Tuned settings of one model.

    layers: by the name of the attention module. default: the recipe of layers that were not tuned.
    bounds: `(l1, l2)` of the first filter and of both; l2 None: no second filter.
    calibration: on what it was tuned, in words and numbers for people.
    """

    layers: Mapping[str, LayerSettings]
    model: Fingerprint
    bounds: tuple[float, float | None]
    default: Recipe = DEFAULT
    name: str = ""
    version: str = ""
    date: str = ""
    machine: str = ""
    calibration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def untuned(self) -> list[str]:
        return [name for name, layer in self.layers.items() if not layer.is_tuned]

    @property
    def density(self) -> float:
        """Mean over the tuned layers, each of its heads."""
        tuned = [layer.density for layer in self.layers.values() if layer.is_tuned]
        return sum(tuned) / len(tuned) if tuned else 1.0

    def recipe_for(
        self, layer_name: str, heads: slice | Iterable[int] | None = None
    ) -> Recipe | None:
        """The recipe of a layer by its whole name; None where it stays dense.

        heads: indices in the whole model of the heads that are here, as a slice or in order, for
        one rank of a tensor-parallel group; None is all of them.
        """
        layer = self.layers.get(layer_name)
        if layer is None:
            near = get_close_matches(layer_name, self.layers, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"the profile has no layer {layer_name!r}, and names must match exactly{hint}"
            )
        if not layer.is_tuned:
            return self.default
        if heads is None:
            return layer.recipe()
        n = len(layer.heads)
        chosen = list(range(*heads.indices(n))) if isinstance(heads, slice) else list(heads)
        if not chosen or not all(0 <= h < n for h in chosen):
            raise ValueError(
                f"heads must be some of the {n} heads of {layer_name}, 0 to {n - 1}; got {heads!r}"
            )
        return layer.recipe(chosen)

    def mismatches(self, model: nn.Module) -> list[str]:
        """Why this profile is not one for a model, in words; empty where it is."""
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
            raise ValueError(f"{message}. Tune this model, or give force=True if you know better")
        warnings.warn(f"{message}; used all the same, as asked", stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        model: dict[str, Any] = {"name": self.name} if self.name else {}
        model["architecture"] = self.model.architecture
        model |= {"shapes": dict(self.model.shapes), "weights": self.model.weights}
        return {
            "format": FORMAT,
            "sparge": self.version,
            "date": self.date,
            "machine": self.machine,
            "model": model,
            "bounds": {"l1": self.bounds[0], "l2": self.bounds[1]},
            "calibration": dict(self.calibration),
            "default": self.default.to_dict(),
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        if isinstance(data, Mapping) and data.get("format") != FORMAT:
            raise ValueError(_other_format(data.get("format")))
        check_document(data, SCHEMA)
        model = data["model"]
        try:
            default = Recipe.from_dict(data["default"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"default: {error}") from None
        return cls(
            layers={
                name: LayerSettings.from_dict(layer, where=f"layers[{name!r}]")
                for name, layer in data["layers"].items()
            },
            model=Fingerprint(model["architecture"], dict(model["shapes"]), model["weights"]),
            bounds=(data["bounds"]["l1"], data["bounds"]["l2"]),
            default=default,
            name=model.get("name", ""),
            version=data.get("sparge", ""),
            date=data.get("date", ""),
            machine=data.get("machine", ""),
            calibration=dict(data.get("calibration", {})),
        )

    def to_json(self) -> str:
        """Stable order, one head on a line: files can be compared with any diff."""
        heads: list[str] = []

        def mark(data: Any) -> Any:
            if isinstance(data, dict) and "head" in data:
                heads.append(json.dumps(data, allow_nan=False))
                return f"\0{len(heads) - 1}"
            if isinstance(data, dict):
                return {key: mark(value) for key, value in data.items()}
            return [mark(item) for item in data] if isinstance(data, list) else data

        text = json.dumps(mark(self.to_dict()), indent=1, ensure_ascii=False, allow_nan=False)
        for i, line in enumerate(heads):
            text = text.replace(f'"\\u0000{i}"', line, 1)
        return text + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        replace_file(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # of JSON, UTF-8 or the schema
            why = f"it is damaged ({error})" if _is_damage(error) else str(error)
            raise ValueError(f"{os.fspath(path)} is not a usable profile: {why}") from None


def fingerprint(model: nn.Module) -> Fingerprint:
    """Architecture, shapes and a digest of the weights; takes well under a second.

    The digest is SHA-256 over every parameter in order of name: its name, its shape and 16 of its
    numbers, evenly spaced, rounded to bf16. So the same weights in fp32 and bf16 have one digest;
    a change that misses all samples, or is smaller than bf16, is not seen. It is empty where the
    numbers are not here: on the meta device, or spread over a tensor-parallel group.
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


def _other_format(came: Any) -> str:
    if isinstance(came, str) and came.startswith(f"{FAMILY}/"):
        return (
            f"its format is {came!r} and this sparge reads {FORMAT!r}; it was written by another "
            "version: upgrade sparge, or tune again"
        )
    return f"its format is {came!r}, needed is {FORMAT!r}; sparge tune writes one"


def _is_damage(error: ValueError) -> bool:
    return isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
