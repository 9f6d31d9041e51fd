"""What the terrain model is measured by: the height map that it makes of seeded noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .task import need_positive, relative_l2
from .terrain import SIGMA_MAX, TerrainConfig, heights_of

if TYPE_CHECKING:
    from .task import Picture

MULTIPLE = TerrainConfig().multiple
DIFFICULTIES = (0.5, 0.8, 0.2, 1.0)
"""0 is flat and 1 the roughest; inputs take them in turn."""
LOW, HIGH = (96, 125, 79), (236, 229, 214)
"""Colours of the lowest and of the highest place."""


@dataclass(frozen=True)
class Noise:
    """Noise [1, 1, size, size] of unit variance, and the difficulty of the terrain, 0 to 1."""

    seed: int
    difficulty: float
    noise: Tensor


@dataclass(frozen=True)
class TerrainTask:
    """Terrain of size×size places in one step; compare by the relative L2 of the heights.

    The model was trained at 128; at 256 its nine largest layers have 4096 tokens.
    """

    size: int = 256

    def __post_init__(self) -> None:
        if self.size < MULTIPLE or self.size % MULTIPLE:
            raise ValueError(f"size must be a multiple of {MULTIPLE}, got {self.size}")

    @property
    def about(self) -> str:
        return f"terrain of {self.size}×{self.size} places; relative L2 of its heights with dense"

    @property
    def metric(self) -> str:
        return "relative_l2"

    def inputs(self, n: int, seed: int = 0) -> list[Noise]:
        """n fields of noise, of the seeds `seed`, `seed` + 1, and so on."""
        need_positive(n)
        return [self._noise(seed + i) for i in range(n)]

    def _noise(self, seed: int) -> Noise:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, 1, self.size, self.size, generator=generator)
        return Noise(seed, DIFFICULTIES[seed % len(DIFFICULTIES)], noise)

    @torch.no_grad()
    def run(self, model: nn.Module, given: Noise) -> Tensor:
        """Heights in metres, float32 [size, size]."""
        device = next(model.parameters()).device
        sigma, difficulty = torch.tensor([[SIGMA_MAX], [given.difficulty]], device=device)
        return heights_of(model(SIGMA_MAX * given.noise.to(device), sigma, difficulty))[0, 0].cpu()

    def compare(self, dense: Tensor, sparse: Tensor) -> dict[str, float]:
        """relative_l2: of the heights. largest_error: of one height, in metres."""
        largest = (dense - sparse).abs().max().item()
        return {"relative_l2": relative_l2(dense, sparse), "largest_error": largest}

    def picture(self, given: Noise, result: Tensor) -> Picture:
        """Shaded relief: coloured by height, lit from the upper left."""
        return shade(result)

    def caption(self, given: Noise) -> str:
        return f"seed {given.seed}, difficulty {given.difficulty:g}"


def shade(heights: Tensor) -> Picture:
    """The shaded relief of heights [H, W], as uint8 [H, W, 3].

    The steepness is in units of the range of heights, so that flat terrain shows its shape as well.
    """
    import numpy as np

    z = heights.double().numpy()
    span = max(float(z.max() - z.min()), 1e-9)
    dy, dx = np.gradient(z * (max(z.shape) / 12 / span))
    # The cosine of the angle between the surface's normal and the light, which is 45° high.
    light = (dx + dy + 2**0.5) / (2 * np.sqrt(1 + dx**2 + dy**2))
    share = ((z - z.min()) / span)[..., None]
    colour = np.array(LOW) * (1 - share) + np.array(HIGH) * share
    shaded = colour * (0.35 + 0.9 * np.clip(light, 0, 1))[..., None]
    return np.clip(shaded, 0, 255).round().astype(np.uint8)
