"""Measure a crossover: the stages of a backend beside dense attention, in turns, at two lengths.

`measure` measures; `measure_apart` does so in a thread of its own, inside a user's call.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..backends.dense import attend_dense
from ..support.errors import Unsupported
from ..support.turns import HOST, take_turns, timer
from ..values.backend import (
    DENSE_LSE,
    DTYPES,
    HEAD_DIMS,
    WAYS,
    Backend,
    Measuring,
    Place,
    Rates,
    UnitCosts,
    host,
    name_of,
)
from ..values.blockplan import BlockPlan
from ..values.call import BLOCK_Q, Call, Inputs
from ..values.recipe import PRECISIONS, KeepFraction, Recipe
from ..values.stages import Prepared, prepare
from ..values.tokenmask import TokenMask
from .crossover import Crossover

KEPT = 0.5
"""The fraction asked of the measured plans; what they really keep is what is counted."""
MOST_OF_FREE = 0.5
"""Of a card's free memory that measuring inside a call may take."""

Proceed = Callable[[], None]
"""Called before each turn; may raise."""
Trials = dict[str, list["Trial"]]
"""By name of the cost; one for each length."""


def measure(
    backend: Backend,
    place: Place,
    *,
    wanted: Collection[str] | None = None,
    in_call: bool = False,
    proceed: Proceed = lambda: None,
) -> Crossover:
    """Every dtype and precision that the backend serves at a place; or the costs that are `wanted`,
    by name. The crossover has no key.

    in_call: measured inside a user's call, in less time and in a part of the free memory; raises
    MemoryError if that is too little.
    """
    assert isinstance(backend.cost, Rates)
    start = time.perf_counter()
    how = backend.cost.measuring(place)
    device = torch.device(how.device)
    bench = Bench(backend, how, wanted)
    check_memory(bench.needed_bytes(), free_bytes(device), MOST_OF_FREE if in_call else 1.0)
    with _on(device), torch.inference_mode():
        trials = bench.trials()
        turns = [partial(trial.take_turn, proceed) for trial in flat(trials)]
        if how.warms_up:
            for trial, turn in zip(flat(trials), turns, strict=True):
                turn()
                trial.prepares.clear()
                trial.attends.clear()
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        seconds = how.seconds_in_call if in_call else how.seconds
        take_turns(turns, seconds=seconds, fewest=how.fewest_rounds, limit=how.limit)
        ran, wall = time.process_time() - cpu_start, time.perf_counter() - wall_start
    busy = 1.0 - ran / (wall * torch.get_num_threads()) if backend.cost.on_host else 0.0
    return Crossover(
        {name: _fit(of_lengths) for name, of_lengths in trials.items()},
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took=time.perf_counter() - start,
        noise=statistics.median(
            statistics.median(trial.attends) / trial.attend for trial in flat(trials)
        ),
        busy=max(0.0, busy),
        measured=True,
    )


@dataclass(frozen=True)
class Bench:
    """What is measured. wanted: names of costs; None is all of them."""

    backend: Backend
    how: Measuring
    wanted: Collection[str] | None = None

    def trials(self) -> Trials:
        """Of dense attention, and of what the backend serves; Unsupported if that is nothing."""
        trials: Trials = {}
        refused = None
        for dtype, D in product(DTYPES, HEAD_DIMS):
            ways = self._ways(dtype, D)
            needed = dict.fromkeys(L for way in ways for L in self._lengths(way))
            inputs = {L: self._inputs(dtype, D, L) for L in needed}
            for way in ways:
                of_way = [Trial(self, way, inputs[L]) for L in self._lengths(way)]
                call = of_way[0].call
                why = self.backend.refusal(host(*call.where), call) if way in PRECISIONS else None
                refused = refused or why
                if why is None:
                    trials[name_of(DTYPES[dtype], D, way)] = of_way
        if all(trial.dense for trial in flat(trials)):
            reasons = {self.backend.name: refused or "it serves no precision"}
            raise Unsupported("there is nothing to measure:", reasons)
        return trials

    def needed_bytes(self) -> int:
        """About what the trials take of the device at a time: their inputs, three times as much for
        codes, transposes and outputs, and the scores of dense attention with an LSE."""
        inputs = scores = 0
        for dtype, D in product(DTYPES, HEAD_DIMS):
            ways = self._ways(dtype, D)
            rows = sum({L for way in ways for L in self._lengths(way)})
            inputs += 3 * self.how.heads * rows * D * dtype.itemsize
            if DENSE_LSE in ways:
                scores = 4 * self.how.heads * max(self.how.lse_lengths) ** 2 * 4
        return 4 * inputs + scores

    def _ways(self, dtype: torch.dtype, D: int) -> list[str]:
        names = {way: name_of(DTYPES[dtype], D, way) for way in WAYS}
        return [way for way in WAYS if self.wanted is None or names[way] in self.wanted]

    def _lengths(self, way: str) -> Sequence[int]:
        return self.how.lse_lengths if way == DENSE_LSE else self.how.lengths

    def _inputs(self, dtype: torch.dtype, D: int, L: int) -> list[Tensor]:
        own = torch.Generator().manual_seed(0)  # leaves the caller's random state alone
        shape = (1, self.how.heads, L, D)
        drawn = [torch.randn(shape, generator=own, device="cpu") for _ in range(3)]
        return [x.to(dtype).to(self.how.device) for x in drawn]


