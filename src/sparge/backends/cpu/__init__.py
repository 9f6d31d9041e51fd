"""The native core for the processor (csrc/)."""

from __future__ import annotations

from ...values.backend import CPU, Backend, when_called
from . import library
from .library import block_kinds
from .rates import RATES

CPU_BACKEND = Backend(
    CPU,
    "native core for the processor, with the best instruction set it has",
    when_called(f"{__name__}.stages"),
    library.refusal,
    RATES,
    isa=lambda host, call: library.chosen_isa(library.ISAS_HERE),
    plain_operands=True,
    block_kinds=block_kinds,
    sums_keys=True,
    packed=when_called(f"{__name__}.varlen"),
    whole=when_called(f"{__name__}.whole_call"),
    variables=(library.ENV_ISA,),
)
