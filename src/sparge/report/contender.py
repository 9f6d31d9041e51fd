"""One way to compute attention, and what was measured of it: torch's, ours, FlexAttention's."""

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
from .entries import Entry
from .flex import CompiledFlex

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass
class Contender:
    """Torch's own SDPA, and what all contenders share.

    rows: the query rows whose output is kept, to be compared later. plan: the blocks it reads.
    why_not: why it is not measured. seconds, runs: one per turn.
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
        """Everything that is not timed; sets why_not where there will be nothing to time."""

    def attend(self) -> Tensor:
        return F.scaled_dot_product_attention(*self.inputs, is_causal=self.is_causal)

    def take_turn(self) -> None:
        # Recording is inside the timing, for its stages; what it costs counts against us.
        with record() as runs:
            start = time.perf_counter()
            out = self.attend()
            self.seconds.append(time.perf_counter() - start)
        self.runs += runs
        if self.out is None:
            # Some rows alone: a whole output held back would make the next turn's new memory cold.
            self.out = out[:, :, self.rows].clone()

    @property
    def asked(self) -> dict[str, Any]:
        """What our own functions are asked for, beside the tensors."""
        entry = self.entry
        return {"is_causal": self.is_causal, "recipe": entry.recipe, "backend": entry.backend}

    def forget_turns(self) -> None:
        self.seconds.clear()
        self.runs.clear()


@dataclass
class Sparse(Contender):
    """`sparge.attention` with a backend of ours, everything included."""

    def prepare(self) -> None:
        self.why_not = refusal(self)
        if self.why_not is None:
            self.plan = plan_of(self)

    def attend(self) -> Tensor:
        out = attention(*self.inputs, **self.asked)
        assert isinstance(out, Tensor)
        return out


@dataclass
class Flex(Contender):
    """FlexAttention, compiled, given the blocks that our backend chooses for the recipe."""

    compiled: CompiledFlex = field(default_factory=CompiledFlex)

    def prepare(self) -> None:
        refused = refusal(self)
        if refused is not None:
            self.why_not = f"no blocks to give it; {self.entry.backend} says: {refused}"
            return
        self.plan = plan_of(self)
        self.block_mask = self.plan.to_flex()
        self.why_not = self.compiled.compile(self.inputs, self.block_mask)

    def attend(self) -> Tensor:
        return self.compiled(self.inputs, self.block_mask)


def refusal(contender: Contender) -> str | None:
    """Why the backend cannot serve the recipe, found without running it."""
    try:
        explain(*contender.inputs, **contender.asked)
    except Unsupported as refused:
        return refused.reasons[str(contender.entry.backend)]
    return None


def plan_of(contender: Contender) -> BlockPlan:
    query, key, _ = contender.inputs
    return make_plan(query, key, **contender.asked)
