"""The stages in plain PyTorch: the definition that every other backend is tested against."""

from __future__ import annotations

from ...values.backend import Backend, FixedCost, without_float64
from ...values.stages import Stages


def _stages() -> Stages:
    from . import stages

    return stages


REFERENCE = Backend(
    "reference",
    "plain PyTorch on any device with float64; defines what the others compute",
    _stages,
    without_float64,
    FixedCost(False, "it is written to be read; dense attention is faster at every shape"),
    plain_operands=True,
)
