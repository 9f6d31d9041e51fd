"""One way to compute attention, and what was measured of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..api import attention, explain
from ..errors import Unsupported
from ..recipe import Recipe
from ..record import Run, record


@dataclass
class Contender:
    """backend None is torch's own SDPA. out: of the warm-up; seconds, runs: one per turn."""

    name: str
    dtype: str
    inputs: tuple[Tensor, Tensor, Tensor]
    is_causal: bool
    backend: str | None = None
    recipe: Recipe | None = None
    out: Tensor | None = None
    seconds: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "enable_gqa": True}

    def attend(self) -> Tensor:
        if self.backend is None:
            return F.scaled_dot_product_attention(*self.inputs, **self.facts)
        out = attention(*self.inputs, **self.facts, recipe=self.recipe, backend=self.backend)
        assert isinstance(out, Tensor)
        return out

    def refusal(self) -> str | None:
        """Why the backend cannot serve this call, found without running it."""
        if self.backend is None:
            return None
        try:
            explain(*self.inputs, **self.facts, recipe=self.recipe, backend=self.backend)
        except Unsupported as refusal:
            return refusal.reasons[self.backend]
        return None

    def warm_up(self) -> None:
        self.out = self.attend()

    def take_turn(self) -> None:
        with record() as runs:
            start = time.perf_counter()
            self.attend()
            self.seconds.append(time.perf_counter() - start)
        self.runs += runs
