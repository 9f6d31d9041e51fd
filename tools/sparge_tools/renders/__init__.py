"""Judge sparse attention by what a model renders: paired with its own dense run, seed by seed.

    renders = sparge_tools.renders.compare_renders(pipe, ["a cat on a wall"], seeds=[0, 1])
    print(renders.mean("psnr"), renders.density)

`compare_results` does the same for a plain module of the zoo and its task.
"""

from .compare import Pair, Renders, Settings, compare_renders, compare_results, render
from .open_pipeline import is_pipeline, open_pipeline
from .pictures import compare_pictures, difference_map, flip, frames_of, psnr, ssim

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
