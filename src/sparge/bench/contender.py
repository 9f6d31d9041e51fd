"""One way to compute attention (torch's SDPA, sparge or FlexAttention) and its measurements."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..api import attention, explain, make_plan
from ..blockplan import BlockPlan
from ..errors import Unsupported
from ..record import Run, record
from .compiled_flex import CompiledFlex
from .lineup import Entry

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass
class Contender:
    """Torch's SDPA, and the base of the others.

    rows: query rows whose output is kept for the error. plan: the blocks that are read.
    why_not: why it cannot run here, or None. seconds, runs: one per round.
    """

    entry: Entry
    inputs: Inputs
    is_causal: bool
    rows: Tensor
    plan: BlockPlan | None = None
    why_not: str | None = None
    out: Tensor | None = None
    seconds: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def prepare(self) -> None:
        """Do everything that is not timed; set `why_not` if the contender cannot run."""

    def attend(self) -> Tensor:
        return F.scaled_dot_product_attention(*self.inputs, is_causal=self.is_causal)

    def take_turn(self) -> float:
        """Run once; return the seconds. Recording the stages is part of the time."""
        with record() as runs:
            start = time.perf_counter()
            out = self.attend()
            seconds = time.perf_counter() - start
        self.runs += runs
        if self.out is None:
            # Sampled rows only: keeping the whole output would leave the next turn cold memory.
            self.out = out[:, :, self.rows].clone()
        return seconds

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of sparge's functions besides the tensors."""
        entry = self.entry
        return {"is_causal": self.is_causal, "recipe": entry.recipe, "backend": entry.backend}

    def make_plan(self) -> str | None:
        """Set the plan; return why the backend refuses the recipe, or None."""
        try:
            explain(*self.inputs, **self.asked)
        except Unsupported as refused:
            return refused.reasons[str(self.entry.backend)]
        query, key, _ = self.inputs
        self.plan = make_plan(query, key, **self.asked)
        return None


@dataclass
class Sparse(Contender):
    """`sparge.attention` on one backend, the whole call."""

    def prepare(self) -> None:
        self.why_not = self.make_plan()

    def attend(self) -> Tensor:
        out = attention(*self.inputs, **self.asked)
        assert isinstance(out, Tensor)
        return out


@dataclass
class Flex(Contender):
    """Compiled FlexAttention with the blocks that sparge's backend chooses for the recipe."""

    compiled: CompiledFlex = field(default_factory=CompiledFlex)

    def prepare(self) -> None:
        refused = self.make_plan()
        if self.plan is None:
            self.why_not = f"no blocks to give it; {self.entry.backend} says: {refused}"
            return
        self.block_mask = self.plan.to_flex()
        self.why_not = self.compiled.compile(self.inputs, self.block_mask)

    def attend(self) -> Tensor:
        return self.compiled(self.inputs, self.block_mask)
