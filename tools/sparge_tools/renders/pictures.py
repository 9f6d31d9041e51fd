"""Pictures: what a pipeline returned as frames, and how two of them differ (PSNR, SSIM, FLIP).

Pictures are `[H, W, 3]` and videos `[T, H, W, 3]`, uint8 or floats in [0, 1]. A video is compared
frame by frame.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..optional_libraries import need_libraries

LATENT = "latent"
NO_PICTURES = "output_type='latent': the pipeline returned latents, which are no pictures"


def frames_of(output: Any, output_type: str = "np") -> tuple[Any, str]:
    """The first picture or video of a pipeline's output, and "" or why there is none.

    output: what the pipeline returned, or its first field. output_type: as the pipeline was called
    with: "np", "pil", "pt" or "latent".
    """
    import numpy as np

    if output_type == LATENT:
        return None, NO_PICTURES
    given = _content(output)
    if given is None:
        return None, f"{type(output).__name__} has no images and no frames"
    first = given[0] if len(given) else None
    if first is None:
        return None, "the pipeline returned no picture"
    if isinstance(first, list | tuple):  # frames of PIL
        array = np.stack([np.asarray(frame) for frame in first])
    elif isinstance(first, Tensor):
        array = np.moveaxis(first.detach().float().cpu().numpy(), -3, -1)
    else:
        array = np.asarray(first)
    if array.ndim == 2 or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        array = array[..., None]
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4):
        return None, f"what the pipeline returned is no picture: shape {list(array.shape)}"
    array = array.repeat(3, -1) if array.shape[-1] == 1 else array[..., :3]
    if array.dtype != np.uint8:
        if not np.isfinite(array).all():
            return None, "the pictures have values that are not finite"
        array = np.clip(array * 255.0, 0, 255).round().astype(np.uint8)
    return array, ""


def _content(output: Any) -> Any:
    for name in ("frames", "images"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple) else None


def shown_frames(count: int) -> list[int]:
    """Which frames of a video a page shows: the first, the middle and the last."""
    return sorted({0, count // 2, count - 1})


def to_png(picture: Any) -> bytes:
    """A picture uint8 `[H, W, 3]` as a PNG file."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return buffer.getvalue()


BEST_PSNR = 100.0
"""Equal pictures have an infinite PSNR; in means they count as this many dB."""
LOWER_IS_BETTER = ("flip",)
METRICS = ("psnr", "ssim", "flip")
_WINDOW = 7  # pixels of a side, of SSIM


def compare_pictures(dense: Any, sparse: Any) -> dict[str, float]:
    """psnr, ssim and flip of two pictures; of two videos their means, and `…_worst` of a frame.

    psnr is infinite where all is equal. Raises ValueError for other shapes or numbers than above.
    """
    one, other = _as_frames(dense, "dense"), _as_frames(sparse, "sparse")
    if one.shape != other.shape:
        raise ValueError(
            f"sparse must have the shape of dense, {list(one.shape)}; got {list(other.shape)}"
        )
    found: dict[str, float] = {}
    for name, metric in (("psnr", psnr), ("ssim", ssim), ("flip", flip)):
        each = [metric(a, b) for a, b in zip(one, other, strict=True)]
        found[name] = mean_of(each)
        if len(each) > 1:
            found[f"{name}_worst"] = max(each) if name in LOWER_IS_BETTER else min(each)
    return found


def mean_of(values: list[float]) -> float:
    """The mean, in which an infinite PSNR counts as `BEST_PSNR`, unless all are."""
    if all(math.isinf(value) for value in values):
        return values[0]
    return sum(min(value, BEST_PSNR) for value in values) / len(values)


def psnr(dense: Any, sparse: Any) -> float:
    """Peak signal-to-noise ratio of two pictures in dB; infinite where they are equal."""
    import numpy as np

    one, other = as_floats(dense), as_floats(sparse)
    squared = float(np.mean((one.astype(np.float64) - other) ** 2))
    return -10 * math.log10(squared) if squared > 0 else math.inf


def ssim(dense: Any, sparse: Any) -> float:
    """Structural similarity of two pictures, over windows of 7×7; 1 where they are equal."""
    need_libraries("SSIM cannot be computed", "skimage", extra="vision")
    from skimage.metrics import structural_similarity

    one, other = as_floats(dense), as_floats(sparse)
    side = min(_WINDOW, *one.shape[:2])
    window = side - 1 + side % 2  # odd
    if window < 3:
        raise ValueError(f"pictures must be at least 3×3 for SSIM, got {list(one.shape[:2])}")
    options = {"channel_axis": -1, "data_range": 1.0, "win_size": window}
    return float(structural_similarity(one, other, **options))


def flip(dense: Any, sparse: Any) -> float:
    """Mean FLIP error of two pictures: the difference that a person sees, 0 (none) to 1."""
    return float(_flip(dense, sparse, colours=False)[1])


def difference_map(dense: Any, sparse: Any) -> Any:
    """The FLIP error of every pixel as a picture, uint8 `[H, W, 3]`: dark is equal."""
    import numpy as np

    colours = np.asarray(_flip(dense, sparse, colours=True)[0])
    return np.clip(colours * 255, 0, 255).round().astype(np.uint8)


def _flip(dense: Any, sparse: Any, *, colours: bool) -> Any:
    need_libraries("FLIP cannot be computed", "flip_evaluator", extra="vision")
    import flip_evaluator  # type: ignore[import-untyped]

    return flip_evaluator.evaluate(as_floats(dense), as_floats(sparse), "LDR", applyMagma=colours)


def as_floats(picture: Any) -> Any:
    """float32 in [0, 1], contiguous."""
    import numpy as np

    given = np.asarray(picture)
    if given.dtype == np.uint8:
        return np.ascontiguousarray(given, dtype=np.float32) / np.float32(255)
    if not np.issubdtype(given.dtype, np.floating):
        raise ValueError(f"pictures must be uint8, or floats in [0, 1]; got {given.dtype}")
    if not (np.isfinite(given).all() and given.min() >= 0 and given.max() <= 1):
        raise ValueError(
            f"pictures must be uint8, or floats in [0, 1]; got floats from {given.min():g} to "
            f"{given.max():g}"
        )
    return np.ascontiguousarray(given, dtype=np.float32)


def _as_frames(given: Any, name: str) -> Any:
    import numpy as np

    frames = np.asarray(given)
    if frames.ndim not in (3, 4) or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(
            f"{name} must be a picture [H, W, 3] or a video [T, H, W, 3]; got {list(frames.shape)}"
        )
    return frames if frames.ndim == 4 else frames[None]
