"""NOUN the identity of a model: its architecture, its shapes and a digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..support.json_text import Fields

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
    def from_dict(cls, data: Any, where: str = "model") -> Fingerprint:
        """From a file's object, which may hold the model's name too."""
        fields = Fields(data, where, ("name", *cls.__dataclass_fields__), what="the model")
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
