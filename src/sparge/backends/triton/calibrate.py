"""Measure the crossover of a card: stages of the Triton backend beside dense attention.

`sparge doctor --calibrate` measures every dtype, head dim and precision; most of the time, a minute
or more, goes into compiling the kernels. The first call that might profit measures its own kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ...routing.calibration import Bench, Trials, crossover_of, each
from ...routing.crossover import Crossover
from ...support.errors import Unsupported
from ...support.turns import HOST, Timer, take_turns, timer
from ...values.backend import Backend
from ...values.host import host
from ...values.recipe import PRECISIONS
from .cost import key_of
from .roofline import card_of

HEADS = 16
LENGTHS = (2048, 8192)
"""With 16 heads, 256 and 1024 programs of 128 queries: as many as a card has multiprocessors."""
LSE_LENGTHS = (2048,)
BUDGET, FEWEST_ROUNDS = 5.0, 5
"""Seconds of measuring and fewest rounds, after one round that is not timed."""
CALL_BUDGET = 0.5
"""Seconds of measuring inside a user's call: two ways instead of 36."""
MOST_OF_FREE = 0.5
"""Of the card's free memory that measuring inside a call may take."""


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
    wanted: Collection[str] | None = None,
    most_of_free: float = 1.0,
) -> Crossover:
    """On a device, every dtype and precision that the backend serves there; or the costs that are
    `wanted`, by name.

    timed: waits for the device by default. proceed: called before each turn; may raise.
    most_of_free: of the device's free memory that may be taken; MemoryError if that is too little.
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
        wanted=wanted,
    )
    check_room(bench.needed_bytes(), free_bytes(kind, index), most_of_free)
    with _on(kind, index), torch.inference_mode():
        trials = _take_turns(backend, bench, budget, proceed)
    return crossover_of(trials, key=key_of(card_of(kind, index)), start=start)


def _take_turns(
    backend: Backend, bench: Bench, budget: float, proceed: Callable[[], None]
) -> Trials:
    trials = bench.trials()
    if not any(trial.way in PRECISIONS for trial in each(trials)):
        first = next(iter(each(trials))).call
        why = backend.refusal(host(*first.where), first)
        reasons = {backend.name: why or "it serves no precision"}
        raise Unsupported("there is nothing to measure:", reasons)
    for trial in each(trials):
        trial.take_turn(proceed)  # compiles
        trial.forget()
    turns = [partial(trial.take_turn, proceed) for trial in each(trials)]
    take_turns(turns, seconds=budget, fewest=FEWEST_ROUNDS)
    return trials


def _on(kind: str, index: int) -> AbstractContextManager[Any]:
    """A thread of its own begins with the first device, where it would take memory for nothing."""
    return nullcontext() if kind in HOST else torch.get_device_module(kind).device(index)


def measure_for_call(
    backend: Backend,
    kind: str,
    index: int,
    *,
    wanted: Collection[str],
    proceed: Callable[[], None],
) -> Crossover:
    """What one kind of call needs, inside such a call."""
    return measure(
        backend,
        kind,
        index,
        budget=CALL_BUDGET,
        proceed=proceed,
        wanted=wanted,
        most_of_free=MOST_OF_FREE,
    )


def check_room(needed: int, free: int | None, most: float) -> None:
    """Refuse to measure where a model fills the card. free: None where torch does not tell."""
    if free is not None and needed > most * free:
        raise MemoryError(
            f"measuring needs {needed / 2**30:.2f} GB of the card's memory and may take {most:.0%} "
            f"of the {free / 2**30:.2f} GB that are free; run `sparge doctor --calibrate` before a "
            "model is loaded"
        )


def free_bytes(kind: str, index: int) -> int | None:
    """Memory that is free on a device, what torch holds in reserve included; None if not told."""
    module: Any = torch.get_device_module(kind)
    tell = getattr(module, "mem_get_info", None)
    if tell is None:
        return None
    free, _ = tell(index)
    return int(free + module.memory_reserved(index) - module.memory_allocated(index))
