"""The stages in plain PyTorch: the definition that every other backend is tested against."""

from __future__ import annotations

from ...values.backend import Backend, FixedCost, when_called, without_float64

REFERENCE = Backend(
    "reference",
    "plain PyTorch on any device with float64; defines what the others compute",
    when_called(f"{__name__}.stages"),
    without_float64,
    FixedCost(False, "it is written to be read; dense attention is faster at every shape"),
    plain_operands=True,
)
