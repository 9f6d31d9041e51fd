"""What torch does around a call: autocast, which casts inputs and must not touch exact
arithmetic, and forward-mode AD, which is not served."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Named, because asking torch whether a device has autocast breaks a compiled graph before 2.11.
_HAVE_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "xla")
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def autocasts(device: str) -> bool:
    return device in _HAVE_AUTOCAST and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def forward_ad_level() -> int:
    """The level of forward-mode AD around us; -1 outside of it."""
    level: int = forward_ad._current_level
    return level


def as_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Under autocast, the tensors in its dtype; otherwise, and what is no tensor, as they are."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not autocasts(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x for x in tensors)
