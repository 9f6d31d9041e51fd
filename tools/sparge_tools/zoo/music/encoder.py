"""A bidirectional transformer over notes, trained to fill in masked tokens.

Pre-norm layers with rotary positions on the first half of each head. The weights are those of
`midisim`, whose checkpoint is a plain state dict.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class MusicConfig:
    """The shape of the encoder. Half of each head's channels are rotated."""

    vocabulary: int = 386
    width: int = 512
    layers: int = 8
    heads: int = 8
    inner: int = 2048
    tokens: int = 3072  # the longest sequence it was trained on

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    def __init__(self, config: MusicConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, angles), rotate(key, angles)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: MusicConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.inner_norm = nn.LayerNorm(config.width, bias=False)
        self.expand = nn.Linear(config.width, config.inner)
        self.contract = nn.Linear(config.inner, config.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.contract(F.gelu(self.expand(self.inner_norm(x))))


class MusicEncoder(nn.Module):
    """Tokens [B, L] to logits [B, L, vocabulary]. Every token sees all others."""

    def __init__(self, config: MusicConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MusicConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotated = self.config.head_dim // 2
        # In float32 in any case: the angles are positions.
        pairs = torch.arange(0, rotated, 2, device=x.device, dtype=torch.float32)
        positions = torch.arange(tokens.shape[-1], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * ROTARY_BASE ** (-pairs / rotated)
        for layer in self.layers:
            x = layer(x, angles)
        return self.logits(self.norm(x))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the first channels of `x` by `angles` [L, pairs]."""
    n = 2 * angles.shape[-1]
    a, b = x[..., :n].float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., n:]], dim=-1)


ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out": "out"}
INNER = {"ff.0.0": "expand", "ff.2": "contract"}
"""Names in the checkpoint, and here."""
OTHERS = {
    "token_emb.emb.weight": "embedding.weight",
    "attn_layers.final_norm.gamma": "norm.weight",
    "to_logits.weight": "logits.weight",
}
COMPUTED = "attn_layers.rotary_pos_emb.inv_freq"


def convert_music(file: bytes, config: MusicConfig | None = None) -> dict[str, Tensor]:
    """The state dict of `MusicEncoder(config)` from a checkpoint. Nothing in it is run.

    Raises ValueError if the file is no checkpoint or not of this encoder.
    """
    try:
        stored = torch.load(io.BytesIO(file), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"the file is no checkpoint of weights alone: {error}") from error
    if not isinstance(stored, dict) or not all(isinstance(v, Tensor) for v in stored.values()):
        raise ValueError("the file is no state dict, a mapping of names to tensors")
    # The checkpoint holds the gains of norms minus one.
    state = {
        _rename(name): tensor.float() + float(name.endswith("gamma"))
        for name, tensor in stored.items()
        if name != COMPUTED
    }
    with torch.device("meta"):
        needed = {name: t.shape for name, t in MusicEncoder(config).state_dict().items()}
    if (found := {name: t.shape for name, t in state.items()}) != needed:
        odd = sorted(name for name in found | needed if found.get(name) != needed.get(name))
        raise ValueError(
            f"the file is no music encoder: {odd[0]} is {found.get(odd[0])}, "
            f"needed is {needed.get(odd[0])}"
        )
    return state


def _rename(name: str) -> str:
    """The file counts attention and inner layers as layers of their own."""
    parts = re.fullmatch(r"attn_layers\.layers\.(\d+)\.(0\.0|1)\.(.+)", name)
    if parts is None:
        return OTHERS.get(name, name)
    i, inner = divmod(int(parts[1]), 2)
    layer, _, kind = parts[3].rpartition(".")
    if kind == "gamma":
        return f"layers.{i}.{'inner' if inner else 'attention'}_norm.weight"
    if inner:
        return f"layers.{i}.{INNER.get(layer, layer)}.{kind}"
    return f"layers.{i}.attention.{ATTENTION.get(layer, layer)}.{kind}"