@dataclass
class Trial:
    """One way at one length. prepares, attends: seconds before attention and in it, one per turn;
    kept: the share of pairs that the plan kept."""

    bench: Bench
    way: str
    inputs: list[Tensor]
    prepares: list[float] = field(default_factory=list)
    attends: list[float] = field(default_factory=list)
    kept: float = 1.0

    @property
    def dense(self) -> bool:
        return self.way not in PRECISIONS

    @property
    def prepare(self) -> float:
        return min(self.prepares)

    @property
    def attend(self) -> float:
        return min(self.attends)

    @property
    def tokens(self) -> int:
        return 3 * self.call.Hq * self.call.Lq

    @property
    def pairs(self) -> int:
        return self.call.Hq * self.call.Lq * self.call.Lk

    @property
    def call(self) -> Call:
        query = self.inputs[0]
        B, H, L, D = query.shape
        device, index = query.device.type, query.device.index or 0
        recipe = Recipe(KeepFraction(KEPT), precision="exact" if self.dense else self.way)
        return Call(B, H, H, L, L, D, D, query.dtype, device, D**-0.5, recipe, index)

    def take_turn(self, proceed: Proceed) -> float:
        proceed()
        q, k, v = self.inputs
        call, how, stages = self.call, self.bench.how, self.bench.backend.stages()
        timed = how.timer or timer(how.device)
        tokens, lse = TokenMask(call.Lq, call.Lk), self.way == DENSE_LSE

        def make_plan() -> tuple[Prepared, BlockPlan]:
            prepared = prepare(stages, call, Inputs(q, k, v), to_plan=True, to_attend=True)
            mass = stages.predict(call, prepared, tokens)
            return prepared, stages.select(call, prepared, mass, tokens)

        if self.dense:
            before = 0.0
            took, _ = timed(lambda: attend_dense(q, k, v, tokens, scale=call.scale, need_lse=lse))
        else:
            before, (prepared, plan) = timed(make_plan)
            took, _ = timed(lambda: stages.attend(call, prepared, plan, tokens))
            self.kept = plan.density
        self.prepares.append(before)
        self.attends.append(took)
        return before + took


def flat(trials: Trials) -> Iterable[Trial]:
    return [trial for of_lengths in trials.values() for trial in of_lengths]


def _fit(trials: Sequence[Trial]) -> UnitCosts:
    """The costs that explain the longest trial's stages and the shortest one's whole."""
    short, long = trials[0], trials[-1]
    element = long.attend / (long.pairs * long.kept)
    sampled = 0.0
    if not long.dense:
        sampled = element * long.call.recipe.sample_rows / BLOCK_Q
    more = max(long.tokens - short.tokens, 1)
    token = (long.prepare - short.prepare - sampled * (long.pairs - short.pairs)) / more
    token = max(token, 0.0)
    rest = short.prepare + short.attend - token * short.tokens
    rest -= (sampled + element * short.kept) * short.pairs
    return UnitCosts(call=max(rest, 0.0), token=token, element=element)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """A thread of its own begins with the first device, where it would take memory for nothing."""
    if device.type in HOST:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device.index)
    return context


def check_memory(needed: int, free: int | None, most: float) -> None:
    """Refuse to measure where a model fills the card. free: None where torch does not tell."""
    if free is not None and needed > most * free:
        raise MemoryError(
            f"measuring needs {needed / 2**30:.2f} GB of the card's memory and may take {most:.0%} "
            f"of the {free / 2**30:.2f} GB that are free; run `sparge doctor --calibrate` before a "
            "model is loaded"
        )


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device, what torch holds in reserve included; None if not told."""
    module: Any = torch.get_device_module(device)
    tell = getattr(module, "mem_get_info", None)
    if tell is None:
        return None
    free, _ = tell(device.index)
    return int(free + module.memory_reserved(device.index) - module.memory_allocated(device.index))


def measure_apart(measure: Callable[[Proceed], Crossover]) -> Crossover:
    """`measure(proceed)` in a thread of its own, where no mode, autocast or record of the caller's
    applies. If the caller is interrupted, the thread is stopped and waited for: one that is left
    running native code at the end of the process would abort it."""
    measured: Future[Crossover] = Future()
    stop = threading.Event()

    def proceed() -> None:
        if stop.is_set():
            raise CancelledError

    def work() -> None:
        try:
            measured.set_result(measure(proceed))
        except Exception as error:
            measured.set_exception(error)

    thread = threading.Thread(target=work, name="sparge-calibrate")
    try:
        thread.start()
        thread.join()
    except BaseException:
        stop.set()
        if thread.ident is not None:  # it runs, even if start() was interrupted
            wait([measured])
        raise
    return measured.result()
