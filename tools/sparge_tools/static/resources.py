"""Registers, spills and stack of a compiled kernel, by the tools of the triton wheel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from .assembly import Code


def nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread. Without a stack, nothing is spilled."""
    text = _run_tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump tells no resource usage: {text[:200]!r}")
    return int(found[1]), int(found[2])


def nvidia_resources(cubin: bytes, code: Code) -> dict[str, int]:
    registers, stack = nvidia_usage(cubin)
    return {
        "registers": registers,
        "stack": stack,
        "spills": spilled_bytes(code),
        "scalar_spills": 0,
    }


def spilled_bytes(code: Code) -> int:
    """Bytes of all instructions that store to or load from local memory, as ptxas counts them; of
    AMD, from scratch memory.

    Triton's kernels have no local arrays, so these are spilled registers."""
    local = code.count(lambda x: x.name in ("STL", "LDL") or x.name.startswith("scratch_"))
    return sum(n * _width(opcode) for opcode, n in local.items())


def _width(opcode: str) -> int:
    if words := re.match(r"scratch_(?:load|store)_dword(?:x(\d))?|scratch_\w+_b(\d+)", opcode):
        return int(words[2]) // 8 if words[2] else 4 * int(words[1] or 1)
    bits = re.search(r"\.(64|128|U8|S8|U16|S16)\b", opcode)
    return {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}[bits[1]] if bits else 4


def amd_resources(amdgcn: str) -> dict[str, int]:
    def number(name: str) -> int:
        found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)", amdgcn, re.M)
        if found is None:
            raise ValueError(f"the assembly has no .{name}")
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        "scalar_spills": number("sgpr_spill_count"),
    }


def disassemble(cubin: bytes) -> str:
    return _run_tool("nvdisasm", "-c", cubin=cubin)


def _run_tool(tool: str, option: str, *, cubin: bytes) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, option, file.name], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{tool} failed: {done.stderr.strip()[:500]}")
    return done.stdout
