"""Measure the crossover of this machine: real stages of the native core beside dense attention.

Once per machine, instruction set and number of threads: at the first call that needs it, or by
`sparge doctor --calibrate`.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...call import Call
from ...dispatch.choose import AUTO, CPU, Choice, choose, get_backend, host, set_crossover
from ...geometry import BLOCK_Q
from ...recipe import KeepFraction, Recipe
from ...tokenmask import TokenMask
from ..dense import attend_dense
from . import cost_file as cache
from .crossover import DENSE, DENSE_LSE, DTYPES, HEAD_DIMS, WAYS, Cost, Crossover, name_of
from .library import chosen_isa

T = TypeVar("T")
LENGTHS = (256, 768)
"""The longer one is the shortest that torch cuts as it does the longest; ours costs the same per
pair from there on, too (LAB.md)."""
LSE_LENGTHS = (256,)
"""The LSE's scores are held in full: slow, and their cost per pair is plain from short ones."""
BUDGET, FEWEST_ROUNDS, LIMIT = 1.5, 3, 5.0
"""Seconds of taking turns, how often at least, and seconds after which it is given up. The fastest
turn counts: others may be at work, and short turns are the likeliest to be left alone."""
KEPT = 0.5
"""Asked of the plans that are measured; what they really keep is what is counted."""
# Who measures, by process, instruction set and threads. A fork does not wait for a thread that it
# does not have, and what failed once is not tried again at every call.
_turns: dict[tuple[int, str, int], object] = {}


def settle(call: Call, choice: Choice) -> Choice:
    """A choice of `auto` that rests on the built-in estimate, made again by measured numbers."""
    if choice.estimate is None or choice.estimate.measured or torch.compiler.is_compiling():
        return choice
    own, where = object(), (os.getpid(), chosen_isa(host().isas), torch.get_num_threads())
    if _turns.setdefault(where, own) is not own:
        return choice
    measured = _measure_apart()
    if measured is None:
        return choice
    cache.write(measured)
    set_crossover(measured)
    return choose(host(), call, AUTO)


def _measure_apart() -> Crossover | None:
    """`measure()` in a thread of its own, where no mode, autocast or record of the caller's
    reaches. None where it fails: a call can do without, and `doctor --calibrate` shows why."""
    found: list[Crossover] = []

    def work() -> None:
        try:
            found.append(measure())
        except Exception:
            return

    thread = threading.Thread(target=work, name="sparge-calibrate")
    try:
        thread.start()
    except RuntimeError:  # too many threads, or Python is about to end
        return None
    thread.join()
    return found[0] if found else None


def measure() -> Crossover:
    """One to two seconds, under torch's current number of threads."""
    start = time.perf_counter()
    isa, threads = chosen_isa(host().isas), torch.get_num_threads()
    trials: dict[str, list[_Trial]] = {}
    for dtype, D in ((dtype, D) for dtype in DTYPES for D in HEAD_DIMS):
        inputs = {L: _inputs(dtype, D, L, threads) for L in (*LENGTHS, *LSE_LENGTHS)}
        for way in WAYS:
            lengths = LSE_LENGTHS if way == DENSE_LSE else LENGTHS
            named = name_of(DTYPES[dtype], D, way)
            trials[named] = [_Trial(way, inputs[L]) for L in lengths]
    each = [trial for of_lengths in trials.values() for trial in of_lengths]
    _take_turns(each, start)
    return Crossover(
        {name: _fit(of_lengths) for name, of_lengths in trials.items()},
        key=cache.key_of(isa, threads),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took=time.perf_counter() - start,
        noise=statistics.median(statistics.median(t.attends) / t.attend for t in each),
        measured=True,
    )


