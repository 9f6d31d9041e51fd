"""Machine code as text → instructions and loops, for NVIDIA (`nvdisasm -c`) and AMD (amdgcn).

A loop is a natural loop of the control flow graph: ptxas moves rarely taken parts of a loop behind
the kernel's end, where a region from label to branch would miss them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
    """The instructions of a kernel or loop, by address, and where each label stands among them."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(default_factory=dict)

    def count(self, wanted: Callable[[Instruction], bool] = lambda _: True) -> Counter[str]:
        return Counter(x.opcode for x in self.instructions if wanted(x))


def read_sass(text: str) -> Code:
    """The code of the first kernel in a listing of `nvdisasm -c`."""
    return _read(text.splitlines(), _SASS_LABEL, _SASS, _sass_instruction)


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
    code = re.split(r"^\s*(?:\.section\t\.rodata|\.amdhsa_kernel)", text, maxsplit=1, flags=re.M)[0]
    return _read(code.splitlines(), _GCN_LABEL, _GCN, _gcn_instruction)


def _gcn_instruction(opcode: str, operands: str) -> Instruction:
    target = _GCN_TARGET.search(operands) if "branch" in opcode else None
    ends = opcode in ("s_branch", "s_endpgm", "s_setpc_b64")
    return Instruction(opcode, target[1] if target else None, ends)


def _read(
    lines: Iterable[str],
    label: re.Pattern[str],
    instruction: re.Pattern[str],
    make: Callable[..., Instruction],
) -> Code:
    made: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines:
        if named := label.match(line):
            labels[named[1]] = len(made)
        elif found := instruction.match(line):
            made.append(make(*found.groups()))
    return Code(tuple(made), labels)


def innermost_loops(code: Code, holds: Callable[[Instruction], bool]) -> list[Code]:
    """The loops that hold such instructions and contain no other loop that does, in order."""
    blocks = [code.instructions[start:stop] for start, stop in _blocks(code)]
    loops = [
        body
        for body in _natural_loops(_successors(code, _blocks(code)))
        if any(holds(x) for block in body for x in blocks[block])
    ]
    inner = [body for body in loops if not any(other < body for other in loops)]
    return [
        Code(tuple(x for block in sorted(body) for x in blocks[block]))
        for body in sorted(inner, key=min)
    ]


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
    """The blocks of each loop: edges back to a block that is on every way to their start. Those
    back to one block make one loop."""
    before: list[list[int]] = [[] for _ in successors]
    for block, after in enumerate(successors):
        for one in after:
            before[one].append(block)
    reachable = _reached(successors, [0])
    loops = []
    for head in sorted(reachable):
        dominated = reachable - _reached(successors, [0], without=head)
        if back := [block for block in before[head] if block in dominated]:
            loops.append(frozenset({head} | _reached(before, back, without=head)))
    return loops


def _reached(
    edges: list[list[int]], starts: Iterable[int], *, without: int | None = None
) -> set[int]:
    """Blocks to which a way leads from the starts that does not pass `without`."""
    found: set[int] = set()
    waiting = list(starts)
    while waiting:
        block = waiting.pop()
        if block not in found and block != without:
            found.add(block)
            waiting += edges[block]
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
