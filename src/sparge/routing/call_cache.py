"""Calls seen before: checking and choosing cost more than the attention of a short call.

Both follow from shapes, dtypes, devices and plain arguments, never from numbers, so the answer is
cached by them. Graphs being traced are never served from the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..backends.cpu import library
from ..engine.check import check_call
from ..support.autocast import forward_ad_level
from ..values.backend import ENV_BACKEND
from ..values.call import Call, Inputs
from .choose import Choice, choose
from .measure_apart import ENV_CALIBRATE
from .registry import generation

Known = tuple[Call, Choice]
_MOST, _MOST_PACKS = 1024, 16
_known: dict[Hashable, Known] = {}
_known_packs: dict[Hashable, list[Known]] = {}


def check_and_choose(inputs: Inputs, *, backend: str, **plain: Any) -> Known:
    """`check_call`, then `choose`; or what they said of the same call before."""
    key = _key_of(inputs, (backend, *plain.values()))
    try:
        known = None if key is None else _known.get(key)
    except TypeError:  # an argument that cannot be hashed will be refused
        known = None
    if known is not None:
        return known
    call = check_call(
        inputs.query,
        inputs.key,
        inputs.value,
        attn_mask=inputs.attn_mask,
        block_mask=inputs.block_mask,
        backend=backend,
        **plain,
    )
    found = call, choose(call, backend)
    if key is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = found
    return found


def _key_of(inputs: Inputs, arguments: tuple[Any, ...]) -> Hashable | None:
    """What the answer depends on, or None where it cannot be cached."""
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
        *_surroundings(),
    )


def _surroundings() -> tuple[Hashable, ...]:
    """What a choice depends on besides its call."""
    return (
        os.environ.get(ENV_BACKEND),
        os.environ.get(library.ENV_ISA),
        os.environ.get(ENV_CALIBRATE),
        torch.get_num_threads(),
        generation(),
    )


def known_choices(key: Hashable, make: Callable[[], list[Known]]) -> list[Known]:
    """`make()`, or what it made before for the same key in the same surroundings. The caller does
    not change the list. The layers of a model ask for the same packs one after another."""
    if torch.compiler.is_compiling():
        return make()
    whole = (key, *_surroundings())
    found = _known_packs.get(whole)
    if found is None:
        found = make()
        if len(_known_packs) >= _MOST_PACKS:
            _known_packs.clear()
        _known_packs[whole] = found
    return found
