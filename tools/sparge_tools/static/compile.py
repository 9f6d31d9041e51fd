"""Compile one launch for a GPU that is not here, and read what came out.

Arguments are specialised by Triton's own function, as at a launch: integers equal to 1 or divisible
by 16, pointers aligned to 16 bytes (meta tensors are), `do_not_specialize`. No driver is touched.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from sparge.backends.triton.launch import Launch
from sparge.support.errors import Unsupported

from .assembly import Code, innermost_loops, macs, read_amdgcn, read_sass
from .ir import Buffer, Product, buffers_of_loops, products_of_loops
from .ratchet import FITS_TORCH
from .resources import amd_resources, disassemble, nvidia_resources, spilled_bytes
from .targets import Target

KIND_OF = (
    ("int8", re.compile(r"I(?:MMA|GMMA)|UTCIMMA|v_(?:mfma|wmma)_i32_\w*?i[u]?8")),
    ("fp8", re.compile(r"Q(?:MMA|GMMA)|UTCQMMA|v_(?:mfma|wmma)_f32_\w*?fp8")),
    ("half", re.compile(r"H(?:MMA|GMMA)(?!.*TF32)|UTCHMMA|v_(?:mfma|wmma)_f32_\w*?b?f16")),
    ("single", re.compile(r"H(?:MMA|GMMA).*TF32|UTCHMMA|v_mfma_f32_\w*?x[fF]32|v_mfma_f32_\w*f32")),
)
FMA = re.compile(r"FFMA|v_(?:pk_)?fma|v_fmac|v_dual_fmac")
DOT_FMAS = 64
"""A loop with this many multiply-adds and no matrix instruction multiplies matrices by them."""


def why_not() -> str | None:
    """Why nothing can be compiled in this process."""
    if find_spec("triton") is None:
        return "triton is not installed; install it with: pip install triton"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it"
    return None


def need_compiler() -> None:
    if why := why_not():
        raise Unsupported("compiling kernels for GPUs that are not here", {"triton": why})


class Specialized(NamedTuple):
    """What Triton makes of a launch's arguments. key: one compilation for each."""

    options: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    key: str


@dataclass(frozen=True)
class Loop:
    """One innermost loop that multiplies matrices.

    tiles: matrix products of the source that one iteration does; None if they cannot be told.
    products: of the source, in one tile. buffers: of K and V in shared memory. spills: bytes that
    one iteration stores and loads because registers were spilled."""

    instructions: int
    mix: Mapping[str, int]
    matrix: Mapping[str, int]
    tiles: float | None
    products: tuple[Product, ...]
    buffers: tuple[Buffer, ...]
    spills: int = 0

    @property
    def per_tile(self) -> float:
        return self.instructions / (self.tiles or 1.0)

    @property
    def depth(self) -> int:
        """Of the shallower of the two deepest buffers, those of K and V."""
        return ([*sorted((x.depth for x in self.buffers), reverse=True), 0, 0])[1]


@dataclass(frozen=True)
class Compiled:
    """spills: bytes of local memory, stored and loaded by spilled registers in the code (NVIDIA),
    or registers spilled to memory (AMD). scalar_spills: AMD's, to lanes of vector registers.
    stack: bytes per thread. matrix: matrix instructions of the whole kernel by opcode. triton: the
    version that compiled it."""

    target: str
    kernel: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    scalar_spills: int
    stack: int
    shared: int
    instructions: int
    matrix: Mapping[str, int]
    loops: tuple[Loop, ...]
    triton: str = FITS_TORCH


def triton_version() -> str:
    """Of the package that is imported, which may not be the one that pip lists."""
    import triton

    return str(triton.__version__)


