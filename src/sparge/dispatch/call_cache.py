"""Calls seen before: checking and choosing cost more than a short call's attention.

The answer to both follows from shapes, dtypes, devices and plain arguments, never from numbers,
so it is remembered by them. Graphs being traced are always looked at anew.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..backends.cpu.library import ENV_ISA
from ..call import Call
from ..support.autocast import forward_ad_level
from .choose import ENV, Choice, registry_age

_MOST = 1024
_known: dict[Hashable, tuple[Call, Choice]] = {}


def key_of(*tensors: Any, arguments: tuple[Any, ...]) -> Hashable | None:
    """What the answer depends on, or None where it cannot be remembered."""
    if torch.compiler.is_compiling() or forward_ad_level() >= 0:
        return None
    if not all(x is None or (type(x) is Tensor and x.layout == torch.strided) for x in tensors):
        return None
    return (
        *[None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in tensors],
        torch.is_grad_enabled(),
        # 1 and True are equal, yet one of them is refused.
        *arguments,
        *map(type, arguments),
        os.environ.get(ENV),
        os.environ.get(ENV_ISA),
        torch.get_num_threads(),
        registry_age(),
    )


def recall(key: Hashable | None) -> tuple[Call, Choice] | None:
    try:
        return None if key is None else _known.get(key)
    except TypeError:  # an argument that cannot be hashed is one that will be refused
        return None


def remember(key: Hashable | None, call: Call, choice: Choice) -> None:
    if key is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = call, choice
