"""Machine code as text → instructions and loops, for NVIDIA (`nvdisasm -c`) and AMD (amdgcn).

A loop is a natural loop of the control flow graph: ptxas moves rarely taken parts of a loop behind
the kernel's end, where a region from label to branch would miss them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_SASS = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[\w.]+)?)(.*)")
_SASS_LABEL = re.compile(r"(\.L_x_\d+|\$?[\w$]+):\s*$")
_SASS_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_GCN = re.compile(r"\s+([a-z][a-z0-9_]*)\b([^;]*)")
_GCN_LABEL = re.compile(r"(\.LBB\w+):")
_GCN_TARGET = re.compile(r"(\.LBB\w+)")
_SASS_MATRIX = re.compile(r"[A-Z]?(?:MMA|GMMA)$|UTC[A-Z]*MMA$")


@dataclass(frozen=True)
class Instruction:
    """opcode: with its modifiers. target: the label it may go to. ends: control never falls
    through to the next instruction."""

    opcode: str
    target: str | None = None
    ends: bool = False

    @property
    def name(self) -> str:
        """The opcode without modifiers; AMD's have none."""
        return self.opcode.split(".", 1)[0]

    @property
    def is_matrix(self) -> bool:
        return self.opcode.startswith(("v_mfma", "v_wmma")) or bool(_SASS_MATRIX.match(self.name))


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel, and where each label stands among them."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(default_factory=dict)

    def count(self, wanted: Callable[[Instruction], bool] = lambda _: True) -> Counter[str]:
        return Counter(x.opcode for x in self.instructions if wanted(x))


def read_sass(text: str) -> Code:
    """The code of the first kernel in a listing of `nvdisasm -c`."""
    made: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            labels[label[1]] = len(made)
        elif found := _SASS.match(line):
            made.append(_sass_instruction(found[1], found[2], found[3]))
    return Code(tuple(made), labels)


def _sass_instruction(guard: str | None, opcode: str, operands: str) -> Instruction:
    name = opcode.split(".", 1)[0]
    target = _SASS_TARGET.search(operands)
    # BSSY only notes where threads meet again. CALL may be a jump in disguise, or come back.
    goes = name in ("BRA", "CALL", "JMP", "BREAK")
    # `BRA.U UP0, label` is conditional without a guard.
    always = guard is None and not re.match(r"\s*!?U?P\w+,", operands)
    ends = always and name in ("BRA", "JMP", "EXIT", "RET", "BRX", "JMX")
    return Instruction(opcode, target[1] if goes and target else None, ends)


def read_amdgcn(text: str) -> Code:
    """The code of the first kernel of an assembly file, without its metadata."""
    made: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if line.lstrip().startswith((".section\t.rodata", ".amdhsa_kernel")):
            break
        if label := _GCN_LABEL.match(line):
            labels[label[1]] = len(made)
        elif found := _GCN.match(line):
            made.append(_gcn_instruction(found[1], found[2]))
    return Code(tuple(made), labels)


def _gcn_instruction(opcode: str, operands: str) -> Instruction:
    target = _GCN_TARGET.search(operands) if "branch" in opcode else None
    ends = opcode in ("s_branch", "s_endpgm", "s_setpc_b64")
    return Instruction(opcode, target[1] if target else None, ends)


@dataclass(frozen=True)
class Body:
    """The instructions of one loop, in the order of their addresses; start: its first address."""

    start: int
    instructions: tuple[Instruction, ...]

    def count(self, wanted: Callable[[Instruction], bool] = lambda _: True) -> Counter[str]:
        return Counter(x.opcode for x in self.instructions if wanted(x))


def innermost_loops(code: Code, holds: Callable[[Instruction], bool]) -> list[Body]:
    """The loops that hold such instructions and contain no other loop that does, in order."""
    blocks = _blocks(code)
    loops = [
        body
        for body in _natural_loops(_successors(code, blocks))
        if any(holds(x) for b in body for x in code.instructions[slice(*blocks[b])])
    ]
    inner = [body for body in loops if not any(other < body for other in loops)]
    bodies = [
        Body(
            blocks[min(body)][0],
            tuple(x for b in sorted(body) for x in code.instructions[slice(*blocks[b])]),
        )
        for body in inner
    ]
    return sorted(bodies, key=lambda body: body.start)


def _blocks(code: Code) -> list[tuple[int, int]]:
    """Basic blocks as ranges of instructions."""
    n = len(code.instructions)
    starts = {0, *(at for at in code.labels.values() if at < n)}
    starts |= {i + 1 for i, x in enumerate(code.instructions[:-1]) if x.target or x.ends}
    ordered = [*sorted(starts), n]
    return [(a, b) for a, b in itertools.pairwise(ordered) if a < b]


def _successors(code: Code, blocks: Sequence[tuple[int, int]]) -> list[list[int]]:
    block_at = {start: i for i, (start, _) in enumerate(blocks)}
    found: list[list[int]] = []
    for i, (_, stop) in enumerate(blocks):
        last = code.instructions[stop - 1]
        after = [] if last.ends or i + 1 == len(blocks) else [i + 1]
        where = code.labels.get(last.target) if last.target else None
        after += [block_at[where]] if where in block_at else []
        found.append(after)
    return found


def _natural_loops(successors: list[list[int]]) -> list[frozenset[int]]:
    """The blocks of each loop; edges back to one header make one loop."""
    dominators = _dominators(successors)
    before = _predecessors(successors)
    bodies: dict[int, set[int]] = {}
    for block, after in enumerate(successors):
        for head in after:
            if head in dominators[block]:
                body = bodies.setdefault(head, {head})
                waiting = [block]
                while waiting:
                    one = waiting.pop()
                    if one not in body:
                        body.add(one)
                        waiting += before[one]
    return [frozenset(bodies[head]) for head in sorted(bodies)]


def _predecessors(successors: list[list[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in successors]
    for block, after in enumerate(successors):
        for one in after:
            before[one].append(block)
    return before


def _dominators(successors: list[list[int]]) -> list[frozenset[int]]:
    """For each reachable block, the blocks on every way to it; none for the others."""
    before = _predecessors(successors)
    order, seen, waiting = [], {0}, [0]
    while waiting:
        block = waiting.pop()
        order.append(block)
        new = [one for one in successors[block] if one not in seen]
        seen.update(new)
        waiting += new
    everything = frozenset(order)
    found = [everything if block in seen else frozenset() for block in range(len(successors))]
    found[0] = frozenset({0})
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            ways = [found[one] for one in before[block] if one in seen]
            new_set = frozenset.intersection(*ways) | {block}
            if new_set != found[block]:
                found[block], changed = new_set, True
    return found


@lru_cache(maxsize=256)
def macs(opcode: str) -> tuple[int, int] | None:
    """Multiply-adds of one matrix instruction, and the warps that issue it together.

    None where the shape is not in the opcode (tcgen05: it is in a descriptor)."""
    if found := re.match(r"[HIQ]MMA\.(168\d+)", opcode):
        return 16 * 8 * int(found[1][3:]), 1
    shape = re.search(r"(\d+)x(\d+)x(\d+)", opcode)
    if shape is None:
        return None
    m, n, k = map(int, shape.groups())
    return m * n * k, 4 if "GMMA" in opcode else 1
