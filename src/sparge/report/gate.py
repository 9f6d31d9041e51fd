"""The quick check that really runs: every backend and precision, all blocks, against dense fp64.

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

# About three times what the reference loses on these inputs; a wrong block loses far more.
TOLERANCES = {"exact": 1e-5, "half": 0.01, "int8": 0.01, "int8-fast": 0.02}
LENGTH = 331
"""Ends in the middle of a query block and of a key block."""


@dataclass(frozen=True)
class Check:
    """verdict: "passed", "failed" or "refused"; error: the worst relative L1, if it ran."""

    backend: str
    precision: str
    device: str
    verdict: str
    error: float | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_backends(device: str = "cpu") -> list[Check]:
    """Every backend, dense attention, and whatever `auto` takes."""
    inputs = structured_qkv(L=LENGTH, device=device)
    sparse = [(backend.name, precision) for backend in backends() for precision in TOLERANCES]
    wanted = [*sparse, (DENSE, "exact"), (AUTO, "exact")]
    return [_check(name, precision, device, inputs) for name, precision in wanted]


def _check(name: str, precision: str, device: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Check:
    what = (name, precision, device)
    try:
        error = max(_error(name, precision, inputs, is_causal=causal) for causal in (True, False))
    except Unsupported as refusal:
        return Check(*what, "refused", None, refusal.reasons.get(name, str(refusal)))
    except Exception as fault:  # any fault of a backend is an answer here, not the end of the check
        return Check(*what, "failed", None, f"{type(fault).__name__}: {fault}")
    if error < TOLERANCES[precision]:  # NaN is not
        return Check(*what, "passed", error, "")
    return Check(*what, "failed", error, f"the error must be below {TOLERANCES[precision]:g}")


def _error(
    name: str, precision: str, inputs: tuple[Tensor, Tensor, Tensor], *, is_causal: bool
) -> float:
    recipe = Recipe(keep=KeepAll(), precision=precision)
    out = attention(*inputs, is_causal=is_causal, enable_gqa=True, recipe=recipe, backend=name)
    assert isinstance(out, Tensor)
    return relative_l1(out, dense_fp64(*inputs, is_causal=is_causal))
