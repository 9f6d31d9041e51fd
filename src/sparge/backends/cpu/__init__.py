"""The native core for the processor (csrc/)."""

from __future__ import annotations

import torch

from ...values.backend import CPU, Backend
from ...values.call import Call
from ...values.host import Host
from ...values.stages import PackedStages, Stages
from . import library
from .op_arguments import block_kinds
from .rates import RATES

# Read once: a graph being traced then sees constants.
MISSING, ISAS = library.why_missing(), library.available()


def _stages() -> Stages:
    from . import stages

    return stages


def _packed() -> PackedStages:
    from . import varlen

    return varlen


def _refusal(host: Host, call: Call) -> str | None:
    if call.device != "cpu":
        return f"it runs on the cpu, and the tensors are on {call.device}"
    if call.dtype == torch.float64:
        return "it computes in fp32; the reference serves float64"
    if MISSING is None:
        library.chosen_isa(ISAS)  # raises if a forced name is not there
    return MISSING


CPU_BACKEND = Backend(
    CPU,
    "native core for the processor, with the best instruction set it has",
    _stages,
    _refusal,
    RATES,
    isa=lambda host, call: library.chosen_isa(ISAS),
    plain_operands=True,
    block_kinds=block_kinds,
    sums_keys=True,
    packed=_packed,
    variables=(library.ENV_ISA,),
)
