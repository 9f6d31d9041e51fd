"""The native core for the processor (csrc/)."""

from __future__ import annotations

from ...values.backend import CPU, Backend
from ...values.stages import PackedStages
from . import library
from .library import block_kinds
from .rates import RATES


def _packed() -> PackedStages:
    from . import varlen

    return varlen


CPU_BACKEND = Backend(
    CPU,
    "native core for the processor, with the best instruction set it has",
    library.stages,
    library.refusal,
    RATES,
    isa=lambda host, call: library.chosen_isa(library.ISAS_HERE),
    plain_operands=True,
    block_kinds=block_kinds,
    sums_keys=True,
    packed=_packed,
    variables=(library.ENV_ISA,),
)
