"""One sequence over several ranks of `torch.distributed`."""

from __future__ import annotations

from ..values.run import RingReport, RingShare
from .faults import RankError
from .ring import ring_attention, ring_plan
from .sharding import shard, unshard

__all__ = [
    "RankError",
    "RingReport",
    "RingShare",
    "ring_attention",
    "ring_plan",
    "shard",
    "unshard",
]
