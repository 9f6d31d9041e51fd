"""What the layers of a worker did: counted as they run, read as values."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...models.report import OWN, LayerReport, RecipeReport, Report
from ...models.unread import Unread
from ...values.geometry import BLOCK_K, BLOCK_Q, n_blocks
from ...values.recipe import Recipe
from ...values.run import Run
from .batch import Request
from .refusals import DECODE


@dataclass
class Counters:
    """Sums over the steps of one layer. `kept` and `allowed` are blocks of prefills."""

    ran: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    kept_by_head: list[int] = field(default_factory=list)
    allowed_by_head: list[int] = field(default_factory=list)
    seconds: float = 0.0
    decode_seconds: float = 0.0
    captured: Counter[str] = field(default_factory=Counter)
    unread: Unread = field(default_factory=Unread)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_decode(self, tokens: int, seconds: float) -> None:
        with self.lock:
            self.tokens["decode"] += tokens
            self.decode_seconds += seconds

    def add_own(self, requests: Sequence[tuple[Request, str]], Hq: int, seconds: float) -> None:
        """vLLM's own attention ran these requests, each for a reason; decoding is counted apart."""
        prefills = [each for each in requests if each[1] != DECODE]
        self.add_decode(len(requests) - len(prefills), 0.0 if prefills else seconds)
        if not prefills:
            return
        with self.lock:
            self.seconds += seconds
            for request, reason in prefills:
                blocks = Hq * allowed_blocks(request.Lq, request.Lk)
                self.ran[OWN] += 1
                self.fallbacks[reason] += 1
                self.tokens["own"] += request.Lq
                self.counts.update(kept=blocks, allowed=blocks)

    def add_step(self, reason: str, tokens: int, seconds: float) -> None:
        """vLLM's own attention ran a step whose requests are not known."""
        with self.lock:
            self.seconds += seconds
            self.ran[OWN] += 1
            self.fallbacks[reason] += 1
            self.tokens["own"] += tokens

    def add_served(self, requests: Iterable[Request], runs: Iterable[Run], seconds: float) -> None:
        """These prefills ran here. runs: empty where this call was not recorded."""
        with self.lock:
            self.seconds += seconds
            served = list(requests)
            self.tokens["served"] += sum(request.Lq for request in served)
            parts = [part for run in runs for part in (run.parts or (run,))]
            if not parts:
                self.ran["not recorded"] += len(served)
            for part in parts:
                if part.captured:  # nothing may be asked of the device now
                    self.captured[f"{part.backend} ({part.isa})"] += 1
                else:
                    self.unread.add(part, self._add_up)

    def _add_up(self, part: Run) -> None:
        self.ran[f"{part.backend} ({part.isa})"] += 1
        self.counts.update(kept=part.kept, allowed=part.allowed)
        self.counts.update(pv_skips=part.pv_skips, pv_groups=part.pv_groups)
        self.counts["estimated"] += part.cost_source == "estimate"
        self.counts.update(served_kept=part.kept, served_allowed=part.allowed, recorded=1)
        self.kept_by_head = _added(self.kept_by_head, part.kept_by_head)
        self.allowed_by_head = _added(self.allowed_by_head, part.allowed_by_head)

    def density(self, calls: int) -> float | None:
        """Of what ran here, once that many calls were recorded and read."""
        with self.lock:
            if self.counts["recorded"] < calls or not self.counts["served_allowed"]:
                return None
            return self.counts["served_kept"] / self.counts["served_allowed"]

    def report(self, name: str, recipe: Recipe | None) -> LayerReport:
        with self.lock:
            self.unread.read()
            n, heads = self.counts, zip(self.kept_by_head, self.allowed_by_head, strict=True)
            recorded = n["served_allowed"]
            used = RecipeReport(recipe, n["recorded"], n["served_kept"], recorded) if recipe else ()
            return LayerReport(
                name=name,
                calls=sum(self.ran.values()),
                ran=dict(self.ran),
                kept=n["kept"],
                allowed=n["allowed"],
                sparse_density=n["served_kept"] / recorded if recorded else 1.0,
                density_by_head=tuple(kept / max(allowed, 1) for kept, allowed in heads),
                pv_skipped=n["pv_skips"] / max(n["pv_groups"], 1),
                error_by_head=None,
                seconds=self.seconds,
                fallbacks=dict(self.fallbacks),
                recipe=recipe,
                by_recipe=(used,) if isinstance(used, RecipeReport) else (),
                estimated=n["estimated"],
                captured=dict(self.captured),
            )


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did since its start or the last `reset()`.

    rank, ranks: of its tensor-parallel group. threads: torch's, in the worker. settings: where
    recipe or profile came from.
    report: its prefills, layer by layer; a call is one request in one step, dense ones included.
    tokens: query rows of each layer that were `served` here, went to vLLM's `own` attention, or
    were `decode`. decode_seconds: time of each layer in vLLM's kernel for steps of decode alone.
    """

    rank: int
    ranks: int
    threads: int
    settings: str
    report: Report
    tokens: Mapping[str, Mapping[str, int]]
    decode_seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "format": "sparge.vllm.report/1",
            "rank": self.rank,
            "ranks": self.ranks,
            "threads": self.threads,
            "settings": self.settings,
            "tokens": {name: dict(each) for name, each in self.tokens.items()},
            "decode_seconds": dict(self.decode_seconds),
            "report": self.report.to_dict(),
        }

    @property
    def line(self) -> str:
        """One line for a log."""
        total = sum((Counter(each) for each in self.tokens.values()), Counter[str]())
        layers = max(len(self.tokens), 1)
        rows = {name: total[name] // layers for name in ("served", "own", "decode")}
        report = self.report
        why = "; ".join(f"{n}x {reason}" for reason, n in report.fallbacks.items())
        return (
            f"sparge rank {self.rank} of {self.ranks}: {rows['served']} prompt tokens served at "
            f"density {report.sparse_density:.3f}, {rows['own']} by vLLM's attention, "
            f"{rows['decode']} decoded; {report.seconds:.2f} s in prefill attention"
            + (f"; not served: {why}" if why else "")
        )

    def __str__(self) -> str:
        return f"{self.line}\n{self.report}"


def _added(sums: list[int], numbers: tuple[int, ...]) -> list[int]:
    if not numbers:
        return sums
    return [a + b for a, b in zip(sums or [0] * len(numbers), numbers, strict=True)]


def allowed_blocks(Lq: int, Lk: int) -> int:
    """Key blocks that the query blocks of a causal prefill may read; the queries are the last."""
    first = (Lk - Lq) // BLOCK_Q
    ends = (min((i + 1) * BLOCK_Q, Lk) for i in range(first, n_blocks(Lk, BLOCK_Q)))
    return sum(n_blocks(end, BLOCK_K) for end in ends)
