"""Measure the crossover of a card: stages of the Triton backend beside dense attention.

Only `sparge doctor --calibrate` does. Most of the time, a minute or more, goes into compiling the
kernels; the turns themselves take seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...backend import Backend
from ...errors import Unsupported
from ...host import host
from ...recipe import PRECISIONS
from ...support.turns import Timer, take_turns, timer
from ..crossover import Crossover
from ..trials import Bench, crossover_of, each
from .cost import key_of
from .roofline import card_of

HEADS = 16
LENGTHS = (2048, 8192)
"""With 16 heads, 256 and 1024 programs of 128 queries: as many as a card has multiprocessors."""
LSE_LENGTHS = (2048,)
BUDGET, FEWEST_ROUNDS = 5.0, 5
"""Seconds of measuring and fewest rounds, after one round that is not timed."""


def measure(
    backend: Backend,
    kind: str,
    index: int = 0,
    *,
    heads: int = HEADS,
    lengths: Sequence[int] = LENGTHS,
    lse_lengths: Sequence[int] = LSE_LENGTHS,
    timed: Timer | None = None,
    budget: float = BUDGET,
    proceed: Callable[[], None] = lambda: None,
) -> Crossover:
    """On a device, every dtype and precision that the backend serves there.

    timed: waits for the device by default. proceed: called before each turn; may raise.
    """
    start = time.perf_counter()
    device = str(torch.device(kind, index))
    bench = Bench(
        backend.stages(),
        heads,
        lengths,
        lse_lengths,
        device=device,
        timed=timed or timer(device),
        serves=lambda call: backend.refusal(host(*call.where), call) is None,
    )
    trials = bench.trials()
    if not any(trial.way in PRECISIONS for trial in each(trials)):
        why = backend.refusal(host(kind, index), next(iter(each(trials))).call)
        reasons = {backend.name: why or "it serves no precision"}
        raise Unsupported("there is nothing to measure:", reasons)
    with torch.inference_mode():
        for trial in each(trials):
            trial.take_turn(proceed)  # compiles
            trial.forget()
        turns = [partial(trial.take_turn, proceed) for trial in each(trials)]
        take_turns(turns, seconds=budget, fewest=FEWEST_ROUNDS)
    return crossover_of(trials, key=key_of(card_of(kind, index)), start=start)
