"""The record of a ring: every rank's share, gathered while somebody records."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..routing import Choice, host
from ..values.backend import Backend
from ..values.blockplan import BlockPlan
from ..values.call import Call
from ..values.run import RingReport, RingShare, Run
from .exchange import Exchange

PURPOSES = ("agree", "move", "plan", "blocks")


@dataclass
class Tally:
    """What a rank attended, summed over its pieces."""

    kept: int = 0
    allowed: int = 0
    pv_skips: int = 0
    pv_groups: int = 0
    skipped: float = 0.0
    by_head: dict[str, Tensor] = field(default_factory=dict)

    def add(self, plan: BlockPlan, pv_skips: Tensor, rows: int) -> None:
        allowed = int(plan.allowed.sum())
        self.kept += int(plan.counts.sum())
        self.allowed += allowed
        self.pv_skips += int(pv_skips.sum())
        self.pv_groups += plan.pv_groups(rows)
        self.skipped += plan.sparsity(pv_skips, rows) * allowed
        counted = {"kept": plan.counts, "allowed": plan.allowed, "pv_skips": pv_skips}
        for name, counts in counted.items():
            self.by_head[name] = counts.sum((0, 2)) + self.by_head.get(name, 0)

    def of_heads(self, name: str) -> tuple[int, ...]:
        return tuple(self.by_head[name].tolist()) if name in self.by_head else ()


def gather_report(
    exchange: Exchange, tally: Tally, seconds: dict[str, float], dense_bytes: int
) -> RingReport:
    """The shares of all ranks, on every rank."""
    sent = [exchange.sent[name] for name in PURPOSES]
    numbers = [tally.kept, tally.allowed, seconds["attend"], exchange.waited, *sent]
    message = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8).to(exchange.device)
    found = enumerate(exchange.gather("report", message))
    return RingReport(tuple(_share(rank, numbers) for rank, numbers in found), dense_bytes)


def _share(rank: int, message: Tensor) -> RingShare:
    kept, allowed, seconds, waited, *sent = message.cpu().clone().view(torch.float64).tolist()
    by_purpose = dict(zip(PURPOSES, map(int, sent), strict=True))
    return RingShare(rank, int(kept), int(allowed), by_purpose, seconds, waited)


def run_of_ring(
    call: Call,
    choice: Choice,
    backend: Backend,
    tally: Tally,
    seconds: dict[str, float],
    report: RingReport,
    measured: Tensor | None,
) -> Run:
    """This rank's run. measured: what an error budget found, `[3, B, Hq]`."""
    errors, bounds = (None, None) if measured is None else measured[:2].amax(1).tolist()
    return Run(
        what="ring_attention",
        call=f"{len(report.shares)} ranks, {call}",
        label=call.label,
        backend=choice.backend,
        isa=backend.isa(host(*call.where), call),
        reason=choice.reason,
        routed_to_dense=choice.routed_to_dense,
        rejected=dict(choice.rejected),
        recipe=call.recipe,
        sparsity=tally.skipped / max(tally.allowed, 1),
        kept=tally.kept,
        allowed=tally.allowed,
        pv_skips=tally.pv_skips,
        pv_groups=tally.pv_groups,
        row_group=backend.row_group,
        kept_by_head=tally.of_heads("kept"),
        allowed_by_head=tally.of_heads("allowed"),
        pv_skips_by_head=tally.of_heads("pv_skips"),
        error_by_head=None if errors is None else tuple(errors),
        bound_by_head=None if bounds is None else tuple(bounds),
        seconds={**seconds, "total": sum(seconds.values())},
        ring=report,
    )
