"""Judge sparse attention by what a model renders: paired with its own dense run, seed by seed.

    renders = sparge_tools.renders.compare_renders(pipe, ["a cat on a wall"], seeds=[0, 1])
    print(renders.mean("psnr"), renders.density)

`compare_results` does the same for a plain module of the zoo and its task.
"""

from .compare import Settings, compare_renders, render
from .media import frames_of
from .modules import compare_results
from .open_pipeline import is_pipeline, open_pipeline
from .picture_metrics import compare_pictures, difference_map, flip, psnr, ssim
from .result import Pair, Renders

__all__ = [
    "Pair",
    "Renders",
    "Settings",
    "compare_pictures",
    "compare_renders",
    "compare_results",
    "difference_map",
    "flip",
    "frames_of",
    "is_pipeline",
    "open_pipeline",
    "psnr",
    "render",
    "ssim",
]
