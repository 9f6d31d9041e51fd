"""Calls seen before: checking and choosing cost more than the attention of a short call.

Both follow from shapes, dtypes, devices and plain arguments, never from numbers, so the router
keeps the answer by them. Graphs being traced are never served from its cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..routing import Choice, current_router
from ..support.autocast import forward_ad_level
from ..values.call import Call, Inputs
from .check import check_call


def check_and_choose(inputs: Inputs, *, backend: str, **plain: Any) -> tuple[Call, Choice]:
    """`check_call`, then the router's choice; or what they said of the same call before."""
    router = current_router()

    def make() -> tuple[Call, Choice]:
        call = check_call(
            inputs.query,
            inputs.key,
            inputs.value,
            attn_mask=inputs.attn_mask,
            block_mask=inputs.block_mask,
            backend=backend,
            **plain,
        )
        return call, router.choose(call, backend)

    key = _key_of(inputs, (backend, *plain.values()))
    return make() if key is None else router.answer(key, make)


def _key_of(inputs: Inputs, arguments: tuple[Any, ...]) -> Hashable | None:
    """What the answer depends on besides the router's facts, or None where it cannot be kept."""
    if torch.compiler.is_compiling() or forward_ad_level() >= 0:
        return None
    if not all([x is None or (type(x) is Tensor and x.layout == torch.strided) for x in inputs]):  # noqa: C419 - faster
        return None
    return (
        *[None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in inputs],
        torch.is_grad_enabled(),
        # 1 and True are equal, yet one of them is refused.
        *arguments,
        *map(type, arguments),
    )
