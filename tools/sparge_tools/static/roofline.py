"""A static estimate of the main loop: clocks per tile that three units need at least, and how many
programs fit on a multiprocessor. It is not a measurement: no cache, no latency, no wait is in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .compile import Compiled, Loop
from .targets import MUFU_CLOCKS, TARGETS, WARP_ISSUES, Target

RESERVED = 1024
"""Bytes of shared memory that CUDA takes for each program, from 8.0 on."""


@dataclass(frozen=True)
class Estimate:
    """Clocks of one multiprocessor per tile, all warps of the program together.

    issue: by the schedulers. mufu: by the special function units (exp2). tensor: by the matrix
    units at the vendor's rate; None where no rate is known. bound: the largest of them.
    programs: resident on a multiprocessor, limited by `limit`."""

    issue: float
    mufu: float
    tensor: float | None
    bound: str
    programs: int
    limit: str


def estimate(compiled: Compiled, loop: Loop) -> Estimate | None:
    """None for AMD, whose units are not in the table, and for loops whose tiles are unknown."""
    target = TARGETS[compiled.target]
    if not target.is_nvidia or loop.tiles is None:
        return None
    rounds = compiled.num_warps / WARP_ISSUES / loop.tiles
    issue = loop.instructions * rounds
    mufu = sum(n for name, n in loop.mix.items() if name == "MUFU") * rounds * MUFU_CLOCKS
    clocks = {"issue": issue, "mufu": mufu}
    if loop.products and all(x.kind in target.macs for x in loop.products):
        clocks["tensor"] = sum(x.macs / target.macs[x.kind] for x in loop.products)
    bound = max(clocks, key=lambda name: clocks[name])
    return Estimate(issue, mufu, clocks.get("tensor"), bound, *occupancy(compiled, target))


def occupancy(compiled: Compiled, target: Target) -> tuple[int, str]:
    """Programs on a multiprocessor, and what limits them. Registers are allocated for a warp in
    units of 256, shared memory in units of 128 bytes."""
    registers = math.ceil(compiled.registers * target.warp_size / 256) * 256
    shared = math.ceil((compiled.shared + RESERVED) / 128) * 128
    limits = {
        "registers": target.registers // (registers * compiled.num_warps),
        "shared memory": target.shared_all // shared,
        "warps": target.warps // compiled.num_warps,
        "programs": target.programs,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit
