"""What a process of its own makes of random calls: `python tests/support/static_draws.py 40`.

Each call is compiled for one target, so that every target gets some of them; the weekly run
compiles all of them for all targets. Then one call again, on a target with less shared memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from unittest import mock

from sparge_tools.static import fuzz
from sparge_tools.static.targets import TARGETS


def each_for_one_target(n: int) -> list[fuzz.Task]:
    names, made = list(TARGETS), []
    for i, variant in enumerate(fuzz.draws(n, seed=0)):
        served = [name for name in names[i % len(names) :] + names if name in variant.targets]
        made.append((variant, served[0]))
    return made


def on_a_small_card() -> fuzz.Found:
    """What is found of a call where a target has too little shared memory for it."""
    variant = next(x for x in fuzz.draws(40, seed=0) if x.D == 128)
    small = replace(TARGETS["sm_80"], shared=4096)
    with mock.patch.dict(TARGETS, {"sm_80": small}):
        tasks = [(variant, "sm_80")]
        return fuzz.judge_draws(tasks, fuzz.compile_draw(tasks[0]))


if __name__ == "__main__":
    tasks = each_for_one_target(int(sys.argv[1]))
    found = fuzz.compile_draws(tasks)
    document = {
        **asdict(found),
        "unlisted": [asdict(x) for x in found.unlisted],
        "targets": sorted({target for _, target in tasks}),
        "small": asdict(on_a_small_card()),
    }
    print(json.dumps(document))
