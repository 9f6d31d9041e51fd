"""A rank that fails tells the others why, so that each of them can name it.

A failing rank writes its error to the group's store. A rank whose receive fails looks up its peer's
error there; without one, it reports the peer dead. Then it closes its own connections, so that
ranks that wait for it fail at once instead of at the group's time-out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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

    def leave(self, rank: int, word: dict[str, Any]) -> None:
        with suppress(Exception):  # the store may have died with its host
            self._store.set(f"{self._key}/{rank}", json.dumps(word))

    def read(self, rank: int) -> dict[str, Any] | None:
        """The error of a rank, waiting `GRACE` seconds for it; None if there is none."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            try:
                if self._store.check([key := f"{self._key}/{rank}"]):
                    found: dict[str, Any] = json.loads(self._store.get(key))
                    return found
            except Exception:
                return None
            time.sleep(0.05)
        return None


def blame(
    board: Blackboard, own: int, peer: int, what: str, waited: float, error: BaseException
) -> RankError:
    """The error of rank `own`, whose exchange with `peer` failed: names the rank that began it."""
    word = board.read(peer)
    if word is None:
        reason = f"it does not answer ({_first_line(error)})"
        rank = peer
    else:
        rank, reason = int(word["rank"]), str(word["reason"])
    through = "" if rank == peer else f", as rank {peer} says"
    message = (
        f"ring_attention: rank {rank} failed: {reason}{through}. Rank {own} was {what} rank {peer} "
        f"for {waited:.1f} s; the group cannot be used any more"
    )
    board.leave(own, {"rank": rank, "reason": reason})
    return RankError(message, rank, reason)


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
