"""The quick check that really runs: every backend against dense attention, all blocks, exact.

Numbers of a backend that fails here mean nothing, so a benchmark refuses to print them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ..api import attention
from ..backends import AUTO, DENSE, backends
from ..errors import Unsupported
from ..recipe import KeepAll, Recipe
from ..synthetic import structured_qkv
from .measure import dense_fp64, relative_l1

# fp32 against fp64: rounding gives about 1e-7, a wrong or missing block a thousand times this.
TOLERANCE = 1e-5
RECIPE = Recipe(keep=KeepAll(), precision="exact")
LENGTH = 331
"""Ends in the middle of a query block and of a key block."""


@dataclass(frozen=True)
class Check:
    """verdict: "passed", "failed" or "refused"; error: the worst relative L1, if it ran."""

    backend: str
    device: str
    verdict: str
    error: float | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_backends(device: str = "cpu") -> list[Check]:
    """Every backend, dense attention, and whatever `auto` takes."""
    names = [*(backend.name for backend in backends()), DENSE, AUTO]
    inputs = structured_qkv(L=LENGTH, device=device)
    return [_check(name, device, inputs) for name in names]


def _check(name: str, device: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Check:
    try:
        error = max(_error(name, inputs, is_causal=causal) for causal in (True, False))
    except Unsupported as refusal:
        return Check(name, device, "refused", None, refusal.reasons.get(name, str(refusal)))
    except Exception as fault:  # any fault of a backend is an answer here, not the end of the check
        return Check(name, device, "failed", None, f"{type(fault).__name__}: {fault}")
    if error < TOLERANCE:  # NaN is not
        return Check(name, device, "passed", error, "")
    return Check(name, device, "failed", error, f"the error must be below {TOLERANCE:g}")


def _error(name: str, inputs: tuple[Tensor, Tensor, Tensor], *, is_causal: bool) -> float:
    out = attention(*inputs, is_causal=is_causal, enable_gqa=True, recipe=RECIPE, backend=name)
    assert isinstance(out, Tensor)
    return relative_l1(out, dense_fp64(*inputs, is_causal=is_causal))
