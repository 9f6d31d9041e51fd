"""Processes that form one gloo group: `run_ranks` runs a function in each of them.

A group lives in a file store, so that no two tests can want the same port. The function is pickled
by name: it must stand at the top of a module that can be imported.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.multiprocessing as mp

_SETTLE = 5.0
"""Seconds that the others get to report after one rank failed: the first error is not always the
cause."""


class RanksError(AssertionError):
    """At least one rank raised or died; the message has the traceback of each."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    may_fail: Sequence[int] = (),
) -> list[Any]:
    """What `function(rank, world, *args)` returned in each of `world` processes.

    The default process group is gloo, with `timeout` seconds; one thread in each process. An
    exception or the death of a rank raises RanksError, except in the ranks of `may_fail`, whose
    place in the list has the exception or None. Ranks that still run after `timeout` + 5 seconds
    are ended, and named.
    """
    spawn = mp.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    nursery = spawn.Process(
        target=_raise_ranks, args=(function, world, args, timeout, tuple(may_fail), sending)
    )
    nursery.start()
    sending.close()
    try:
        # Beyond its own time-out only if the nursery itself is stuck.
        told = pickle.loads(receiving.recv_bytes()) if receiving.poll(timeout + 60) else []
    except EOFError:
        told = []
    finally:
        nursery.join(timeout=5)
        if nursery.is_alive():
            nursery.kill()
            nursery.join()
    return _results(told or [("hung", None)] * world, may_fail)


def _raise_ranks(
    function: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    timeout: float,
    may_fail: tuple[int, ...],
    sending: connection.Connection,
) -> None:
    """Fork the ranks from a process that has imported what they need, once for all of them."""
    torch.set_num_threads(1)
    fork = mp.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="sparge-ranks-") as folder:
        pipes, ranks = [], []
        for rank in range(world):
            mine, its = fork.Pipe(duplex=False)
            given = (function, rank, world, args, f"{folder}/store", timeout, its)
            ranks.append(fork.Process(target=_run, args=given, daemon=True))
            ranks[-1].start()
            its.close()  # so that the end of a process ends its pipe
            pipes.append(mine)
        told = _gather(pipes, timeout + _SETTLE, may_fail)
        for each in ranks:
            each.join(timeout=0.5)
            if each.is_alive():
                each.kill()
                each.join()
    sending.send_bytes(pickle.dumps(told))


def _gather(
    pipes: list[connection.Connection], seconds: float, may_fail: Sequence[int]
) -> list[tuple[str, Any]]:
    """One entry per rank: ("returned", value), ("raised", (exception, text)), ("died" | "hung")."""
    told: dict[int, tuple[str, Any]] = {}
    end = time.monotonic() + seconds
    while len(told) < len(pipes) and (left := end - time.monotonic()) > 0:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in told]
        for pipe in connection.wait(waiting, timeout=left):
            rank = next(i for i, each in enumerate(pipes) if each is pipe)
            try:
                told[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                told[rank] = ("died", None)
            if told[rank][0] != "returned" and rank not in may_fail:
                end = min(end, time.monotonic() + _SETTLE)
    return [told.get(rank, ("hung", None)) for rank in range(len(pipes))]


def _results(told: list[tuple[str, Any]], may_fail: Sequence[int]) -> list[Any]:
    bad = {
        rank: value[1] if how == "raised" else f"the process {how}"
        for rank, (how, value) in enumerate(told)
        if how != "returned" and (rank not in may_fail or how == "hung")
    }
    if bad:
        raise RanksError("\n".join(f"--- rank {rank} of {len(told)}\n{bad[rank]}" for rank in bad))
    return [value[0] if how == "raised" else value for how, value in told]


def _run(
    function: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    store: str,
    timeout: float,
    pipe: Any,
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        result: tuple[str, Any] = ("returned", function(rank, world, *args))
    except BaseException as error:
        result = ("raised", (error, traceback.format_exc()))
    try:
        told = pickle.dumps(result)
    except Exception as error:  # an exception or a result that cannot travel
        text = result[1][1] if result[0] == "raised" else f"{function.__name__} returned: {error}"
        told = pickle.dumps(("raised", (RanksError(text), text)))
    pipe.send_bytes(told)
    pipe.close()
    if result[0] == "returned":
        dist.destroy_process_group()
    else:  # its peers may wait inside a collective that no longer comes
        os._exit(1)
