"""What ran and why: one `Run` per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..support.later import Later
from .call import ROW_GROUP
from .recipe import Recipe


@dataclass(frozen=True)
class RingShare:
    """One rank of a ring. kept, allowed: blocks that it attended, and might have. sent: bytes by
    purpose: `agree`, `move` (rows to where they are attended, and results back), `plan`, `blocks`
    (keys and values). seconds: of its attend stage; waited: seconds in all for messages."""

    rank: int
    kept: int
    allowed: int
    sent: dict[str, int]
    seconds: float
    waited: float


@dataclass(frozen=True)
class RingReport:
    """All ranks of a ring. dense_bytes: what a ring that sends every key and value would send."""

    shares: tuple[RingShare, ...]
    dense_bytes: int

    @property
    def bytes_sent(self) -> int:
        return sum(sum(share.sent.values()) for share in self.shares)

    @property
    def bytes_ratio(self) -> float:
        """Bytes sent, of all purposes, against the dense ring's."""
        return self.bytes_sent / self.dense_bytes if self.dense_bytes else 0.0

    @property
    def imbalance(self) -> float:
        """Kept blocks of the rank that has the most, against the mean."""
        total = sum(share.kept for share in self.shares)
        return max(share.kept for share in self.shares) * len(self.shares) / max(total, 1)

    def __str__(self) -> str:
        lines = [
            f"ring of {len(self.shares)}: one plan of the whole sequence; {self.bytes_sent} bytes "
            f"sent, {self.bytes_ratio:.2f} of a dense ring's; imbalance {self.imbalance:.2f}"
        ]
        for share in self.shares:
            sent = " ".join(f"{name} {n}" for name, n in share.sent.items())
            lines.append(
                f"  rank {share.rank}: kept {share.kept} of {share.allowed} blocks, attend "
                f"{share.seconds * 1e3:.1f} ms, waited {share.waited * 1e3:.1f} ms, sent {sent}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Run:
    """One call as it ran.

    A call on an accelerator is not waited for. Its counts and times are read from there when the
    first of them is asked for, and are then like those of any other run.

    routed_to_dense: `auto` sent the call to dense attention; `reason` says why.
    cost_source: the numbers that `auto` chose by: `"measured"` here, the built-in `"estimate"`, or
    `""` where the choice needed none.
    seconds: time of each stage (prepare, predict, select, attend), and their `total`. waited: how
    much of it the end of a native call waited for threads that other programs kept from running.
    kept, allowed: blocks over all heads. pv_skips, pv_groups: row groups x kept blocks that the
    second filter skipped, and all of them; row_group: the rows of such a group.
    parts: of a varlen call, one run for each sequence; of sequences that ran at once, with their
    share of the time by blocks. label: the caller's name for the call.
    kept_by_head, allowed_by_head, pv_skips_by_head: the same counts for each query head, over the
    batch; empty where dense attention ran.
    error_by_head, bound_by_head: what `KeepError` measured of skipping and 8 bits together, and the
    upper confidence bound that it chose by; the largest of the batch; None without it.
    precision_by_head: where `KeepError` raised some heads above the recipe's precision; else None.
    ring: of `ring_attention`, what its ranks sent and did; the counts above are this rank's.
    captured: the call was captured in a graph and did not run, so all counts and times are 0; a
    replay of the graph leaves no record.
    """

    what: str
    call: str
    backend: str
    isa: str
    reason: str
    routed_to_dense: bool
    rejected: dict[str, str]
    recipe: Recipe
    # Defaults of numbers are made: one that stood in the class would hide that it is not read yet.
    sparsity: float = field(default_factory=float)
    kept: int = field(default_factory=int)
    allowed: int = field(default_factory=int)
    pv_skips: int = field(default_factory=int)
    pv_groups: int = field(default_factory=int)
    seconds: dict[str, float] = field(default_factory=dict)
    waited: float = field(default_factory=float)
    parts: tuple[Run, ...] = ()
    label: str = ""
    kept_by_head: tuple[int, ...] = field(default_factory=tuple)
    allowed_by_head: tuple[int, ...] = field(default_factory=tuple)
    pv_skips_by_head: tuple[int, ...] = field(default_factory=tuple)
    error_by_head: tuple[float, ...] | None = field(default_factory=lambda: None)
    bound_by_head: tuple[float, ...] | None = field(default_factory=lambda: None)
    precision_by_head: tuple[str, ...] | None = field(default_factory=lambda: None)
    row_group: int = ROW_GROUP
    cost_source: str = ""
    ring: RingReport | None = field(default_factory=lambda: None)
    captured: bool = False

    @classmethod
    def of(cls, known: Mapping[str, Any], numbers: Later[Mapping[str, Any]]) -> Run:
        """A run whose numbers (some of `NUMBERS`) may still be on their way from a device."""
        if numbers.is_known:
            return cls(**known, **numbers.value())
        run = cls(**known)
        unread = {name: vars(run).pop(name) for name in NUMBERS}
        vars(run)["_later"] = numbers.then(lambda found: {**unread, **found})
        return run

    @classmethod
    def of_captured(cls, known: Mapping[str, Any]) -> Run:
        """The run of a call that a graph captures."""
        return cls(**known, seconds={"total": 0.0}, captured=True)

    def ready(self) -> bool:
        """Whether its numbers can be read without waiting for a device."""
        later: Later[Mapping[str, Any]] | None = vars(self).get("_later")
        return later is None or later.ready()

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name not in NUMBERS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._read()
            return vars(self)[name]

    def _read(self) -> None:
        later: Later[Mapping[str, Any]] | None = vars(self).get("_later")
        if later is not None:  # the numbers first, for another thread that asks for one now
            vars(self).update(later.value())
            vars(self).pop("_later", None)

    def __getstate__(self) -> dict[str, Any]:
        self._read()
        return dict(vars(self))

    @property
    def density(self) -> float:
        """Kept blocks / allowed blocks."""
        return self.kept / self.allowed if self.allowed else 1.0

    @property
    def density_by_head(self) -> tuple[float, ...]:
        """Kept blocks / allowed blocks of each query head; empty where dense attention ran."""
        pairs = zip(self.kept_by_head, self.allowed_by_head, strict=True)
        return tuple(kept / allowed if allowed else 1.0 for kept, allowed in pairs)

    @property
    def pv_skipped(self) -> float:
        """Share of the kept PV products that the second filter skipped."""
        return self.pv_skips / self.pv_groups if self.pv_groups else 0.0

    @property
    def is_busy(self) -> bool:
        """Whether other programs kept threads of this call from running, for a tenth of its time or
        more."""
        return self.waited > 0.1 * self.seconds.get("total", 0.0)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {
            "density": self.density,
            "is_busy": self.is_busy,
            "pv_skipped": self.pv_skipped,
            "recipe": self.recipe.to_dict(),
            "parts": [part.to_dict() for part in self.parts],
            "ring": None if self.ring is None else asdict(self.ring),
        }

    def __str__(self) -> str:
        stages = " + ".join(f"{name} {s * 1e3:.1f}" for name, s in self.seconds.items())
        routed = " routed to dense" if self.routed_to_dense else ""
        pools = self.recipe.pools and self.kept < self.allowed
        pooled = f" (others pooled by {self.recipe.pool_group})" if pools else ""
        found = f"density {self.density:.3f}{pooled}, pv_skipped {self.pv_skipped:.3f}"
        found += self._measured()
        if self.is_busy:
            stages += f" of which {self.waited * 1e3:.1f} waiting for threads: the machine is busy"
        found = "captured in a graph, not counted" if self.captured else f"{found}, ms: {stages}"
        return (
            f"{self.what} {self.call}: {self.backend} ({self.isa}){routed}, {found}; {self.reason}"
        )

    def _measured(self) -> str:
        """What `KeepError` found, for the worst head, and which heads it raised."""
        if not self.error_by_head or not self.bound_by_head:
            return ""
        found = f", error {max(self.error_by_head):.4f} (bound {max(self.bound_by_head):.4f})"
        given = enumerate(self.precision_by_head or ())
        raised = {str(h): name for h, name in given if name != self.recipe.precision}
        heads = f", heads {' '.join(raised)} in {next(iter(raised.values()))}" if raised else ""
        return found + heads


NUMBERS = frozenset(one.name for one in fields(Run) if one.default_factory is not MISSING)
"""Of a `Run`, what is counted and timed; the rest is known when the call is made."""


def when_read(runs: Sequence[Run]) -> Later[Sequence[Run]]:
    """These runs once their numbers can be read."""
    if all("_later" not in vars(run) for run in runs):
        return Later.known(runs)
    return Later(lambda: all(run.ready() for run in runs), lambda: runs)
