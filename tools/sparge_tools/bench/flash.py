"""FlashAttention as a contender on accelerators: torch's own kernel, and the package flash_attn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .lineup import FLASH_ATTN, TORCH_FLASH

Inputs = tuple[Tensor, Tensor, Tensor]


def flash_attention(
    kind: str, inputs: Inputs, *, is_causal: bool
) -> tuple[Callable[[], Tensor], str | None]:
    """How it is called, and why it does not run here, or None. It is run once."""
    run = partial(KINDS[kind], *inputs, is_causal=is_causal)
    try:
        run()
    except Exception as fault:  # whatever fails, the other rows are measured
        first_line = next(iter(str(fault).strip().splitlines()), "no reason given")
        return run, f"does not run here: {type(fault).__name__}: {first_line}"
    return run, None


def _torch_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """The package has tokens before heads."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor = import_module("flash_attn").flash_attn_func(q, k, v, causal=is_causal)
    return out.transpose(1, 2)


KINDS = {TORCH_FLASH: _torch_flash, FLASH_ATTN: _flash_attn}
