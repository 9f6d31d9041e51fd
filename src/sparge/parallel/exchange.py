"""Messages between the ranks of one call: posted, then waited for by the rank they come from."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .faults import Blackboard, RankError, blame, close_connections

_calls: Counter[str] = Counter()
"""By the name of a group: its ranks make the same calls in the same order, so numbers agree."""


class Pending:
    """Messages under way. `take(rank)` waits for one; `finish()` for those that were sent."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._received: dict[int, tuple[Any, Tensor]] = {}
        self._sent: list[tuple[int, Any, Tensor]] = []

    def take(self, rank: int) -> Tensor:
        """The bytes that this rank sent; empty if none were asked for."""
        if rank not in self._received:
            return self._exchange.nothing()
        work, buffer = self._received.pop(rank)
        self._exchange.wait(work, rank, "waiting for")
        return buffer

    def finish(self) -> None:
        for rank, work, _ in self._sent:
            self._exchange.wait(work, rank, "sending to")
        self._sent.clear()


class Exchange:
    """One call on one rank of a group. sent: bytes by purpose; waited: seconds."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [rank for rank in range(self.world) if rank != self.rank]
        self.sent: Counter[str] = Counter()
        self.waited = 0.0
        name = str(getattr(group, "group_name", ""))
        self.board = Blackboard(group, _calls[name])
        _calls[name] += 1
        self._tags = itertools.count(2)

    def nothing(self) -> Tensor:
        """A message of no bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    def post(self, purpose: str, send: Mapping[int, Tensor], receive: Mapping[int, int]) -> Pending:
        """Begin to send bytes to ranks and to receive so many from ranks; both sides know how many.

        Every rank posts the same exchanges in the same order.
        """
        pending, tag = Pending(self), next(self._tags)
        for rank, n_bytes in receive.items():
            if n_bytes and rank != self.rank:
                buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
                with self._blaming(rank, "waiting for"):
                    work = dist.irecv(buffer, group=self.group, group_src=rank, tag=tag)
                pending._received[rank] = work, buffer
        for rank, message in send.items():
            if message.numel() and rank != self.rank:
                with self._blaming(rank, "sending to"):
                    work = dist.isend(message, group=self.group, group_dst=rank, tag=tag)
                pending._sent.append((rank, work, message))
                self.sent[purpose] += message.numel()
        return pending

    def swap(
        self, purpose: str, send: Mapping[int, Tensor], receive: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Send and receive, and wait for all; what a rank sends itself comes back as it is."""
        pending = self.post(purpose, send, receive)
        found = {rank: pending.take(rank) for rank in receive if rank != self.rank}
        if self.rank in receive:
            found[self.rank] = send[self.rank]
        pending.finish()
        return found

    def gather(
        self, purpose: str, message: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The messages of all ranks, each sent to all. sizes: None if all are as long."""
        ranks = range(self.world)
        n_bytes = sizes or [message.numel()] * self.world
        found = self.swap(
            purpose, dict.fromkeys(ranks, message), dict(zip(ranks, n_bytes, strict=True))
        )
        return [found[rank] for rank in ranks]

    def wait(self, work: Any, rank: int, what: str) -> None:
        start = time.perf_counter()
        with self._blaming(rank, what):
            work.wait()
        self.waited += time.perf_counter() - start

    @contextmanager
    def _blaming(self, rank: int, what: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise blame(
                self.board, self.rank, rank, what, time.monotonic() - start, error
            ) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails inside ends the call on every rank."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankError):
                reason = f"{type(error).__name__}: {error}"
                self.board.leave(self.rank, {"rank": self.rank, "reason": reason})
            if self.peers:
                close_connections(self.group, self.peers)
            raise
