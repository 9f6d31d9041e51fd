"""A diffusion UNet that makes terrain: noise and a difficulty in, a height map out, in one step.

A UNet with residual blocks, as image diffusion uses them, distilled into a consistency model. On
the three coarsest levels each residual block is followed by self-attention over all positions,
without position embeddings. The weights are those of `adaptive-terrain-diffusion`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIGMA_MAX = 80.0
"""The noise level of the one step."""
SIGMA_MIN, SIGMA_DATA = 0.002, 0.5
HIGHEST, ASINH_SCALE = 22.16864013671875, 0.1
"""Heights in metres are stored as asinh(height / ASINH_SCALE), scaled to [-1, 1]."""


@dataclass(frozen=True)
class TerrainConfig:
    """The shape of the net. The size of an image must be a multiple of `multiple`."""

    channels: int = 32
    multipliers: tuple[int, ...] = (1, 1, 2, 3, 4)  # of the channels, from fine to coarse
    blocks: int = 4  # residual blocks on each level on the way down; one more on the way up
    attention_levels: tuple[int, ...] = (2, 3, 4)
    head_dim: int = 32
    groups: int = 32

    def __post_init__(self) -> None:
        for name in ("multipliers", "attention_levels"):  # lists, if they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def embedding(self) -> int:
        return 4 * self.channels

    @property
    def multiple(self) -> int:
        return int(2 ** (len(self.multipliers) - 1))

    def width(self, level: int) -> int:
        return self.channels * self.multipliers[level]


class ResidualBlock(nn.Module):
    """Two convolutions, scaled and shifted by the embedding; `resample` halves or doubles first."""

    def __init__(self, config: TerrainConfig, n_in: int, n_out: int, resample: str = "") -> None:
        super().__init__()
        self.resample = resample
        self.norm_in = nn.GroupNorm(config.groups, n_in)
        self.conv_in = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.modulate = nn.Linear(config.embedding, 2 * n_out)
        self.norm_out = nn.GroupNorm(config.groups, n_out)
        self.conv_out = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.skip = nn.Identity() if n_in == n_out else nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        inner = self._resampled(F.silu(self.norm_in(x)))
        scale, shift = self.modulate(F.silu(embedding))[..., None, None].chunk(2, dim=1)
        inner = self.norm_out(self.conv_in(inner)) * (1 + scale) + shift
        return self.skip(self._resampled(x)) + self.conv_out(F.silu(inner))

    def _resampled(self, x: Tensor) -> Tensor:
        if self.resample == "half":
            return F.avg_pool2d(x, 2)
        return F.interpolate(x, scale_factor=2.0) if self.resample == "double" else x


class Attention(nn.Module):
    """Self-attention over all positions of an image, added to it."""

    def __init__(self, config: TerrainConfig, channels: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm = nn.GroupNorm(config.groups, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        heads = self.qkv(tokens).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # The original multiplies q and k by head_dim**-0.25 each, which is SDPA's own scale.
        attended = F.scaled_dot_product_attention(query, key, value)
        tokens = self.out(attended.transpose(1, 2).flatten(2))
        return x + tokens.transpose(1, 2).reshape(x.shape)


class Level(nn.Module):
    """Residual blocks of one resolution, attention after each, and a way to the next level."""

    def __init__(
        self, config: TerrainConfig, level: int, widths_in: list[int], resample: str
    ) -> None:
        super().__init__()
        width = config.width(level)
        self.blocks = nn.ModuleList(ResidualBlock(config, n, width) for n in widths_in)
        attends = level in config.attention_levels
        self.attention = nn.ModuleList(Attention(config, width) for _ in widths_in if attends)
        self.resample = ResidualBlock(config, width, width, resample) if resample else None

    def step(self, i: int, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.blocks[i](x, embedding)
        return self.attention[i](x) if self.attention else x


class Terrain(nn.Module):
    """The consistency model: `noisy` at noise level `sigma` to an image in [-1, 1] in one step."""

    def __init__(self, config: TerrainConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or TerrainConfig()
        size, last = config.embedding, len(config.multipliers) - 1
        self.noise_embedding = _two_layers(config.channels, size)
        self.difficulty_embedding = _two_layers(1, size)
        self.stem = nn.Conv2d(1, config.channels, 3, padding=1)
        self.down, self.up, width, skips = nn.ModuleList(), nn.ModuleList(), config.channels, []
        skips.append(width)
        for level in range(last + 1):
            widths_in = [width, *[config.width(level)] * (config.blocks - 1)]
            width = config.width(level)
            self.down.append(Level(config, level, widths_in, "half" if level < last else ""))
            skips += [width] * (config.blocks + (level < last))
        self.middle = Level(config, last, [width], "")
        self.middle_out = ResidualBlock(config, width, width)
        for level in reversed(range(last + 1)):
            widths_in = []
            for _ in range(config.blocks + 1):
                widths_in.append(width + skips.pop())
                width = config.width(level)
            self.up.insert(0, Level(config, level, widths_in, "double" if level else ""))
        self.out_norm = nn.GroupNorm(config.groups, width)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor, sigma: Tensor, difficulty: Tensor) -> Tensor:
        """[B, 1, H, W] in [-1, 1]. sigma and difficulty (0 to 1) are [B], one for each image.

        Raises ValueError if H or W is not a multiple of `config.multiple`.
        """
        if any(side % self.config.multiple for side in noisy.shape[-2:]):
            raise ValueError(
                f"noisy must have sides that are multiples of {self.config.multiple}, got "
                f"{tuple(noisy.shape[-2:])}"
            )
        sigma = sigma.float()[:, None, None, None]
        keep = SIGMA_DATA**2 / ((sigma - SIGMA_MIN) ** 2 + SIGMA_DATA**2)
        size = (sigma**2 + SIGMA_DATA**2).sqrt()
        scaled = (noisy / size).to(self.out.weight.dtype)
        net = self._net(scaled, self._embed(sigma.flatten(), difficulty))
        return (net * SIGMA_DATA * (sigma - SIGMA_MIN) / size + keep * noisy).clamp(-1, 1)

    def _embed(self, sigma: Tensor, difficulty: Tensor) -> Tensor:
        half = self.config.channels // 2
        # In float32 in any case: angles reach a thousand.
        rates = torch.exp(torch.arange(half, device=sigma.device) * (-math.log(10_000) / half))
        angles = 250 * sigma.log()[:, None] * rates
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.out.weight.dtype)
        return self.noise_embedding(waves) + self.difficulty_embedding(
            difficulty[:, None].to(waves.dtype)
        )

    def _net(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.stem(x)
        skips = [x]
        for level in self.down:
            assert isinstance(level, Level)
            for i in range(len(level.blocks)):
                x = level.step(i, x, embedding)
                skips.append(x)
            if level.resample is not None:
                x = level.resample(x, embedding)
                skips.append(x)
        assert isinstance(self.middle, Level)
        x = self.middle_out(self.middle.step(0, x, embedding), embedding)
        for level in reversed(self.up):
            assert isinstance(level, Level)
            for i in range(len(level.blocks)):
                x = level.step(i, torch.cat([x, skips.pop()], dim=1), embedding)
            if level.resample is not None:
                x = level.resample(x, embedding)
        return self.out(F.silu(self.out_norm(x)))


def heights_of(denoised: Tensor) -> Tensor:
    """Heights in metres of the model's result in [-1, 1]."""
    unit = (denoised.float().clamp(-1, 1) + 1) / 2
    return ASINH_SCALE * torch.sinh(unit * math.asinh(HIGHEST / ASINH_SCALE))


def _two_layers(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, n_out), nn.SiLU(), nn.Linear(n_out, n_out))
