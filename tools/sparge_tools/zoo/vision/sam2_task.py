"""What SAM 2 is measured by: the mask of an object in a photograph, from one point on it.

The photographs are the ones inside scikit-image's wheel (see its data/README.txt for their
sources); nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...optional_libraries import need_libraries
from .sam2 import Masks, prepare_image
from .task import need_positive, relative_l2

if TYPE_CHECKING:
    from .task import Picture

PROMPTS = {
    "astronaut.png": (0.80, 0.85),  # the helmet
    "camera.png": (0.30, 0.50),  # the man
    "chelsea.png": (0.55, 0.60),  # the cat
    "coffee.png": (0.30, 0.75),  # the saucer
    "coins.png": (0.45, 0.86),  # one coin of 24
    "motorcycle_left.png": (0.27, 0.37),  # the seat
    "rocket.jpg": (0.50, 0.60),  # the rocket
    "retina.jpg": (0.60, 0.30),  # the retina
}
"""Photographs and a point on an object in each, as fractions of its width and height. At these
points the dense model expects an IoU of at least 0.85 of its mask. Where it is not sure which of
several objects is meant, any change of the arithmetic may make it choose another one."""

TINT = (255, 96, 0)
MARK = (0, 200, 255)


@dataclass(frozen=True, eq=False)
class Photo:
    """A photograph uint8 [H, W, 3] and a point (x, y) in its pixels."""

    name: str
    pixels: Tensor
    point: tuple[float, float]


def read_photo(name: str) -> Photo:
    """A photograph of `PROMPTS`. Raises Unsupported without scikit-image and Pillow."""
    need_libraries("the photographs cannot be read", "skimage", "PIL", extra="vision")
    from importlib.resources import as_file, files

    import numpy as np
    from PIL import Image

    with as_file(files("skimage") / "data" / name) as path, Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    (x, y), (height, width) = PROMPTS[name], pixels.shape[:2]
    return Photo(name.split(".")[0], pixels, (x * width, y * height))


@dataclass(frozen=True)
class PointToMask:
    """Segment the object at a point of a photograph; compare by the IoU of the masks."""

    @property
    def about(self) -> str:
        count = len(PROMPTS)
        return f"mask of the object at a point, {count} photographs; IoU of the mask with dense"

    @property
    def metric(self) -> str:
        return "iou"

    def inputs(self, n: int, seed: int = 0) -> list[Photo]:
        """n photographs in a fixed circular order; the seed is the place of the first one."""
        need_positive(n)
        names = list(PROMPTS)
        if n > len(names):
            raise ValueError(f"n must be at most {len(names)}, the photographs there are; got {n}")
        return [read_photo(names[(seed + i) % len(names)]) for i in range(n)]

    @torch.no_grad()
    def run(self, model: nn.Module, given: Photo) -> Tensor:
        """Mask logits, float32 [H, W] in the size of the photograph; positive is the object.

        Of the three masks, the one of which the model expects the highest IoU in this run.
        """
        size = int(model.config.image_size)  # type: ignore[union-attr, arg-type]
        height, width = given.pixels.shape[:2]
        x, y = given.point
        point = torch.tensor([[[x * size / width, y * size / height]]])
        masks: Masks = model(prepare_image(given.pixels, size=size), point)
        best = masks.logits[:, masks.expected_iou[0].argmax()][None].float().cpu()
        return F.interpolate(best, (height, width), mode="bilinear")[0, 0]

    def compare(self, dense: Tensor, sparse: Tensor) -> dict[str, float]:
        """iou: of the two masks. relative_l2: of their logits."""
        one, other = dense > 0, sparse > 0
        union = int((one | other).sum())
        iou = int((one & other).sum()) / union if union else 1.0
        return {"iou": iou, "relative_l2": relative_l2(dense, sparse)}

    def picture(self, given: Photo, result: Tensor) -> Picture:
        """The photograph with the mask tinted, its edge drawn and the point marked."""
        inside = (result > 0)[..., None]
        tint = torch.tensor(TINT, dtype=torch.float32)
        pixels = torch.where(inside, given.pixels * 0.5 + tint * 0.5, given.pixels.float())
        radius = max(2, max(result.shape) // 100)
        grown = F.max_pool2d(
            inside[None, None, ..., 0].float(), 2 * (radius // 2) + 1, 1, radius // 2
        )
        edge = (grown[0, 0] > 0)[..., None] & ~inside
        pixels = torch.where(edge, tint, pixels)
        y, x = torch.meshgrid(*(torch.arange(side) for side in result.shape), indexing="ij")
        distance = ((x - given.point[0]) ** 2 + (y - given.point[1]) ** 2).sqrt()[..., None]
        pixels = torch.where(distance <= radius + 2, torch.tensor(255.0), pixels)
        pixels = torch.where(distance <= radius, torch.tensor(MARK, dtype=torch.float32), pixels)
        return pixels.round().to(torch.uint8).numpy()

    def caption(self, given: Photo) -> str:
        return given.name
