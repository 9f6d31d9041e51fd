"""One sequence over several ranks of `torch.distributed`."""

from __future__ import annotations

from ..values.run import RingReport, RingShare
from .exchange import RankError
from .layout import shard, unshard
from .ring import ring_attention, ring_plan

__all__ = [
    "RankError",
    "RingReport",
    "RingShare",
    "ring_attention",
    "ring_plan",
    "shard",
    "unshard",
]