def specialize(launch: Launch, target: Target) -> Specialized:
    """The options, types and attributes that a launch with these arguments would compile with."""
    from triton.compiler import make_backend
    from triton.runtime.jit import compute_cache_key, create_function_from_signature

    kernel, backend = launch.kernel, make_backend(target.gpu_target())
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, **launch.options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, dict(launch.options), bound, specialization, options
    )
    key = f"{kernel.cache_key} {compute_cache_key({}, specialization, options)}"
    return Specialized(parsed, signature, constants, attributes, key)


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Raises what the compiler raises."""
    return read(build(launch, target), launch.name, target)


def build(launch: Launch, target: Target) -> Any:
    """The `CompiledKernel` of Triton's that a launch on this target would run."""
    import triton
    from triton.compiler import ASTSource

    how = specialize(launch, target)
    source = ASTSource(launch.kernel, how.signature, how.constants, how.attributes)
    return triton.compile(source, target=target.gpu_target(), options=how.options.__dict__)


def read(made: Any, kernel: str, target: Target) -> Compiled:
    """What a `CompiledKernel` of Triton's is made of, without loading it."""
    if target.is_nvidia:
        code = read_sass(disassemble(made.asm["cubin"]))
        found = nvidia_resources(made.asm["cubin"], code)
    else:
        code = read_amdgcn(made.asm["amdgcn"])
        found = amd_resources(made.asm["amdgcn"])
    warps = made.metadata.num_warps
    return Compiled(
        target=target.name,
        kernel=kernel,
        num_warps=warps,
        num_stages=made.metadata.num_stages,
        shared=made.metadata.shared,
        instructions=len(code.instructions),
        matrix=dict(code.count(lambda x: x.is_matrix)),
        loops=loops_of(code, str(made.asm["ttir"]), str(made.asm["ttgir"]), warps),
        triton=triton_version(),
        **found,
    )


def loops_of(code: Code, ttir: str, ttgir: str, warps: int) -> tuple[Loop, ...]:
    bodies = innermost_loops(code, lambda x: x.is_matrix)
    if not bodies:
        bodies = innermost_loops(code, lambda x: bool(FMA.match(x.opcode)))
        bodies = [body for body in bodies if _fmas(body) >= DOT_FMAS]
    products = _in_step(products_of_loops(ttir), len(bodies))
    buffers = _in_step(buffers_of_loops(ttgir), len(bodies))
    return tuple(
        Loop(
            instructions=len(body.instructions),
            mix=dict(Counter(x.name for x in body.instructions).most_common()),
            matrix=dict(body.count(lambda x: x.is_matrix)),
            tiles=tiles_of(body, meant, warps),
            products=meant,
            buffers=through,
            spills=spilled_bytes(body),
        )
        for body, meant, through in zip(bodies, products, buffers, strict=True)
    )


def _fmas(body: Code) -> int:
    return sum(body.count(lambda x: bool(FMA.match(x.opcode))).values())


def _in_step(found: list[Any], n: int) -> list[Any]:
    """One for each loop of the code; where the compiler split or merged loops, only if all of the
    source's are alike."""
    if len(found) == n:
        return found
    return [found[0] if found and len(set(found)) == 1 else ()] * n


def tiles_of(body: Code, products: Iterable[Product], warps: int) -> float | None:
    """How often one iteration does the products of a tile: the least over their kinds, because a
    layout may compute one of them twice."""
    meant: dict[str, list[Product]] = {}
    for product in products:
        meant.setdefault(product.kind, []).append(product)
    ratios = [_times_done(body, kind, each, warps) for kind, each in meant.items()]
    return min(ratios) if ratios and min(ratios) > 0 else None


def _times_done(body: Code, kind: str, meant: list[Product], warps: int) -> float:
    count = body.count(lambda x: x.is_matrix and kind_of(x.opcode) == kind)
    shapes = {opcode: macs(opcode) for opcode in count}
    if None in shapes.values():  # tcgen05: up to 128 rows, all columns, 32 bytes of k
        of_k = 32 if kind in ("int8", "fp8") else 16
        return sum(count.values()) / sum(-(-x.m // 128) * x.k / of_k for x in meant)
    done = sum(n * shape[0] / shape[1] for opcode, n in count.items() if (shape := shapes[opcode]))
    return done * warps / sum(x.macs for x in meant)


@lru_cache(maxsize=256)
def kind_of(opcode: str) -> str:
    """What a matrix instruction multiplies: int8, fp8, half or single."""
    return next((kind for kind, pattern in KIND_OF if pattern.match(opcode)), "unknown")
