"""A plain module of the zoo and the task that measures it.

    loaded = sparge_tools.zoo.load_module("terrain-consistency-unet")
    for given in loaded.task.inputs(4, seed=0):
        dense = loaded.task.run(loaded.model, given)
        with sparge.accelerate(loaded.model, grid=loaded.grids):
            sparse = loaded.task.run(loaded.model, given)
        print(loaded.task.caption(given), loaded.task.compare(dense, sparse))

The terrain model is measured by the height map that it makes of seeded noise; SAM 2 by the mask of
an object in a photograph, from one point on it. The photographs are the ones inside scikit-image's
wheel (see its data/README.txt for their sources); nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...optional_libraries import need_libraries
from .sam2 import Masks, prepare_image
from .terrain import SIGMA_MAX, TerrainConfig, heights_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Picture = NDArray[np.uint8]


Grid = tuple[int, int, int]
"""Frames, rows and columns of visual tokens; tokens are in row-major order."""


class Task(Protocol):
    """What a model is for: inputs, one run, and how two results are compared.

    Tasks are frozen dataclasses. Their fields are the choices of the task, such as the size of the
    image; `dataclasses.replace` changes them. Results do not depend on anything but the model, the
    input and the attention.
    """

    metric: ClassVar[str]
    """The key of `compare` that decides whether a sparse result is good enough."""

    @property
    def about(self) -> str:
        """One line: the input, the result, and what `compare` measures."""

    def inputs(self, n: int, seed: int = 0) -> list[Any]:
        """n inputs, the same ones for the same seed.

        Raises ValueError if n is not positive or if there are fewer real ones.
        """

    def run(self, model: nn.Module, given: Any) -> Tensor:
        """The model's result for one input, without gradients. A picture or what it is made of."""

    def compare(self, dense: Tensor, sparse: Tensor) -> dict[str, float]:
        """How two results for one input differ. The first key is `metric`."""

    def picture(self, given: Any, result: Tensor) -> Picture | None:
        """The result as uint8 [H, W, 3], or None where there is nothing to see."""

    def caption(self, given: Any) -> str:
        """A short name of the input, for tables and below pictures."""


@dataclass(frozen=True)
class ZooModule:
    """A model in eval mode that attends through `F.scaled_dot_product_attention` only.

    grids: from the number of tokens of an attention layer to its grid, or None where the tokens
    have none. It is given to `sparge.accelerate(model, grid=...)`.
    """

    name: str
    model: nn.Module
    grids: Callable[[int], Grid | None]
    task: Task


def need_positive(n: int) -> None:
    """Raise ValueError if `inputs` was asked for less than one."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")


def relative_l2(dense: Tensor, sparse: Tensor) -> float:
    """‖sparse - dense‖ / ‖dense‖ in float64; 0 if both are zero."""
    reference = dense.double()
    error, size = (sparse.double() - reference).norm().item(), reference.norm().item()
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return error / size


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

    metric: ClassVar[str] = "relative_l2"
    size: int = 256

    def __post_init__(self) -> None:
        if self.size < MULTIPLE or self.size % MULTIPLE:
            raise ValueError(f"size must be a multiple of {MULTIPLE}, got {self.size}")

    @property
    def about(self) -> str:
        return f"terrain of {self.size}×{self.size} places; relative L2 of its heights with dense"

    def inputs(self, n: int, seed: int = 0) -> list[Noise]:
        """n fields of noise, of the seeds `seed`, `seed` + 1, and so on."""
        need_positive(n)
        found = []
        for own in range(seed, seed + n):
            generator = torch.Generator().manual_seed(own)
            noise = torch.randn(1, 1, self.size, self.size, generator=generator)
            found.append(Noise(own, DIFFICULTIES[own % len(DIFFICULTIES)], noise))
        return found

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

    metric: ClassVar[str] = "iou"

    @property
    def about(self) -> str:
        count = len(PROMPTS)
        return f"mask of the object at a point, {count} photographs; IoU of the mask with dense"

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
