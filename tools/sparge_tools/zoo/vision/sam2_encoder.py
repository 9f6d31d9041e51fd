"""The image encoder of SAM 2: a Hiera transformer and the neck that joins its stages.

    image [B, 3, 1024, 1024] → patches 256×256 → stages of 256², 128², 64² and 32² tokens → Features

Tokens are kept as a grid [B, H, W, C]. Most blocks attend inside windows; `global_blocks` attend to
the whole grid of their stage. The first block of a stage halves the grid by pooling its queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sam2_config import Sam2Config


@dataclass(frozen=True)
class Features:
    """What the mask decoder reads: `image` at the stride 16, and two finer levels.

    image: [B, neck_width, H/16, W/16]
    middle: [B, neck_width / 4, H/8, W/8]
    fine: [B, neck_width / 8, H/4, W/4]
    """

    image: Tensor
    middle: Tensor
    fine: Tensor


def pool_grid(x: Tensor) -> Tensor:
    """The maximum of each 2×2 of a grid [B, H, W, C]."""
    return F.max_pool2d(x.permute(0, 3, 1, 2), kernel_size=2).permute(0, 2, 3, 1)


def split_windows(x: Tensor, window: int) -> Tensor:
    """[B, H, W, C] → [B × windows, window, window, C]; zeros fill up the last windows."""
    B, H, W, C = x.shape
    x = F.pad(x, (0, 0, 0, -W % window, 0, -H % window))
    rows, columns = -(-H // window), -(-W // window)
    x = x.view(B, rows, window, columns, window, C).transpose(2, 3)
    return x.reshape(B * rows * columns, window, window, C)


def join_windows(windows: Tensor, *, batch: int, height: int, width: int) -> Tensor:
    """The inverse of `split_windows`; returns [batch, height, width, C] without the filling."""
    window, C = windows.shape[1], windows.shape[3]
    rows, columns = -(-height // window), -(-width // window)
    x = windows.view(batch, rows, columns, window, window, C).transpose(2, 3)
    x = x.reshape(batch, rows * window, columns * window, C)
    return x[:, :height, :width]


class GridAttention(nn.Module):
    """Self-attention over all tokens of a grid; with `pools`, each 2×2 of the queries is one."""

    def __init__(self, width_in: int, width: int, *, heads: int, pools: bool) -> None:
        super().__init__()
        self.heads, self.pools = heads, pools
        self.qkv = nn.Linear(width_in, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.pools:
            query = pool_grid(query)
        B, H, W, _ = query.shape
        q, k, v = (
            x.reshape(B, -1, self.heads, x.shape[3] // self.heads).transpose(1, 2)
            for x in (query, key, value)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(B, H, W, -1))


class HieraBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). With `pools`, half the grid comes out.

    window: side of the attention windows on the grid that comes in; 0 attends to the whole grid.
    """

    def __init__(self, width_in: int, width: int, *, heads: int, window: int, pools: bool) -> None:
        super().__init__()
        self.window, self.pools = window, pools
        self.norm1 = nn.LayerNorm(width_in, eps=1e-6)
        self.widen = nn.Linear(width_in, width) if width_in != width else None
        self.attention = GridAttention(width_in, width, heads=heads, pools=pools)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        # The residual of a block that widens is made from the normed tokens, as it was trained.
        residual = x if self.widen is None else self.widen(normed)
        residual = pool_grid(residual) if self.pools else residual
        x = residual + self._attend(normed)
        return x + self.mlp(self.norm2(x))

    def _attend(self, x: Tensor) -> Tensor:
        if not self.window:
            return self.attention(x)
        B, H, W, _ = x.shape
        attended = self.attention(split_windows(x, self.window))
        shrink = 2 if self.pools else 1
        return join_windows(attended, batch=B, height=H // shrink, width=W // shrink)


class ImageEncoder(nn.Module):
    """Hiera and its neck. `forward` returns `Features` of a normalized image."""

    def __init__(self, config: Sam2Config) -> None:
        super().__init__()
        width, grid = config.width, config.image_size // 4
        self.patches = nn.Conv2d(3, width, kernel_size=7, stride=4, padding=3)
        self.positions = nn.Parameter(torch.zeros(1, width, grid, grid))
        self.blocks = nn.ModuleList(
            HieraBlock(
                block.width_in,
                block.width,
                heads=block.heads,
                window=block.window,
                pools=block.pools,
            )
            for block in config.blocks()
        )
        self.ends = config.stage_ends()
        neck = config.neck_width
        self.neck = nn.ModuleList(
            nn.Conv2d(width * 2**stage, neck, kernel_size=1) for stage in range(len(self.ends))
        )
        # Added to the features of a single image, which has no memory of earlier frames.
        self.no_memory = nn.Parameter(torch.zeros(1, neck, 1, 1))
        self.to_fine = nn.Conv2d(neck, neck // 8, kernel_size=1)
        self.to_middle = nn.Conv2d(neck, neck // 4, kernel_size=1)

    def forward(self, image: Tensor) -> Features:
        x = (self.patches(image) + self.positions).permute(0, 2, 3, 1)
        stages = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.ends:
                stages.append(x.permute(0, 3, 1, 2))
        fine, middle, coarse, coarsest = (
            lateral(stage) for lateral, stage in zip(self.neck, stages, strict=True)
        )
        # Only the stride-16 level takes from the level below it.
        coarse = coarse + F.interpolate(coarsest, scale_factor=2.0, mode="nearest")
        return Features(
            image=coarse + self.no_memory, middle=self.to_middle(middle), fine=self.to_fine(fine)
        )
