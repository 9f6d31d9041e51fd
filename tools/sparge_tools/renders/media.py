"""What a pipeline returned, as frames: uint8 `[T, H, W, 3]`, one frame for a picture."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
