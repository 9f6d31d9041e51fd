"""The functions of the public `spas_sage_attn`, with its names, order, defaults and layouts.

They run `sparge.attention` on any device. docs/compat.md has what differs from the original.
"""

from . import autotune, core, utils
from .core import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)

__all__ = [
    "autotune",
    "block_sparse_sage2_attn_cuda",
    "core",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
    "utils",
]
