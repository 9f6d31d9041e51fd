"""A new length must not compile a kernel again: how many compilations a series of calls causes.

Triton compiles once for each key: the kernel's source, its constants, the types of its arguments
and what is known of them (1, divisible by 16). The keys are made by Triton's own functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .compile import specialize
from .targets import TARGETS
from .variants import Variant, launches_of


def compilations(variant: Variant, lengths: Iterable[int], target: str) -> dict[str, int]:
    """Distinct compilations of each kernel in calls of these lengths, all stages."""
    keys: dict[str, set[str]] = {}
    for length in lengths:
        for launches in launches_of(replace(variant, L=length), target).values():
            for launch in launches:
                made = specialize(launch, TARGETS[target])
                keys.setdefault(launch.name, set()).add(made.key)
    return {name: len(found) for name, found in keys.items()}
