"""The stages in plain PyTorch: the definition that every other backend is tested against."""

from __future__ import annotations

from ...values.backend import Backend, FixedCost
from ...values.call import Call
from ...values.host import Host
from ...values.stages import Stages


def _stages() -> Stages:
    from . import stages

    return stages


def _refusal(host: Host, call: Call) -> str | None:
    if call.device == "mps":
        return "it sums mass in float64, which mps does not have; move the tensors to the cpu"
    return None


REFERENCE = Backend(
    "reference",
    "plain PyTorch on any device with float64; defines what the others compute",
    _stages,
    _refusal,
    FixedCost(False, "it is written to be read; dense attention is faster at every shape"),
    plain_operands=True,
)
