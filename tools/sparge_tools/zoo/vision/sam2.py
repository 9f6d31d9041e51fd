"""SAM 2 for still images: an image and points on an object → masks of the object.

    model = Sam2()
    model.load_state_dict(convert_sam2(encoder_ort, decoder_onnx))
    masks = model.eval()(prepare_image(pixels), points, labels)

Plain modules; every attention goes through `F.scaled_dot_product_attention`. Blocks 5, 7 and 9 of
the encoder attend to a whole grid of 64×64 tokens (4 heads of 96); all others have windows.

With the published weights, on two photographs and four prompts, features agree with onnxruntime to
3e-6 and mask logits to 1.5e-6 (relative L2), and no pixel of a mask differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAGES = 4
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
        self.blocks = nn.ModuleList(HieraBlock(**vars(block)) for block in config.blocks())
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


MASK_TOKENS = 4
"""One for a single mask, which is not used here, and three for an ambiguous prompt."""
LOGIT_LIMIT = 32.0


class Masks(NamedTuple):
    """logits: [B, 3, H/4, W/4], positive inside. expected_iou: [B, 3]."""

    logits: Tensor
    expected_iou: Tensor


class ChannelNorm(nn.Module):
    """Layer norm over the channels of [B, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.weight.shape, self.weight, self.bias, eps=1e-6)
        return x.permute(0, 3, 1, 2)


