"""Kernels in Triton for GPUs: NVIDIA, AMD and Intel from one source, compiled at first use.

Triton itself is imported when the first call runs; `import sparge` does not need it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ...values.backend import Backend, Host, when_called
from ...values.call import Call
from ...values.tokenmask import TokenMask
from .architectures import INTERPRETER, KINDS, Architecture, architecture_of, why_too_large
from .packages import installation, why_unusable
from .rates import RATES

NAME = "triton"
ENV_INTERPRET = "TRITON_INTERPRET"


def why_missing() -> str | None:
    """Why Triton cannot be used, or None; it is not imported."""
    return why_unusable(installation())


# Read once: a graph being traced then sees a constant.
MISSING = why_missing()


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, as its environment variable says."""
    return os.environ.get(ENV_INTERPRET) in ("1", "true", "True", "on")


def _refusal(host: Host, call: Call) -> str | None:
    if call.device not in KINDS and not (call.device == "cpu" and interpreting()):
        return f"it runs on GPUs ({', '.join(KINDS)}), and the tensors are on {call.device}"
    if MISSING is not None:
        return MISSING
    if call.dtype == torch.float64:
        return "it computes in fp32; the reference serves float64"
    found = architecture_of(*call.where)
    if isinstance(found, str):
        return found
    if call.recipe.precision == "int8-fast" and found.fp8 is None:
        return (
            f"{found.name} has no fp8 matrix instructions, which int8-fast needs (sm_89, gfx942 "
            "and newer have); use precision 'int8'"
        )
    most = found.most_sampled(call.recipe.precision, call.D)
    if call.samples_rows and call.recipe.sample_rows > most:
        return (
            f"sample_rows must be at most {most} on {found.name} in precision "
            f"{call.recipe.precision!r} at head dim {call.D}, got {call.recipe.sample_rows}; use "
            "fewer, or precision 'int8'"
        )
    return why_too_large(call, found.name)


def _block_kinds(tokens: TokenMask) -> Tensor:
    from .blocks import block_kinds

    return block_kinds(tokens)


def _architecture_name(host: Host, call: Call) -> str:
    found = architecture_of(*call.where)
    return f"triton {found.name}" if isinstance(found, Architecture) else "triton"


TRITON_BACKEND = Backend(
    NAME,
    "Triton kernels for GPUs",
    when_called(f"{__name__}.stages"),
    _refusal,
    RATES,
    isa=_architecture_name,
    raises_heads=True,
    block_kinds=_block_kinds,
    packed=when_called(f"{__name__}.varlen"),
)

__all__ = ["INTERPRETER", "NAME", "TRITON_BACKEND", "interpreting", "why_missing"]
