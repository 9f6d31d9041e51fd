"""A backend: what it refuses, what it costs beside dense attention, and its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from .blockplan import BlockPlan
from .call import Call
from .geometry import ROW_GROUP
from .host import Host
from .stages import PackedStages, Stages
from .tokenmask import TokenMask

AUTO, DENSE, CPU = "auto", "dense", "cpu"
ENV_BACKEND = "SPARGE_BACKEND"
MEASURED, ESTIMATED = "measured", "estimate"


@dataclass(frozen=True)
class Estimate:
    """Whether a backend is predicted to be faster than dense attention, and why.

    source: `"measured"` on this machine, `"estimate"` by built-in numbers, or `""` where the
    answer needed neither. settled: no calibration would improve the numbers.
    """

    faster: bool
    reason: str
    source: str = ""
    settled: bool = True


class Cost(Protocol):
    """What a backend's calls cost beside dense attention. It owns its calibration and its cache."""

    @property
    def generation(self) -> int:
        """Counts changes of the numbers; a change invalidates cached choices."""
        ...

    def before(self, call: Call) -> Estimate:
        """From shapes alone, before there is a plan."""
        ...

    def after(self, call: Call, plan: BlockPlan) -> Estimate | None:
        """From what the plan keeps; what came before is paid for. None keeps the choice.

        The only place on the way of a call that may read numbers of a tensor: a backend whose
        device is not the host returns None without looking.
        """
        ...

    def calibrate(self, call: Call) -> bool:
        """Measure, if numbers are missing and measuring is allowed; True if there are new ones."""
        ...


@dataclass(frozen=True)
class FixedCost:
    """The same answer for every call: a backend that is always faster than dense, or never."""

    faster: bool
    reason: str

    @property
    def generation(self) -> int:
        return 0

    def before(self, call: Call) -> Estimate:
        return Estimate(self.faster, self.reason)

    def after(self, call: Call, plan: BlockPlan) -> Estimate | None:
        return None

    def calibrate(self, call: Call) -> bool:
        return False


def torch_capability(host: Host, call: Call) -> str:
    """What torch's own kernels run with."""
    return f"torch {host.device(call.device).capability or call.device}"


def with_kinds(backend: Backend, tokens: TokenMask) -> TokenMask:
    """The same with the kinds of its blocks, where they follow from a caller's mask and the backend
    computes them once for all stages."""
    if tokens.attn_mask is None or backend.block_kinds is None:
        return tokens
    return replace(tokens, kinds=backend.block_kinds(tokens))


def serves_all(host: Host, call: Call) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of the stages.

    stages: returns the implementation; imported when it is first called.
    refusal: why it cannot run a call on a host, or None.
    cost: whether it is faster than dense attention.
    isa: the instruction set or architecture it runs with, for the record.
    row_group: consecutive query rows that its second filter judges together.
    raises_heads: its attend stage runs the heads that an error budget raised in the caller's own
    precision; if not, they are run as calls of their own.
    packed: stages that attend packed sequences at once; without them, one after another.
    plain_operands: what it prepares are plain tensors of rows, which may come from elsewhere.
    block_kinds: computes `TokenMask.block_kinds` under a caller's mask, once for all stages of a
    call; without it, every stage does.
    sums_keys: its stages make the mean key of sums over blocks (`KeySums`), which may come from
    elsewhere.
    """

    name: str
    about: str
    stages: Callable[[], Stages]
    refusal: Callable[[Host, Call], str | None] = serves_all
    cost: Cost = field(default=FixedCost(True, "assumed to be faster than dense attention"))
    isa: Callable[[Host, Call], str] = torch_capability
    row_group: int = ROW_GROUP
    raises_heads: bool = False
    packed: Callable[[], PackedStages] | None = None
    plain_operands: bool = False
    block_kinds: Callable[[TokenMask], Tensor] | None = None
    sums_keys: bool = False
