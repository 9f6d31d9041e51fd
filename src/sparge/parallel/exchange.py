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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..values.call import in_blocks

GRACE = 3.0
"""Seconds that a peer which failed has to say so."""


class RankError(RuntimeError):
    """A rank died, hung or failed. rank: which; reason: of what, as far as it could be known."""

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int, str]]:
        return RankError, (str(self), self.rank, self.reason)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    # gloo's messages begin with the place in its source and end with a greeting
    text = text.split("] ", 1)[-1] if text.startswith("[/") else text
    return text.split(". This is typically", 1)[0]


_ALIGN = 16
"""Tensors begin at multiples of this, so that every dtype can be viewed in place."""


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the message that holds tensors like these, which may be on the device `meta`."""
    return sum(-(-x.nbytes // _ALIGN) * _ALIGN for x in tensors)


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One message, uint8."""
    buffer = torch.empty(size_of(tensors), dtype=torch.uint8, device=device)
    for own, x in zip(from_bytes(buffer, tensors), tensors, strict=True):
        own.copy_(x)
    return buffer


def from_bytes(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message, as views of it, with the shapes and dtypes of `like`."""
    found, at = [], 0
    for x in like:
        found.append(buffer[at : at + x.nbytes].view(x.dtype).view(x.shape))
        at += size_of([x])
    return found


_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor with its last dimension in bits, uint8."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (in_blocks(mask.to(torch.uint8), -1, 8) * weights).sum(-1, dtype=torch.uint8)


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
        self._received: dict[int, tuple[Any, Tensor, Sequence[Tensor]]] = {}
        self._sent: list[tuple[int, Any, Tensor]] = []

    def take(self, rank: int) -> list[Tensor]:
        """The tensors that came from this rank, as views of its message."""
        work, buffer, like = self._received.pop(rank)
        if work is not None:
            self._exchange.wait(work, rank, "waiting for")
        return from_bytes(buffer, like)

    def finish(self) -> None:
        for rank, work, _ in self._sent:
            self._exchange.wait(work, rank, "sending to")
        self._sent.clear()


class Exchange:
    """One call on one rank of a group. sent: bytes by purpose; waited: seconds."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.waited = 0.0
        name = str(getattr(group, "group_name", ""))
        self._store_key = f"sparge/ring/{_calls[name]}"
        with suppress(Exception):  # private to torch: without it, peers are named without a reason
            self._store = dist.distributed_c10d._get_process_group_store(group)
        _calls[name] += 1
        self._tags = itertools.count(2)

    def post(
        self, purpose: str, send: Mapping[int, Tensor], receive: Mapping[int, Sequence[Tensor]]
    ) -> Pending:
        """Begin to send messages to ranks, and to receive tensors like these from ranks.

        Every rank posts the same exchanges in the same order.
        """
        pending, tag = Pending(self), next(self._tags)
        for rank, like in receive.items():
            work = None
            buffer = torch.empty(size_of(like), dtype=torch.uint8, device=self.device)
            if rank == self.rank:
                buffer = send[rank]
            elif buffer.numel():
                with self._blaming(rank, "waiting for"):
                    work = dist.irecv(buffer, group=self.group, group_src=rank, tag=tag)
            pending._received[rank] = work, buffer, like
        for rank, message in send.items():
            if message.numel() and rank != self.rank:
                with self._blaming(rank, "sending to"):
                    work = dist.isend(message, group=self.group, group_dst=rank, tag=tag)
                pending._sent.append((rank, work, message))
                self.sent[purpose] += message.numel()
        return pending

    def swap(
        self, purpose: str, send: Mapping[int, Tensor], into: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send a message to each rank, and fill tensors with those that come from each; a rank may
        send to itself."""
        pending = self.post(purpose, send, into)
        for rank, tensors in into.items():
            for x, came in zip(tensors, pending.take(rank), strict=True):
                x.copy_(came)
        pending.finish()

    def gather(
        self, purpose: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """The tensors of all ranks, which have these shapes and one dtype."""
        found = [torch.empty(shape, dtype=tensor.dtype, device=self.device) for shape in shapes]
        message = to_bytes([tensor], self.device)
        into = {of: [x] for of, x in enumerate(found)}
        self.swap(purpose, dict.fromkeys(range(self.world), message), into)
        return found

    def gather_rows(self, purpose: str, row: Tensor) -> Tensor:
        """The 1-D tensors of all ranks, which are as long, `[world, n]`."""
        return torch.stack(self.gather(purpose, row, [tuple(row.shape)] * self.world))

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
            said = self._error_of(rank)
            failed, reason = said or (rank, f"it does not answer ({_first_line(error)})")
            through = "" if failed == rank else f", as rank {rank} says"
            self._tell(failed, reason)
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
                self._tell(self.rank, f"{type(error).__name__}: {error}")
            if self.world > 1:
                self._close_connections()
            raise

    def _tell(self, failed: int, reason: str) -> None:
        """Write to the group's store that a rank failed."""
        with suppress(Exception):  # the store may have died with its host
            self._store.set(f"{self._store_key}/{self.rank}", json.dumps([failed, reason]))

    def _error_of(self, rank: int) -> tuple[int, str] | None:
        """What a rank wrote, waiting `GRACE` seconds for it; None if it writes nothing."""
        key, end = f"{self._store_key}/{rank}", time.monotonic() + GRACE
        while time.monotonic() < end:
            try:
                if self._store.check([key]):
                    failed, reason = json.loads(self._store.get(key))
                    return failed, reason
            except Exception:
                return None
            time.sleep(0.05)
        return None

    def _close_connections(self) -> None:
        """Let every rank that waits for this one fail now.

        gloo closes all of a rank's connections when it stops waiting for a message, and has no
        other way to; a group of another backend is aborted.
        """
        with suppress(Exception):
            if dist.get_backend(self.group) != "gloo":
                self.group.abort()
                return
            nothing = torch.empty(1, dtype=torch.uint8)
            peer = 1 if self.rank == 0 else 0
            receive: Callable[..., Any] = dist.irecv
            work = receive(nothing, group=self.group, group_src=peer, tag=1)
            work.wait(timedelta(milliseconds=1))


_N_DIGEST = 4
"""Numbers of a digest: sha256 as int64."""


def agree(exchange: Exchange, facts: dict[str, Any], own: list[int]) -> list[list[int]] | str:
    """The numbers `own` of every rank; or, on every rank, which facts differ and where.

    A rank whose call was refused gives the reason as the fact `refused`, and the others say so.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.int64)
    numbers = torch.tensor([len(text), *own], dtype=torch.int64)
    heads = exchange.gather_rows("agree", torch.cat([digest, numbers])).tolist()
    digests = [tuple(head[:_N_DIGEST]) for head in heads]
    if len(set(digests)) > 1 or "refused" in facts:
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        bodies = exchange.gather("agree", body, [(head[_N_DIGEST],) for head in heads])
        said = [json.loads(bytes(body.tolist())) for body in bodies]
        return _disagreement(said, digests)
    return [head[_N_DIGEST + 1 :] for head in heads]


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