def _take_turns(trials: Sequence[_Trial], start: float) -> None:
    turns = 0
    with torch.inference_mode():
        while time.perf_counter() - start < BUDGET or turns < FEWEST_ROUNDS * len(trials):
            if time.perf_counter() - start > LIMIT:
                raise RuntimeError(
                    f"{turns // len(trials)} rounds of measuring took {LIMIT:g} s and "
                    f"{FEWEST_ROUNDS} are needed: others are at work on these cores, or there are "
                    f"fewer than torch's {torch.get_num_threads()} threads; measure again when it "
                    "is quiet"
                )
            trials[turns % len(trials)].take_turn()
            turns += 1


def _inputs(dtype: torch.dtype, D: int, L: int, threads: int) -> list[Tensor]:
    heads = max(2, threads)  # no thread waits for work, also where there are many
    own = torch.Generator().manual_seed(0)  # torch's stream of numbers is the caller's
    shape = (1, heads, L, D)
    return [torch.randn(shape, generator=own, device="cpu").to(dtype) for _ in range(3)]


@dataclass
class _Trial:
    """One way at one length. prepares, attends: seconds before attention and in it, one per turn;
    kept: the share of pairs that the plan kept."""

    way: str
    inputs: list[Tensor]
    prepares: list[float] = field(default_factory=list)
    attends: list[float] = field(default_factory=list)
    kept: float = 1.0

    @property
    def prepare(self) -> float:
        return min(self.prepares, default=0.0)

    @property
    def attend(self) -> float:
        return min(self.attends)

    @property
    def tokens(self) -> int:
        _, heads, L, _ = self.inputs[0].shape
        return 3 * heads * L

    @property
    def pairs(self) -> int:
        _, heads, L, _ = self.inputs[0].shape
        return heads * L * L

    def take_turn(self) -> None:
        q, k, v = self.inputs
        tokens, scale = TokenMask(q.shape[2], k.shape[2]), q.shape[3] ** -0.5
        if self.way in (DENSE, DENSE_LSE):
            need_lse = self.way == DENSE_LSE
            dense = partial(attend_dense, q, k, v, tokens, scale=scale, need_lse=need_lse)
            self.attends.append(_timed(dense)[0])
            return
        backend = get_backend(CPU)
        facts: dict[str, Any] = {"scale": scale, "recipe": _recipe(self.way)}

        def prepare() -> tuple[Any, Any]:
            operands, statistics = backend.stage("quantize").prepare(q, k, v, **facts)
            return operands, backend.stage("plan").plan_from(operands, statistics, tokens, **facts)

        def attend() -> Any:
            return backend.stage("attend").attend(operands, plan, tokens, **facts, dtype=q.dtype)

        seconds, (operands, plan) = _timed(prepare)
        self.prepares.append(seconds)
        self.attends.append(_timed(attend)[0])
        self.kept = plan.density


def _recipe(precision: str) -> Recipe:
    return Recipe(KeepFraction(KEPT), precision=precision)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    clock = _clock()
    start = clock()
    done = work()
    return clock() - start, done


def _clock() -> Callable[[], float]:
    """Of one thread its own time, which others at work do not lengthen, if it is told finely."""
    alone = torch.get_num_threads() == 1 and hasattr(time, "thread_time")
    fine = alone and time.get_clock_info("thread_time").resolution < 1e-6
    return time.thread_time if fine else time.perf_counter


def _fit(trials: Sequence[_Trial]) -> Cost:
    """The costs that explain the longest trial's stages and the shortest one's whole."""
    short, long = trials[0], trials[-1]
    element = long.attend / (long.pairs * long.kept)
    sampled = 0.0
    if long.way not in (DENSE, DENSE_LSE):
        sampled = element * _recipe(long.way).sample_rows / BLOCK_Q
    more = max(long.tokens - short.tokens, 1)
    token = (long.prepare - short.prepare - sampled * (long.pairs - short.pairs)) / more
    token = max(token, 0.0)
    rest = short.prepare + short.attend - token * short.tokens
    rest -= (sampled + element * short.kept) * short.pairs
    return Cost(call=max(rest, 0.0), token=token, element=element)