class TokenAttention(nn.Module):
    """Attention of [B, Lq, width] to [B, Lk, width], in `inner` channels."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.out = nn.Linear(inner, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for x in (self.query(query), self.key(key), self.value(value))
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2))


class TwoWayLayer(nn.Module):
    """Tokens attend to themselves and to the image; then the image attends to the tokens.

    Positions are added wherever tokens are compared. The first layer's tokens are positions
    themselves, so `first` compares them as they are and has no residual there.
    """

    def __init__(self, config: Sam2Config, *, first: bool) -> None:
        super().__init__()
        width, heads = config.neck_width, config.decoder_heads
        self.first = first
        self.self_attention = TokenAttention(width, width, heads)
        self.token_to_image = TokenAttention(width, width // 2, heads)
        self.image_to_token = TokenAttention(width, width // 2, heads)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, config.decoder_mlp), nn.ReLU(), nn.Linear(config.decoder_mlp, width)
        )

    def forward(
        self, tokens: Tensor, image: Tensor, token_positions: Tensor, image_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        placed = tokens if self.first else tokens + token_positions
        attended = self.self_attention(placed, placed, tokens)
        tokens = self.norm1(attended if self.first else tokens + attended)
        placed_image = image + image_positions
        attended = self.token_to_image(tokens + token_positions, placed_image, image)
        tokens = self.norm2(tokens + attended)
        tokens = self.norm3(tokens + self.mlp(tokens))
        attended = self.image_to_token(placed_image, tokens + token_positions, tokens)
        return tokens, self.norm4(image + attended)


def three_layers(width: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width_out),
    )


class PointEncoder(nn.Module):
    """Points as tokens: random Fourier features of the place, plus a vector of the label."""

    def __init__(self, config: Sam2Config) -> None:
        super().__init__()
        width = config.neck_width
        self.image_size = config.image_size
        self.frequencies = nn.Parameter(torch.randn(2, width // 2))
        self.background = nn.Parameter(torch.zeros(width))
        self.object = nn.Parameter(torch.zeros(width))
        self.no_point = nn.Parameter(torch.zeros(width))

    def encode(self, places: Tensor) -> Tensor:
        """Fourier features [..., width] of places (x, y) in 0…1."""
        # In float32: the phases are many turns, whose fractions bfloat16 would lose.
        phase = 2 * torch.pi * ((2 * places.float() - 1) @ self.frequencies.float())
        return torch.cat([phase.sin(), phase.cos()], dim=-1).to(self.frequencies.dtype)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """Tokens [B, N + 1, width]; the last one stands for the box that was not given."""
        places = (points.float() + 0.5) / self.image_size  # the middle of the pixel
        tokens = self.encode(places) + torch.where(
            labels[..., None] > 0, self.object, self.background
        )
        absent = self.no_point.expand(len(points), 1, -1)
        return torch.cat([tokens, absent], dim=1)


class MaskDecoder(nn.Module):
    """`forward` returns the three masks of a prompt of points, in pixels of the encoder's image.

    points: [B, N, 2] as (x, y). labels: [B, N], 1 on the object and 0 on the background.
    """

    def __init__(self, config: Sam2Config) -> None:
        super().__init__()
        width = config.neck_width
        self.points = PointEncoder(config)
        self.no_mask = nn.Parameter(torch.zeros(1, width, 1, 1))
        # In order: whether there is an object (its head is not in use here), IoU, masks.
        self.tokens = nn.Parameter(torch.zeros(1, 2 + MASK_TOKENS, width))
        self.layers = nn.ModuleList(
            TwoWayLayer(config, first=i == 0) for i in range(config.decoder_layers)
        )
        self.final_attention = TokenAttention(width, width // 2, config.decoder_heads)
        self.final_norm = nn.LayerNorm(width)
        self.to_middle = nn.ConvTranspose2d(width, width // 4, kernel_size=2, stride=2)
        self.middle_norm = ChannelNorm(width // 4)
        self.to_fine = nn.ConvTranspose2d(width // 4, width // 8, kernel_size=2, stride=2)
        self.filters = nn.ModuleList(three_layers(width, width // 8) for _ in range(MASK_TOKENS))
        self.iou = three_layers(width, MASK_TOKENS)

    def forward(self, features: Features, points: Tensor, labels: Tensor) -> Masks:
        B, _, H, W = features.image.shape
        prompt = torch.cat([self.tokens.expand(B, -1, -1), self.points(points, labels)], dim=1)
        positions = self._image_positions(H, W)
        tokens, image = prompt, (features.image + self.no_mask).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens, image = layer(tokens, image, prompt, positions)
        attended = self.final_attention(tokens + prompt, image + positions, image)
        tokens = self.final_norm(tokens + attended)
        pixels = self._upscale(image.transpose(1, 2).unflatten(2, (H, W)), features)
        # The first mask token and its IoU are for prompts that are not ambiguous.
        filters = torch.stack(
            [head(tokens[:, 2 + i]) for i, head in enumerate(self.filters) if i > 0], dim=1
        )
        logits = torch.einsum("bmc,bchw->bmhw", filters, pixels)
        expected = self.iou(tokens[:, 1]).sigmoid()[:, 1:]
        return Masks(logits.clamp(-LOGIT_LIMIT, LOGIT_LIMIT), expected)

    def _image_positions(self, H: int, W: int) -> Tensor:
        device = self.tokens.device
        y = (torch.arange(H, device=device) + 0.5) / H
        x = (torch.arange(W, device=device) + 0.5) / W
        rows, columns = torch.meshgrid(y, x, indexing="ij")
        return self.points.encode(torch.stack([columns, rows], dim=-1).view(1, H * W, 2))

    def _upscale(self, image: Tensor, features: Features) -> Tensor:
        middle = F.gelu(self.middle_norm(self.to_middle(image) + features.middle))
        return F.gelu(self.to_fine(middle) + features.fine)


__all__ = ["Features", "Masks", "Sam2", "Sam2Config", "prepare_image"]

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


def prepare_image(pixels: Tensor, *, size: int = 1024) -> Tensor:
    """Pixels uint8 [H, W, 3] → normalized float32 [1, 3, size, size].

    Both sides are stretched to `size`, as the model was trained. Raises TypeError or ValueError for
    other pixels.
    """
    if pixels.dtype != torch.uint8:
        raise TypeError(f"pixels must be uint8 in 0…255, got {pixels.dtype}")
    if pixels.dim() != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"pixels must be [H, W, 3], got {list(pixels.shape)}")
    image = pixels.permute(2, 0, 1)[None].float() / 255
    image = F.interpolate(image, (size, size), mode="bilinear", antialias=True)
    mean, std = (image.new_tensor(numbers).view(1, 3, 1, 1) for numbers in (PIXEL_MEAN, PIXEL_STD))
    return (image - mean) / std


class Sam2(nn.Module):
    """Segment the object at given points.

    `forward` is `decoder(encoder(image), points, labels)`; for several prompts of one image, call
    the encoder once.
    """

    def __init__(self, config: Sam2Config | None = None) -> None:
        super().__init__()
        self.config = config or Sam2Config()
        self.encoder = ImageEncoder(self.config)
        self.decoder = MaskDecoder(self.config)

    def forward(self, image: Tensor, points: Tensor, labels: Tensor | None = None) -> Masks:
        """Three masks and the IoU that the model expects of each.

        image: [B, 3, S, S] from `prepare_image`, S = config.image_size.
        points: [B, N, 2], places (x, y) in pixels of that image.
        labels: [B, N], 1 on the object and 0 beside it; all 1 if left out.
        Raises ValueError for other shapes or labels.
        """
        labels = torch.ones(points.shape[:-1], dtype=torch.long) if labels is None else labels
        self._check(image, points, labels)
        image = image.to(self.encoder.positions)
        labels = labels.to(image.device)
        return self.decoder(self.encoder(image), points.to(image.device), labels)

    def grid_of(self, tokens: int) -> tuple[int, int, int] | None:
        """The grid of the global blocks, if they have this many tokens; None for windows."""
        side = self.config.image_size // FEATURE_STRIDE
        return (1, side, side) if tokens == side * side else None

    def _check(self, image: Tensor, points: Tensor, labels: Tensor) -> None:
        S = self.config.image_size
        if image.dim() != 4 or image.shape[1:] != (3, S, S):
            way_out = "prepare_image makes it of pixels"
            raise ValueError(f"image must be [B, 3, {S}, {S}], got {list(image.shape)}; {way_out}")
        B = len(image)
        if points.dim() != 3 or points.shape[0] != B or points.shape[1] < 1 or points.shape[2] != 2:
            raise ValueError(f"points must be [{B}, N, 2] with N ≥ 1, got {list(points.shape)}")
        if labels.shape != points.shape[:2]:
            needed = f"[{B}, {points.shape[1]}], one per point"
            raise ValueError(f"labels must be {needed}; got {list(labels.shape)}")
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError("labels must be 1 (on the object) or 0 (beside it), got others")
