"""Messages between the ranks of one call: tensors as bytes, posted, then waited for by sender.

A rank that fails tells the others why, so that each of them can name it. It writes its error to the
group's store. A rank whose receive fails looks up its peer's error there; without one, it reports
the peer dead. Then it closes its own connections, so that ranks that wait for it fail at once
instead of at the group's time-out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GRACE = 3.0
"""Seconds that a peer which failed has to say so."""


class RankError(RuntimeError):
    """A rank died, hung or failed. rank: which; reason: of what, as far as it could be known."""

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int, str]]:
        return RankError, (str(self), self.rank, self.reason)


class Blackboard:
    """Errors of the ranks of a group in one call, in the group's store."""

    def __init__(self, group: Any, call: int) -> None:
        with suppress(Exception):  # private to torch: without it, peers are named without a reason
            self._store = dist.distributed_c10d._get_process_group_store(group)
        self._key = f"sparge/ring/{call}"

    def leave(self, rank: int, failed: int, reason: str) -> None:
        """Rank `rank` says that the rank `failed` did."""
        with suppress(Exception):  # the store may have died with its host
            self._store.set(f"{self._key}/{rank}", json.dumps([failed, reason]))

    def read(self, rank: int) -> tuple[int, str] | None:
        """What a rank said, waiting `GRACE` seconds for it; None if it says nothing."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            try:
                if self._store.check([key := f"{self._key}/{rank}"]):
                    failed, reason = json.loads(self._store.get(key))
                    return failed, reason
            except Exception:
                return None
            time.sleep(0.05)
        return None


def close_connections(group: Any, peers: list[int]) -> None:
    """Let every rank that waits for this one fail now.

    gloo closes all of a rank's connections when it stops waiting for a message, and has no other
    way to; a group of another backend is aborted.
    """
    with suppress(Exception):
        if dist.get_backend(group) != "gloo":
            group.abort()
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        receive: Callable[..., Any] = dist.irecv
        receive(nothing, group=group, group_src=peers[0], tag=1).wait(timedelta(milliseconds=1))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    # gloo's messages begin with the place in its source and end with a greeting
    text = text.split("] ", 1)[-1] if text.startswith("[/") else text
    return text.split(". This is typically", 1)[0]


_ALIGN = 16
"""Tensors begin at multiples of this, so that every dtype can be viewed in place."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a tensor that comes from another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def spec_of(x: Tensor) -> Spec:
    return Spec(tuple(x.shape), x.dtype)


def size_of(specs: Iterable[Spec]) -> int:
    """Bytes of the message that holds these tensors."""
    return sum(-(-spec.n_bytes // _ALIGN) * _ALIGN for spec in specs)


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One message, uint8."""
    buffer = torch.empty(size_of(map(spec_of, tensors)), dtype=torch.uint8, device=device)
    at = 0
    for x in tensors:
        spec = spec_of(x)
        if spec.n_bytes:
            buffer[at : at + spec.n_bytes].view(x.dtype).view(x.shape).copy_(x)
        at += size_of([spec])
    return buffer


def from_bytes(buffer: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    found, at = [], 0
    for spec in specs:
        found.append(buffer[at : at + spec.n_bytes].view(spec.dtype).view(spec.shape))
        at += size_of([spec])
    return found


_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor with its last dimension in bits, uint8."""
    n = mask.shape[-1]
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 8))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """`n` bools in place of the last dimension."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) & weights).bool().flatten(-2)[..., :n]


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

    def swap_tensors(
        self,
        purpose: str,
        send: Mapping[int, Sequence[Tensor]],
        receive: Mapping[int, Sequence[Spec]],
    ) -> dict[int, Iterator[Tensor]]:
        """`swap` with a message of several tensors for each rank; those that came are views."""
        messages = {to: to_bytes(tensors, self.device) for to, tensors in send.items()}
        found = self.swap(purpose, messages, {of: size_of(receive[of]) for of in receive})
        return {of: iter(from_bytes(found[of], specs)) for of, specs in receive.items()}

    def gather_rows(self, purpose: str, row: Tensor) -> Tensor:
        """The 1-D tensors of all ranks, which are as long, `[world, n]`."""
        found = self.gather(purpose, row.view(torch.uint8).to(self.device))
        return torch.stack(found).view(row.dtype)

    def gather_numbers(self, purpose: str, numbers: Tensor) -> list[list[Any]]:
        """The same on the host."""
        found: list[list[Any]] = self.gather_rows(purpose, numbers).tolist()
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
        """An exchange with a rank: if it fails, the error names the rank that failed first."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited = time.monotonic() - start
            said = self.board.read(rank)
            failed, reason = said or (rank, f"it does not answer ({_first_line(error)})")
            through = "" if failed == rank else f", as rank {rank} says"
            self.board.leave(self.rank, failed, reason)
            raise RankError(
                f"ring_attention: rank {failed} failed: {reason}{through}. Rank {self.rank} was "
                f"{what} rank {rank} for {waited:.1f} s; the group cannot be used any more",
                failed,
                reason,
            ) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails inside ends the call on every rank."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankError):
                self.board.leave(self.rank, self.rank, f"{type(error).__name__}: {error}")
            if self.peers:
                close_connections(self.group, self.peers)
            raise


_N_FACTS = 6
"""Numbers of each rank that may differ: they follow the digest of what may not."""


def agree(exchange: Exchange, facts: dict[str, Any], own: list[int]) -> list[list[int]] | str:
    """The numbers `own` of every rank; or, on every rank, which facts differ and where.

    A rank whose call was refused gives the reason as the fact `refused`, and the others say so.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.int64)
    numbers = torch.tensor([*own, *[0] * (_N_FACTS - 1 - len(own)), len(text)], dtype=torch.int64)
    heads = exchange.gather_numbers("agree", torch.cat([digest, numbers]))
    digests = [tuple(head[:-_N_FACTS]) for head in heads]
    numbers_of = [head[-_N_FACTS:] for head in heads]
    if len(set(digests)) > 1 or "refused" in facts:
        body = torch.tensor(list(text), dtype=torch.uint8, device=exchange.device)
        bodies = exchange.gather("agree", body, [found[-1] for found in numbers_of])
        said = [json.loads(bytes(body.tolist())) for body in bodies]
        return _disagreement(said, digests)
    return [found[: len(own)] for found in numbers_of]


def _disagreement(said: list[dict[str, Any]], digests: list[tuple[int, ...]]) -> str:
    refused = {rank: facts["refused"] for rank, facts in enumerate(said) if "refused" in facts}
    if refused:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in refused.items())
        return f"ring_attention was refused on another rank, so on all: {reasons}"
    common, _ = Counter(digests).most_common(1)[0]
    usual = said[digests.index(common)]
    lines = []
    for rank, facts in enumerate(said):
        for name in usual:
            if facts[name] != usual[name]:
                lines.append(f"rank {rank} has {name} {facts[name]}, the others {usual[name]}")
    return "every rank of ring_attention must be given the same: " + "; ".join(lines)
