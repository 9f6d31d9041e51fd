"""Measure a crossover: the stages of a backend beside dense attention, in turns, at two lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch
from torch import Tensor

from ..backends.dense import attend_dense
from ..engine.check import check_call
from ..support.turns import Timer, timed
from ..values.blockplan import BlockPlan
from ..values.call import Call, Inputs
from ..values.geometry import BLOCK_Q
from ..values.recipe import KeepFraction, Recipe
from ..values.stages import Prepared, Stages
from ..values.tokenmask import TokenMask
from .crossover import DENSE_LSE, DENSE_WAY, DTYPES, HEAD_DIMS, WAYS, Crossover, UnitCosts, name_of

KEPT = 0.5
"""The fraction asked of the measured plans; what they really keep is what is counted."""

Trials = dict[str, list["Trial"]]
"""By name of the cost; one for each length."""


@dataclass(frozen=True)
class Bench:
    """What is measured, where and how.

    heads: as many as keep the device busy. lse_lengths: lengths of dense attention with an LSE,
    whose scores are held in full. timed: runs work, returns its seconds and its result.
    serves: whether the backend serves a call; what it does not is not measured.
    wanted: names of the costs that are measured; None is all of them.
    """

    stages: Stages
    heads: int
    lengths: Sequence[int]
    lse_lengths: Sequence[int]
    device: str = "cpu"
    timed: Timer = timed
    serves: Callable[[Call], bool] = lambda call: True
    wanted: Collection[str] | None = None

    def trials(self) -> Trials:
        trials: Trials = {}
        for dtype, D in ((dtype, D) for dtype in DTYPES for D in HEAD_DIMS):
            ways = self._ways(dtype, D)
            needed = dict.fromkeys(L for way in ways for L in self._lengths(way))
            inputs = {L: self._inputs(dtype, D, L) for L in needed}
            for way in ways:
                of_way = [Trial(self, way, inputs[L]) for L in self._lengths(way)]
                if way in (DENSE_WAY, DENSE_LSE) or self.serves(of_way[0].call):
                    trials[name_of(DTYPES[dtype], D, way)] = of_way
        return trials

    def needed_bytes(self) -> int:
        """About what the trials take of the device at a time: their inputs, three times as much for
        codes, transposes and outputs, and the scores of dense attention with an LSE."""
        inputs = scores = 0
        for dtype, D in ((dtype, D) for dtype in DTYPES for D in HEAD_DIMS):
            ways = self._ways(dtype, D)
            rows = sum({L for way in ways for L in self._lengths(way)})
            inputs += 3 * self.heads * rows * D * dtype.itemsize
            if DENSE_LSE in ways:
                scores = 4 * self.heads * max(self.lse_lengths) ** 2 * 4
        return 4 * inputs + scores

    def _ways(self, dtype: torch.dtype, D: int) -> list[str]:
        return [
            way
            for way in WAYS
            if self.wanted is None or name_of(DTYPES[dtype], D, way) in self.wanted
        ]

    def _lengths(self, way: str) -> Sequence[int]:
        return self.lse_lengths if way == DENSE_LSE else self.lengths

    def _inputs(self, dtype: torch.dtype, D: int, L: int) -> list[Tensor]:
        own = torch.Generator().manual_seed(0)  # leaves the caller's random state alone
        shape = (1, self.heads, L, D)
        drawn = [torch.randn(shape, generator=own, device="cpu") for _ in range(3)]
        return [x.to(dtype).to(self.device) for x in drawn]


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

    @property
    def call(self) -> Call:
        q, k, v = self.inputs
        return check_call(q, k, v, recipe=_recipe(self.way))

    def take_turn(self, proceed: Callable[[], None]) -> float:
        proceed()
        q, k, v = self.inputs
        call, timed, stages = self.call, self.bench.timed, self.bench.stages
        tokens = TokenMask(call.Lq, call.Lk)
        if self.way in (DENSE_WAY, DENSE_LSE):
            lse = self.way == DENSE_LSE
            took, _ = timed(lambda: attend_dense(q, k, v, tokens, scale=call.scale, need_lse=lse))
            self.attends.append(took)
            return took

        def make_plan() -> tuple[Prepared, BlockPlan]:
            prepared = stages.prepare(call, Inputs(q, k, v), to_plan=True, to_attend=True)
            mass = stages.predict(call, prepared, tokens)
            return prepared, stages.select(call, prepared, mass, tokens)

        before, (prepared, plan) = timed(make_plan)
        took, _ = timed(lambda: stages.attend(call, prepared, plan, tokens))
        self.prepares.append(before)
        self.attends.append(took)
        self.kept = plan.density
        return before + took

    def forget(self) -> None:
        """The turns so far were a warm-up."""
        self.prepares.clear()
        self.attends.clear()


def crossover_of(
    trials: Trials, *, key: Mapping[str, str], start: float, busy: float = 0.0
) -> Crossover:
    """What the trials tell. start: when measuring began, by `time.perf_counter()`."""
    return Crossover(
        {name: _fit(of_lengths) for name, of_lengths in trials.items()},
        key=key,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took=time.perf_counter() - start,
        noise=statistics.median(
            statistics.median(trial.attends) / trial.attend for trial in each(trials)
        ),
        busy=busy,
        measured=True,
    )


def each(trials: Trials) -> Iterable[Trial]:
    return [trial for of_lengths in trials.values() for trial in of_lengths]


def _recipe(way: str) -> Recipe:
    precision = "exact" if way in (DENSE_WAY, DENSE_LSE) else way
    return Recipe(KeepFraction(KEPT), precision=precision)


def _fit(trials: Sequence[Trial]) -> UnitCosts:
    """The costs that explain the longest trial's stages and the shortest one's whole."""
    short, long = trials[0], trials[-1]
    element = long.attend / (long.pairs * long.kept)
    sampled = 0.0
    if long.way not in (DENSE_WAY, DENSE_LSE):
        sampled = element * _recipe(long.way).sample_rows / BLOCK_Q
    more = max(long.tokens - short.tokens, 1)
    token = (long.prepare - short.prepare - sampled * (long.pairs - short.pairs)) / more
    token = max(token, 0.0)
    rest = short.prepare + short.attend - token * short.tokens
    rest -= (sampled + element * short.kept) * short.pairs
    return UnitCosts(call=max(rest, 0.0), token=token, element=element)
