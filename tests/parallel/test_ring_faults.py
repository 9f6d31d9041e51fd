"""A rank that dies, fails, hangs or was given something else: every other says which and why."""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gloo_ranks import run_ranks
from sparge import KeepMass, Recipe
from sparge.parallel import RankError, ring_attention, shard
from sparge.parallel.global_plan import _Planning
from sparge.parallel.rounds import Rounds

TIMEOUT = 4.0
BAD = 1


def die(*args):
    os._exit(9)


def run_out(*args):
    raise MemoryError("no room for the keys")


def parts_of_a_call():
    g = torch.Generator().manual_seed(0)
    return [shard(torch.randn(1, 2, 800, 32, generator=g)) for _ in range(3)]


def failing_call(*given, **options):
    """What a call raises, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises((RankError, ValueError, TypeError, MemoryError)) as raised:
        ring_attention(*given, backend="cpu", **options)
    return raised.value, time.monotonic() - start


def meet(what, rank, others):
    """Wait for other ranks, by the store, which has no short time-out."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what} {rank}", "")
    store.wait([f"{what} {other}" for other in others], timedelta(seconds=60))


def faulty(rank, world, how):
    parts = parts_of_a_call()
    meet("there", rank, range(world))
    ring_attention(*parts, backend="cpu")
    if how == "hangs":
        if rank == BAD:  # it does not call until the others gave up
            meet("gave up", rank, [other for other in range(world) if other != BAD])
            return None
        found = failing_call(*parts)
        meet("gave up", rank, [])
        return found
    if rank == BAD:
        if how == "dies in a round":
            Rounds._attend = die
        if how == "dies while planning":
            _Planning._plan = die
        if how == "fails":
            Rounds._attend = run_out
    return failing_call(*parts)


@pytest.mark.parametrize("how", ["dies in a round", "dies while planning", "hangs"])
def test_a_rank_that_does_not_answer_is_named(how):
    found = run_ranks(faulty, 3, how, timeout=TIMEOUT, may_fail=[BAD])
    for rank in (0, 2):
        error, seconds = found[rank]
        assert isinstance(error, RankError)
        assert error.rank == BAD
        assert f"rank {BAD} failed: it does not answer" in str(error)
        assert seconds < TIMEOUT + 5.0


def test_a_rank_that_fails_says_why():
    found = run_ranks(faulty, 3, "fails", timeout=TIMEOUT)
    assert isinstance(found[BAD][0], MemoryError)
    for rank in (0, 2):
        error, seconds = found[rank]
        assert (error.rank, error.reason) == (BAD, "MemoryError: no room for the keys")
        assert seconds < TIMEOUT + 5.0


def disagreeing(rank, world):
    q, k, v = parts_of_a_call()
    bad = rank == BAD
    recipe = Recipe(KeepMass(0.9 if bad else 0.8))
    found = {"recipe": failing_call(q, k, v, recipe=recipe)}
    head = slice(16) if bad else slice(32)
    found["head dim"] = failing_call(q[..., head], k[..., head], v)
    found["refused"] = failing_call(q.int() if bad else q, k, v)
    assert ring_attention(q, k, v).isfinite().all()  # the group is whole
    return found


def test_what_differs_is_named_on_every_rank():
    for rank, found in enumerate(run_ranks(disagreeing, 3, timeout=30)):
        recipe, head_dim, refused = (found[name][0] for name in ("recipe", "head dim", "refused"))
        assert "rank 1 has recipe's keep {'mass': 0.9}, the others {'mass': 0.8}" in str(recipe)
        assert "rank 1 has D 16, the others 32" in str(head_dim)
        assert type(recipe) is type(head_dim) is ValueError
        assert type(refused) is (TypeError if rank == BAD else ValueError)
        assert "query must be bfloat16" in str(refused)
        assert all(seconds < 10.0 for _, seconds in found.values())


def test_rank_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(RankError("rank 3 failed", 3, "no power")))
    assert (str(error), error.rank, error.reason) == ("rank 3 failed", 3, "no power")
