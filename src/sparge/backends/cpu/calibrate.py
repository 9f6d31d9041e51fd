"""Measure the crossover of this machine: stages of the native core beside dense attention.

About 1.5 s, once per machine, instruction set and number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ...routing.calibration import Bench, crossover_of, each
from ...routing.crossover import Crossover
from ...support.turns import take_turns
from . import library, stages
from .cost_key import key_of

LENGTHS = (256, 768)
"""The longer one is the shortest that torch cuts as it does the longest; ours costs the same per
pair from there on, too (LAB.md)."""
LSE_LENGTHS = (256,)
"""The LSE's scores are held in full: slow, and their cost per pair is plain from short ones."""
BUDGET, FEWEST_ROUNDS, LIMIT = 1.5, 3, 5.0
"""Seconds of measuring, fewest rounds, and seconds after which it gives up. The fastest turn
counts: short turns are the likeliest to be undisturbed."""


def measure(proceed: Callable[[], None] = lambda: None) -> Crossover:
    """Under torch's current number of threads. proceed: called between turns; may raise."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    key = key_of(library.chosen_isa(library.available()), threads)
    heads = max(2, threads)  # no thread waits for work
    trials = Bench(stages, heads, LENGTHS, LSE_LENGTHS).trials()
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        turns = [partial(trial.take_turn, proceed) for trial in each(trials)]
        take_turns(turns, seconds=BUDGET, fewest=FEWEST_ROUNDS, limit=LIMIT)
    ran = time.process_time() - cpu_start
    wall = time.perf_counter() - wall_start
    busy = max(0.0, 1.0 - ran / (wall * threads))
    return crossover_of(trials, key=key, start=start, busy=busy)
