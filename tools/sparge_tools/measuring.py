"""Surroundings of a measurement, set for a block and restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, then keep Python's garbage collector off until the end of the block."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Set torch's number of threads to `n` inside the block."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)
