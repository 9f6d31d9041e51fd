"""NOUN the sizes of a SAM 2 model. The defaults are Hiera-Tiny's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

STAGES = 4
PATCH_STRIDE = 4
FEATURE_STRIDE = 16
"""Pixels between neighbours of the grid that the decoder and the global blocks see."""


@dataclass(frozen=True)
class BlockSizes:
    """One transformer block. `window` is a side on the grid that comes in; 0 is the whole grid."""

    width_in: int
    width: int
    heads: int
    window: int
    pools: bool


@dataclass(frozen=True)
class Sam2Config:
    """Sizes of the encoder (Hiera and neck) and of the mask decoder.

    depths, windows: blocks and window sides of the four stages. Width and heads double from stage
    to stage. `global_blocks` counts blocks over all stages. Raises ValueError for sizes that do not
    fit together.
    """

    image_size: int = 1024
    width: int = 96
    heads: int = 1
    depths: tuple[int, ...] = (1, 2, 7, 2)
    windows: tuple[int, ...] = (8, 4, 14, 7)
    global_blocks: tuple[int, ...] = (5, 7, 9)
    neck_width: int = 256
    decoder_layers: int = 2
    decoder_heads: int = 8
    decoder_mlp: int = 2048

    def __post_init__(self) -> None:
        for name in ("depths", "windows", "global_blocks"):  # lists, if they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("depths", "windows"):
            sizes = getattr(self, name)
            if len(sizes) != STAGES or min(sizes) < 1:
                raise ValueError(f"{name} must be {STAGES} positive numbers, got {sizes}")
        if self.image_size < 32 or self.image_size % 32:
            raise ValueError(f"image_size must be a multiple of 32, got {self.image_size}")
        if self.heads < 1 or self.width % self.heads:
            needed = f"a multiple of heads = {self.heads}"
            raise ValueError(f"width must be {needed}, got {self.width}")
        if self.decoder_heads < 1 or self.neck_width % (2 * self.decoder_heads):
            needed = f"a multiple of 2 × decoder_heads = {2 * self.decoder_heads}"
            raise ValueError(f"neck_width must be {needed}, got {self.neck_width}")
        if self.neck_width % 8:
            raise ValueError(f"neck_width must be a multiple of 8, got {self.neck_width}")
        if any(window % 2 for window in self.windows[:-1]):
            needed = "even but for the last: the next stage pools inside these windows"
            raise ValueError(f"windows must be {needed}; got {self.windows}")
        n = sum(self.depths)
        if any(not 0 <= i < n for i in self.global_blocks):
            raise ValueError(f"global_blocks must be in 0 to {n - 1}, got {self.global_blocks}")

    @property
    def feature_grid(self) -> int:
        """Side of the grid that the decoder and the global blocks of the third stage see."""
        return self.image_size // FEATURE_STRIDE

    def stage_ends(self) -> tuple[int, ...]:
        """The last block of each stage."""
        return tuple(total - 1 for total in accumulate(self.depths))

    def blocks(self) -> list[BlockSizes]:
        """The blocks in order. A block that pools still has the window of the stage before it."""
        sizes: list[BlockSizes] = []
        for stage, depth in enumerate(self.depths):
            width, heads = self.width * 2**stage, self.heads * 2**stage
            for place in range(depth):
                first = stage > 0 and place == 0
                window = self.windows[stage - 1 if first else stage]
                sizes.append(
                    BlockSizes(
                        width_in=width // 2 if first else width,
                        width=width,
                        heads=heads,
                        window=0 if len(sizes) in self.global_blocks else window,
                        pools=first,
                    )
                )
        return sizes
