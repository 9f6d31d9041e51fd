"""Small modules that are of no framework: their attention is `F.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRID = (3, 8, 10)
TEXT = 9


def in_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (in_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.q, self.kv = heads, nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        key, value = (in_heads(part, self.heads) for part in self.kv(text).chunk(2, -1))
        out = F.scaled_dot_product_attention(in_heads(self.q(x), self.heads), key, value)
        return out.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attn1, self.attn2 = SelfAttention(width), CrossAttention(width)
        self.ff = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.table = nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        shift, gate = (self.table + time[:, None]).unsqueeze(2).unbind(1)
        x = x + gate * self.attn1(self.norms[0](x) + shift)
        x = x + self.attn2(self.norms[1](x), text)
        return x + self.ff(self.norms[2](x))


class VideoTransformer(nn.Module):
    """3-D full attention over the T×H×W tokens of a video, and cross-attention to a text."""

    def __init__(self, channels: int = 4, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv3d(channels, width, (1, 2, 2), (1, 2, 2))
        self.caption, self.time = nn.Linear(12, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 4 * channels)

    def forward(self, video: Tensor, text: Tensor, timestep: Tensor) -> Tensor:
        x = self.patch(video)
        _, _, T, H, W = x.shape
        positions = torch.linspace(0, 9, T * H * W).sin()[None, :, None]
        x = x.flatten(2).transpose(1, 2) + positions
        text, time = self.caption(text), self.time(timestep[:, None])
        for block in self.blocks:
            x = block(x, text, time)
        return self.last(x)


def video_transformer(blocks: int = 2) -> VideoTransformer:
    torch.manual_seed(0)
    model = VideoTransformer(blocks=blocks).eval().requires_grad_(False)
    for block in model.blocks:
        block.attn1.qkv.weight.mul_(3.0)
        block.attn2.q.weight.mul_(3.0)
    return model


def video_inputs() -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    T, H, W = GRID
    video = torch.randn(2, 4, T, 2 * H, 2 * W, generator=make)
    return video, torch.randn(2, TEXT, 12, generator=make), torch.tensor([0.5, 0.25])


class TwoCalls(nn.Module):
    """Two attention calls in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        once = F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(once, x, once)


def attend_here(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend_here(x)


KERNELS = {"sdpa": lambda x: F.scaled_dot_product_attention(x, x, x)}


class ByRegistry(nn.Module):
    """Reading its code does not show which function runs."""

    def forward(self, x: Tensor) -> Tensor:
        return KERNELS["sdpa"](x)


class ByEinsum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", x, x) / x.shape[-1] ** 0.5
        return scores.softmax(-1) @ x


class ByTorch(nn.Module):
    """`nn.MultiheadAttention`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2)
        return in_heads(self.mha(rows, rows, rows, need_weights=False)[0], x.shape[1])


class Mixed(nn.Module):
    """One of each kind, in a row."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x
