"""VERB quantize: the caller's tensors become the operands that attend reads."""

from __future__ import annotations

from torch import Tensor

from ..dispatch.choose import Backend
from ..qtensor import Operands
from ..recipe import QUANTIZED


def quantize(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, precision: str, backend: Backend
) -> Operands:
    """Codes and scales for the quantized precisions; the others read the tensors as they are."""
    if precision not in QUANTIZED:
        return Operands(query, key, value)
    stage = backend.stage("quantize")
    return stage.quantize(query, key, value, scale=scale, precision=precision)
