"""The prompt encoder and mask decoder of SAM 2, for points.

    Features + points → 3 masks [B, 3, H/4, W/4] and the IoU that the model expects of each

Eight tokens (one for the IoU, masks, and points) and the features of the image attend to each
other in turn. Each mask token becomes a filter over the finest features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sam2_config import Sam2Config
from .sam2_encoder import Features

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
