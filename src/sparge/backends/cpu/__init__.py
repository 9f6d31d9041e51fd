"""The native core for the processor (csrc/)."""

from __future__ import annotations

from torch import Tensor

from ...values.backend import CPU, Backend, when_called
from ...values.tokenmask import TokenMask
from . import library
from .rates import RATES


def _block_kinds(tokens: TokenMask) -> Tensor:
    from .stages import block_kinds

    return block_kinds(tokens)


CPU_BACKEND = Backend(
    CPU,
    "native core for the processor, with the best instruction set it has",
    when_called(f"{__name__}.stages"),
    library.refusal,
    RATES,
    isa=lambda host, call: library.chosen_isa(library.ISAS_HERE),
    plain_operands=True,
    block_kinds=_block_kinds,
    raises_heads=True,
    sums_keys=True,
    packed=when_called(f"{__name__}.varlen"),
    whole=when_called(f"{__name__}.stages"),
    variables=(library.ENV_ISA,),
)
