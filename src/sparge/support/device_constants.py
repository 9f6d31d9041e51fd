"""Small tables of numbers on a device, copied there once.

A later call then copies nothing to the device, which would wait for it, and a captured graph finds
its tables where they were.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4096)
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a 1-D tensor; not to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype).to(device)
