"""Measure the crossover of this machine: stages of the native core beside dense attention.

About 1.5 s, once per machine, instruction set and number of threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial

import torch
from torch import Tensor

from ...blockplan import BlockPlan
from ...call import Inputs
from ...check import check_call
from ...geometry import BLOCK_Q
from ...recipe import KeepFraction, Recipe
from ...stages import Prepared
from ...support.turns import take_turns, timed
from ...tokenmask import TokenMask
from ..dense import attend_dense
from . import cost_file, library, stages
from .crossover import (
    DENSE_LSE,
    DENSE_WAY,
    DTYPES,
    HEAD_DIMS,
    WAYS,
    Crossover,
    UnitCosts,
    name_of,
)

LENGTHS = (256, 768)
"""The longer one is the shortest that torch cuts as it does the longest; ours costs the same per
pair from there on, too (LAB.md)."""
LSE_LENGTHS = (256,)
"""The LSE's scores are held in full: slow, and their cost per pair is plain from short ones."""
BUDGET, FEWEST_ROUNDS, LIMIT = 1.5, 3, 5.0
"""Seconds of measuring, fewest rounds, and seconds after which it gives up. The fastest turn
counts: short turns are the likeliest to be undisturbed."""
KEPT = 0.5
"""The fraction asked of the measured plans; what they really keep is what is counted."""


def measure(proceed: Callable[[], None] = lambda: None) -> Crossover:
    """Under torch's current number of threads. proceed: called between turns; may raise."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    key = cost_file.key_of(library.chosen_isa(library.available()), threads)
    trials = _trials(threads)
    each = [trial for of_lengths in trials.values() for trial in of_lengths]
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        turns = [partial(trial.take_turn, proceed) for trial in each]
        take_turns(turns, seconds=BUDGET, fewest=FEWEST_ROUNDS, limit=LIMIT)
    ran = time.process_time() - cpu_start
    wall = time.perf_counter() - wall_start
    return Crossover(
        {name: _fit(of_lengths) for name, of_lengths in trials.items()},
        key=key,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took=time.perf_counter() - start,
        noise=statistics.median(statistics.median(t.attends) / t.attend for t in each),
        busy=max(0.0, 1.0 - ran / (wall * threads)),
        measured=True,
    )


def _trials(threads: int) -> dict[str, list[_Trial]]:
    trials = {}
    for dtype, D in ((dtype, D) for dtype in DTYPES for D in HEAD_DIMS):
        inputs = {L: _inputs(dtype, D, L, threads) for L in (*LENGTHS, *LSE_LENGTHS)}
        for way in WAYS:
            lengths = LSE_LENGTHS if way == DENSE_LSE else LENGTHS
            named = name_of(DTYPES[dtype], D, way)
            trials[named] = [_Trial(way, inputs[L]) for L in lengths]
    return trials


def _inputs(dtype: torch.dtype, D: int, L: int, threads: int) -> list[Tensor]:
    heads = max(2, threads)  # no thread waits for work
    own = torch.Generator().manual_seed(0)  # leaves the caller's random state alone
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

    def take_turn(self, proceed: Callable[[], None]) -> float:
        proceed()
        q, k, v = self.inputs
        call = check_call(q, k, v, recipe=_recipe(self.way))
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


def _recipe(way: str) -> Recipe:
    precision = "exact" if way in (DENSE_WAY, DENSE_LSE) else way
    return Recipe(KeepFraction(KEPT), precision=precision)


def _fit(trials: Sequence[_Trial]) -> UnitCosts:
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
