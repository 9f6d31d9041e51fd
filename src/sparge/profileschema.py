"""What a profile's file must look like: a JSON schema, and the part of JSON schema that reads it.

`SCHEMA` is plain JSON Schema (draft 2020-12), so that other programs can use it; `check_document`
understands the words that stand in it and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FORMAT = "sparge.profile/1"
FAMILY = FORMAT.split("/")[0]

_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}

HEAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["head", "error"],
    "additionalProperties": False,
    "properties": {
        "head": _COUNT,
        "dense": {"enum": [True]},
        "mass": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "min_similarity": {"type": ["number", "null"], "minimum": -1, "maximum": 1},
        "pv_skip": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "density": _SHARE,
        "pv_skipped": _SHARE,
        "error": {"type": ["number", "null"], "minimum": 0},
    },
}
LAYER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["heads"],
    "additionalProperties": False,
    "properties": {
        "predictor": {"enum": ["mean", "rows", "blend"]},
        "precision": {"enum": ["int8", "int8-fast", "half", "exact"]},
        "sink_blocks": _COUNT,
        "local_blocks": _COUNT,
        "sample_rows": {"type": "integer", "minimum": 1, "maximum": 128},
        "protect": {
            "type": "array",
            "items": {"type": "array", "items": {"type": ["integer", "null"]}},
        },
        "inputs": _COUNT,
        "rows": _COUNT,
        "heads": {"type": "array", "items": HEAD_SCHEMA},
    },
}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "sparge profile: tuned attention settings of one model",
    "type": "object",
    "required": ["format", "model", "bounds", "default", "layers"],
    "additionalProperties": False,
    "properties": {
        "format": {"enum": [FORMAT]},
        "sparge": _TEXT,
        "date": _TEXT,
        "machine": _TEXT,
        "model": {
            "type": "object",
            "required": ["architecture", "shapes", "weights"],
            "additionalProperties": False,
            "properties": {
                "name": _TEXT,
                "architecture": _TEXT,
                "shapes": {"type": "object", "additionalProperties": _COUNT},
                "weights": _TEXT,
            },
        },
        "bounds": {
            "type": "object",
            "required": ["l1", "l2"],
            "additionalProperties": False,
            "properties": {
                "l1": {"type": "number", "exclusiveMinimum": 0},
                "l2": {"type": ["number", "null"], "exclusiveMinimum": 0},
            },
        },
        "calibration": {"type": "object"},
        "default": {"type": "object"},
        "layers": {"type": "object", "additionalProperties": LAYER_SCHEMA},
    },
}
_KINDS: dict[str, Any] = {
    "object": Mapping,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}


def check_document(data: Any, schema: Mapping[str, Any], where: str = "") -> None:
    """Raise a ValueError that names the first place where `data` is not what the schema says."""
    at = where or "the profile"
    if "enum" in schema:
        # By kind too: to Python 1 is True.
        if not any(data is x or (type(data) is type(x) and data == x) for x in schema["enum"]):
            choices = ", ".join(map(repr, schema["enum"]))
            raise ValueError(f"{at} must be {choices}, got {_short(data)}")
        return
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(_is(data, kind) for kind in kinds):
        raise ValueError(f"{at} must be {' or '.join(kinds)}, got {_short(data)}")
    if isinstance(data, int | float):
        _check_number(data, schema, at)
    elif isinstance(data, list):
        for i, item in enumerate(data):
            check_document(item, schema["items"], f"{where}[{i}]")
    elif isinstance(data, Mapping):
        _check_object(data, schema, where, at)


def _check_object(data: Mapping[str, Any], schema: Mapping[str, Any], where: str, at: str) -> None:
    missing = [name for name in schema.get("required", ()) if name not in data]
    if missing:
        raise ValueError(f"{at} has no {', '.join(missing)}")
    known = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name, value in data.items():
        place = f"{where}.{name}" if where else str(name)
        if name in known:
            check_document(value, known[name], place)
        elif others is False:
            raise ValueError(f"{at} has an unknown field {name!r}; known are {', '.join(known)}")
        elif others is not True:
            check_document(value, others, f"{where}[{name!r}]")


def _check_number(number: float, schema: Mapping[str, Any], at: str) -> None:
    if not math.isfinite(number):
        raise ValueError(f"{at} must be finite, got {number}")
    for word, fits, needed in (
        ("minimum", number >= schema.get("minimum", number), "at least"),
        ("maximum", number <= schema.get("maximum", number), "at most"),
        ("exclusiveMinimum", number > schema.get("exclusiveMinimum", -math.inf), "greater than"),
    ):
        if not fits:
            raise ValueError(f"{at} must be {needed} {schema[word]}, got {number}")


def _is(data: Any, kind: str) -> bool:
    return isinstance(data, _KINDS[kind]) and not isinstance(data, bool)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}…"
