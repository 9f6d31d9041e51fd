"""Masks between transformers and `sparge.attention`, in the smallest form that a model allows.

The form depends on what a model's own code may do with a mask in between (see `style_of`):
  None            causal from the first key on, or nothing masked in a bidirectional module
  bool [B, W]     padding of the first W keys; the queries are the last of them, and causal
  4-D             the whole mask, diagonal included
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from ...support.accelerator import capturing

PADDING, BOOL, ADDITIVE = "padding", "bool", "additive"
_hides = WeakIdKeyDictionary()
"""Whether a 2-D mask that was made here hides anything: every layer asks, and on an accelerator it
would wait for each answer."""


def make_mask(*, config: Any = None, **asked: Any) -> Tensor | None:
    """The smallest tensor that expresses the mask; none of size q x kv for causal and padding."""
    style = style_of(type(config))
    style = BOOL if style == PADDING and is_encoder(config) else style
    found, small = _small_mask(style, **asked)
    make: Any = eager_mask if style == ADDITIVE else sdpa_mask
    return small if found else make(**asked)


def _small_mask(
    style: str,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> tuple[bool, Tensor | None]:
    """Whether less than a whole mask will do, and it."""
    if kv_offset != 0:
        return False, None
    compiling = torch.compiler.is_compiling()
    readable = attention_mask is not None and _readable(attention_mask)
    # Where a cache keeps its length on the device, a graph cannot read it.
    known = not (compiling and isinstance(q_offset, Tensor))
    if known and style == PADDING and mask_function is causal_mask_function:
        width = int(q_offset) + q_length
        enough = attention_mask is None or attention_mask.shape[1] >= width
        if allow_is_causal_skip and width <= kv_length and enough:
            padding = None if attention_mask is None else attention_mask[:, :width]
            if padding is not None and readable and bool(padding.all()):
                padding = None
            # Queries that start at key 0 need no mask for their diagonal, nor does a last one.
            if padding is not None or width == q_length or (q_length == 1 and width == kv_length):
                return True, _noted(padding, hides=True) if readable else padding
            ones = torch.ones((batch_size, width), dtype=torch.bool, device=device)
            return True, _noted(ones, hides=False)
    if mask_function is bidirectional_mask_function and style != ADDITIVE:
        if attention_mask is None:
            return allow_is_bidirectional_skip, None
        if attention_mask.shape[1] == kv_length:
            if allow_is_bidirectional_skip and readable and bool(attention_mask.all()):
                return True, None
            # A view of the padding: 4-D for the model's code, without memory of size q x kv.
            full = attention_mask[:, None, None, :]
            return True, full.expand(batch_size, 1, q_length, kv_length)
    return False, None


def _readable(mask: Tensor) -> bool:
    """Whether a number of it can be read: no graph is traced or captured."""
    return not torch.compiler.is_compiling() and not capturing(mask.device)


def _noted(mask: Tensor | None, *, hides: bool) -> Tensor | None:
    if mask is not None and not torch.compiler.is_compiling():
        _hides[mask] = hides
    return mask


def _may_hide(mask: Tensor) -> bool:
    """False for a 2-D mask that is known to hide nothing."""
    if torch.compiler.is_compiling():
        return True
    known: bool | None = _hides.get(mask)
    if known is None:
        return not (_readable(mask) and bool(mask.all()))
    return known


def is_encoder(config: Any) -> bool:
    """Whether a model that could be a decoder is set up as an encoder.

    `generate` with a static cache makes the causal mask for it. The model hides padding itself,
    and takes a causal mask only as a whole; a 2-D one it would take for padding.
    """
    if getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False):
        return False
    return _hides_padding_itself(type(config))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _hides_padding_itself(config_class: type) -> bool:
    code = [vars(sys.modules[model.__module__]) for model in _models_of(config_class)]
    return any("create_bidirectional_mask" in names for names in code)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def style_of(config_class: type) -> str:
    """The masks that a model's own code accepts, by the implementations it supports.

    With flash attention it passes 2-D masks on untouched; with SDPA it takes None or 4-D bool; with
    neither it may add to its mask, and takes None for nothing masked.
    """
    if _all_support(config_class, "flash_attn") and _models_of(config_class):
        return PADDING
    return BOOL if _all_support(config_class, "sdpa") else ADDITIVE


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def own_by_class(config_class: type) -> str:
    """The implementation of a model that never had another than ours."""
    return "sdpa" if _all_support(config_class, "sdpa") else "eager"


def _all_support(config_class: type, what: str) -> bool:
    return all(getattr(model, f"_supports_{what}", False) for model in _models_of(config_class))


@cache
def _models_of(config_class: type) -> list[type]:
    """The model classes of a config: by the auto class, or among those loaded."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        model = MODEL_MAPPING[config_class]
    except (KeyError, ImportError, AttributeError, ValueError):
        kinds: list[type] = [PreTrainedModel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        return [kind for kind in kinds if getattr(kind, "config_class", None) is config_class]
    models = model if isinstance(model, list | tuple) else [model]
    return [kind for kind in models if kind is not None]


def to_attention(
    mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, causal: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The keys that count, their values, and the mask as arguments of `sparge.attention`."""
    Lq = query.shape[2]
    align = "top_left"
    if mask is None:
        if causal and key.shape[2] > Lq:  # a static cache, whose end is not filled yet
            key, value = key[:, :, :Lq], value[:, :, :Lq]
    elif mask.dim() == 2:
        width = mask.shape[1]
        key, value = key[:, :, :width], value[:, :, :width]
        causal, align = True, "bottom_right"
        mask = mask[:, None, None, :] if _may_hide(mask) else None
    else:
        # The mask has the diagonal in it; the queries are the last of the keys.
        align = "bottom_right" if causal and key.shape[2] > Lq else align
        causal = False
        if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
            mask = mask[:, :, :1]
        mask = _hiding(mask)
    return key, value, {"attn_mask": mask, "is_causal": causal, "causal_align": align}


def _hiding(mask: Tensor) -> Tensor:
    """A mask that hides with -inf, which skips blocks, and not with the lowest number."""
    if not mask.is_floating_point():
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min
    if _readable(mask) and bool((hidden | (mask == 0)).all()):
        return ~hidden
    return mask.masked_fill(hidden, -torch.inf)


def to_own(
    mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, causal: bool, eager: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys, the values and the mask for the model's own attention, which takes it in full.

    Eager attention adds its mask, and has no diagonal without one.
    """
    Lq = query.shape[2]
    if mask is not None and mask.dim() == 2:  # the queries are the last of its keys
        width = mask.shape[1]
        key, value = key[:, :, :width], value[:, :, :width]
        keys = torch.arange(width, device=mask.device)
        mask = mask[:, None, None, :] & (keys <= keys[width - Lq :, None])
    if eager and mask is None and causal and Lq > 1:
        keys = torch.arange(max(Lq, key.shape[2]), device=query.device)
        mask = (keys[: key.shape[2]] <= keys[:Lq, None])[None, None]
    if eager and mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    return key, value, mask
