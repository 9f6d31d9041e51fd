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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sam2_config import Sam2Config
from .sam2_convert import convert_sam2
from .sam2_decoder import MaskDecoder, Masks
from .sam2_encoder import Features, ImageEncoder

__all__ = ["Features", "Masks", "Sam2", "Sam2Config", "convert_sam2", "prepare_image"]

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
        side = self.config.feature_grid
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
