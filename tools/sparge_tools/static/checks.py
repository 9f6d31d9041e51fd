"""The rules that compiled kernels must satisfy; each is a small function with a reason.

What a kernel is meant to be is an `Intent`, written beside the launch that is checked; what it has
become is read from its machine code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparge.backends.triton.packages import numbers_of

from .compile import Compiled, kind_of
from .targets import TARGETS, TENSOR_MEMORY_MMA


@dataclass(frozen=True)
class LoopIntent:
    """products: kinds of matrix instruction that the loop must use: int8, fp8, half. ahead: tiles
    that are loaded while one is computed; 0 for a loop that need not run ahead. waits: products
    are finished within the iteration. most: machine instructions for one tile, at most."""

    name: str
    products: tuple[str, ...] = ()
    ahead: int = 0
    waits: bool = False
    most: int | None = None


@dataclass(frozen=True)
class Intent:
    """loops: in the order of the kernel's; empty for a kernel whose loops are not judged. spills:
    what is known to be spilled, and must not grow; loop_spills: of it, in the first loop. chained:
    fp32 is multiplied by three products into one sum."""

    loops: tuple[LoopIntent, ...] = ()
    spills: int = 0
    loop_spills: int = 0
    chained: bool = False


@dataclass(frozen=True)
class Verdict:
    rule: str
    ok: bool
    reason: str


Rule = Callable[[Compiled, Intent], Verdict]


def check(compiled: Compiled, intent: Intent, recorded: Mapping[str, int] | None) -> list[Verdict]:
    """Every rule's verdict. recorded: the ratchet's numbers of this kernel, None if it has none."""
    return [*(rule(compiled, intent) for rule in RULES), no_growth(compiled, recorded)]


def compiles(compiled: Compiled, intent: Intent) -> Verdict:
    return Verdict("compiles", True, f"{compiled.instructions} instructions")


def no_spills(compiled: Compiled, intent: Intent) -> Verdict:
    """No register in memory. AMD's scalar registers may spill to lanes of vector registers."""
    ok = compiled.spills <= intent.spills and (intent.spills > 0 or compiled.stack == 0)
    text = f"{compiled.spills} spilled, stack of {compiled.stack} bytes"
    text += f", known to be up to {intent.spills}" if intent.spills else ""
    return Verdict("spills", ok, f"{text}, {compiled.registers} registers")


def main_loop_stays_in_registers(compiled: Compiled, intent: Intent) -> Verdict:
    """Of the first loop, which most of the time goes into: no spilled register is stored or loaded
    in it, or no more than is known."""
    spilled = compiled.loops[0].spills if compiled.loops and intent.loops else 0
    text = f"{spilled} bytes an iteration, known to be up to {intent.loop_spills}"
    return Verdict("main loop", spilled <= intent.loop_spills, text)


def fits_shared(compiled: Compiled, intent: Intent) -> Verdict:
    limit = TARGETS[compiled.target].shared
    text = f"{compiled.shared} of {limit} bytes of shared memory"
    return Verdict("shared memory", compiled.shared <= limit, text)


def has_loops(compiled: Compiled, intent: Intent) -> Verdict:
    """As many loops in the machine code as the kernel has; else the other rules compare nothing."""
    found, meant = len(compiled.loops), len(intent.loops)
    return Verdict("loops", not meant or found == meant, f"{found} loops, meant {meant or 'any'}")


def uses_matrix_units(compiled: Compiled, intent: Intent) -> Verdict:
    """The intended products in every loop, by the target's own matrix instructions: on sm_90 by
    those of a warp group, on sm_100 by those of tensor memory."""
    target, version = TARGETS[compiled.target], numbers_of(compiled.triton)
    wrong = []
    for loop, meant in zip(compiled.loops, intent.loops, strict=False):
        kinds = {
            kind
            for opcode in loop.matrix
            if re.match(target.matrix_of(kind := kind_of(opcode), version), opcode)
        }
        if meant.products and kinds != set(meant.products):
            there = ", ".join(sorted(loop.matrix)) or "none"
            wrong.append(f"{meant.name}: {there} instead of {' and '.join(meant.products)}")
    return Verdict("matrix", not wrong, "; ".join(wrong) or ", ".join(sorted(compiled.matrix)))


def chains_nothing(compiled: Compiled, intent: Intent) -> Verdict:
    """Chained products stay off the unit of tensor memory, where versions of Triton up to 3.8 may
    miscompile them inside a loop (its issue 10821)."""
    there = [x for x in compiled.matrix if re.match(TENSOR_MEMORY_MMA, x)]
    wrong = intent.chained and bool(there)
    return Verdict("chained", not wrong, ", ".join(there) if wrong else "none on tensor memory")


def loads_ahead(compiled: Compiled, intent: Intent) -> Verdict:
    """K and V of a loop have as many buffers in shared memory as its loads are meant to run ahead,
    and one more where matrix instructions read them while the next iteration begins."""
    target, version = TARGETS[compiled.target], numbers_of(compiled.triton)
    reads_async = target.reads_async and version >= target.int8_from
    shallow = [
        f"{meant.name}: {loop.depth} deep, meant {needed}"
        for loop, meant in zip(compiled.loops, intent.loops, strict=False)
        if meant.ahead
        and loop.depth < (needed := meant.ahead + int(reads_async and not meant.waits))
    ]
    depths = "/".join(str(loop.depth) for loop in compiled.loops)
    return Verdict("depth", not shallow, "; ".join(shallow) or f"{depths or 'no'} buffers")


def short_loops(compiled: Compiled, intent: Intent) -> Verdict:
    """Instructions for one tile, against the limits that were set."""
    long = [
        f"{meant.name}: {loop.per_tile:.0f} instructions for a tile, at most {meant.most}"
        for loop, meant in zip(compiled.loops, intent.loops, strict=False)
        if meant.most is not None and (loop.tiles is None or loop.per_tile > meant.most)
    ]
    return Verdict("loop length", not long, "; ".join(long) or "within the limits")


def no_growth(compiled: Compiled, recorded: Mapping[str, int] | None) -> Verdict:
    """No more instructions than recorded."""
    if recorded is None:
        text = "nothing recorded for this kernel; record it with --update-ratchet REASON"
        return Verdict("ratchet", False, text)
    now = ratchet_numbers(compiled)
    grown = [
        f"{name} {now.get(name, 'missing')}, recorded {n}"
        for name, n in recorded.items()
        if now.get(name, n + 1) > n
    ]
    grown += [f"{name} is new" for name in now if name not in recorded]
    return Verdict("ratchet", not grown, "; ".join(grown) or "no more than recorded")


def ratchet_numbers(compiled: Compiled) -> dict[str, int]:
    """What must not grow: instructions for a tile of each loop; without loops, of the kernel."""
    loops = {f"loop {i}": round(x.per_tile) for i, x in enumerate(compiled.loops, start=1)}
    return loops or {"instructions": compiled.instructions}


RULES: tuple[Rule, ...] = (
    compiles,
    no_spills,
    main_loop_stays_in_registers,
    fits_shared,
    has_loops,
    uses_matrix_units,
    chains_nothing,
    loads_ahead,
    short_loops,
)
