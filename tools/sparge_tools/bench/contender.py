"""The contenders of a benchmark (torch's SDPA, sparge, Flash- and FlexAttention): dtype, recipe and
expected cost of each as data, and each one prepared and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparge import (
    DEFAULT,
    BlockPlan,
    KeepAll,
    KeepFraction,
    Recipe,
    Run,
    Unsupported,
    attention,
    explain,
    make_plan,
    record,
)
from sparge.interop import to_flex
from sparge.support.turns import HOST, timer

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Inputs = tuple[Tensor, Tensor, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SDPA, SPARSE, FLEX = "sdpa", "sparse", "flex"
TORCH_FLASH, FLASH_ATTN = "torch flash", "flash_attn"
"""FlashAttention: torch's kernel, and the package; on accelerators."""


def _share(share: float, *, precision: str = "int8", predictor: str = "mean") -> Recipe:
    return Recipe(keep=KeepFraction(share), precision=precision, predictor=predictor)


RECIPES = {
    "all": Recipe(keep=KeepAll()),
    "40%": _share(0.4),
    # The same amount, chosen by the default predictor: shows the cost of its exact rows.
    "40% blend": _share(0.4, predictor="blend"),
    "20%": _share(0.2),
    "default": DEFAULT,
    "fast all": Recipe(keep=KeepAll(), precision="int8-fast"),
    "fast 40%": _share(0.4, precision="int8-fast"),
    "fast 20%": _share(0.2, precision="int8-fast"),
    "fp32 all": Recipe(keep=KeepAll()),
}
"""Measured on every backend; in bf16, unless the name says fp32."""
IN_FLEX = ("all", "40%", "20%", "default")  # FlexAttention has no precision of its own


@dataclass(frozen=True)
class Entry:
    """One contender. backend: the backend that computes attention, or that chooses the blocks."""

    name: str
    kind: str
    dtype: str
    backend: str | None = None
    recipe_name: str | None = None
    recipe: Recipe | None = None


def lineup(backends: Sequence[str], words: Sequence[str] = (), device: str = "cpu") -> list[Entry]:
    """Contenders whose name contains one of the words (all without words), and SDPA of their
    dtypes. Raises ValueError for a word that no name contains."""
    runs = [(SPARSE, backend, backend, name) for backend in backends for name in RECIPES]
    runs += [(FLEX, FLEX, backends[0], name) for name in IN_FLEX]  # blocks of the first backend
    flash = () if device == "cpu" else (TORCH_FLASH, FLASH_ATTN)
    found = [Entry(kind, kind, "bf16") for kind in flash]
    for kind, title, backend, name in runs:
        dtype = "fp32" if name.startswith("fp32") else "bf16"
        found.append(Entry(f"{title} {name}", kind, dtype, backend, name, RECIPES[name]))
    for word in words:
        if not any(word in entry.name for entry in found):
            names = ", ".join(entry.name for entry in found)
            raise ValueError(f"--contenders: no name contains {word!r}; the names are {names}")
    chosen = [e for e in found if not words or any(word in e.name for word in words)]
    result = []
    for dtype in DTYPES:
        same = [entry for entry in chosen if entry.dtype == dtype]
        result += [Entry(f"SDPA {dtype}", SDPA, dtype), *same] if same else []
    return result


class CompiledFlex:
    """FlexAttention, compiled once for a shape, diagonal and number of threads.

    A failure of the compiler is kept: it takes as long as a success, and would repeat.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] | None = None
        self.fault: str | None = None

    def compile(self, inputs: Inputs, block_mask: BlockMask) -> str | None:
        """Compile and run once; return None, or the reason of a failure."""

        def work() -> None:
            self.run = self.run or _compiled()
            # In this process: a pool of compilers would stay and use the measured cores.
            with torch._inductor.config.patch(compile_threads=1):
                self(inputs, block_mask)

        self.fault = self.fault or fault_of(work, "does not compile here")
        return self.fault

    @torch.no_grad()
    def __call__(self, inputs: Inputs, block_mask: BlockMask) -> Tensor:
        assert self.run is not None
        return self.run(*inputs, block_mask=block_mask)


def _compiled() -> Callable[..., Any]:
    import torch._inductor.config
    from torch.nn.attention.flex_attention import flex_attention

    # Earlier shapes count towards a limit after which torch falls back to eager mode.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def fault_of(work: Callable[[], Any], what: str) -> str | None:
    """Run once; return None, or why it fails. Whatever fails, the other rows are measured."""
    try:
        work()
    except Exception as fault:
        first_line = next(iter(str(fault).strip().splitlines()), "no reason given")
        return f"{what}: {type(fault).__name__}: {first_line}"
    return None


def _torch_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """The package has tokens before heads."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out: Tensor = import_module("flash_attn").flash_attn_func(q, k, v, causal=is_causal)
    return out.transpose(1, 2)


WHOLE = {
    SDPA: F.scaled_dot_product_attention,
    TORCH_FLASH: _torch_flash,
    FLASH_ATTN: _flash_attn,
}
"""Kinds that compute every block."""


@dataclass
class Contender:
    """An entry of the lineup, prepared for one case.

    rows: query rows whose output is kept for the error. plan: the blocks that are read.
    why_not: why it cannot run here, or None. seconds, runs: one per round.
    """

    entry: Entry
    inputs: Inputs
    is_causal: bool
    rows: Tensor
    flex: CompiledFlex
    plan: BlockPlan | None = None
    why_not: str | None = None
    out: Tensor | None = None
    seconds: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Do everything that is not timed."""
        self._prepare()
        if self.why_not is None and self.inputs[0].device.type not in HOST:
            self.attend()  # compiles its kernels

    def _prepare(self) -> None:
        entry = self.entry
        options: dict[str, Any] = {"is_causal": self.is_causal}
        self.attend: Callable[[], Tensor]
        if entry.kind in WHOLE:
            self.attend = partial(WHOLE[entry.kind], *self.inputs, **options)
            if entry.kind != SDPA:
                self.why_not = fault_of(self.attend, "does not run here")
            return
        options |= {"recipe": entry.recipe, "backend": entry.backend}
        try:
            explain(*self.inputs, **options)
        except Unsupported as refused:
            why = refused.reasons[str(entry.backend)]
            no_blocks = f"no blocks to give it; {entry.backend} says: {why}"
            self.why_not = why if entry.kind == SPARSE else no_blocks
            return
        self.plan = make_plan(*self.inputs[:2], **options, value=self.inputs[2])
        if entry.kind == SPARSE:
            self.attend = partial(attention, *self.inputs, **options)
        else:
            block_mask = to_flex(self.plan)
            self.why_not = self.flex.compile(self.inputs, block_mask)
            self.attend = partial(self.flex, self.inputs, block_mask)

    def take_turn(self) -> float:
        """Run once; return the seconds. Recording the stages is part of the time; where it would
        make the host wait for the device after each stage, they are recorded in a second run."""
        device = self.inputs[0].device.type
        if device in HOST:
            with record() as runs:
                start = time.perf_counter()
                out = self.attend()
                seconds = time.perf_counter() - start
        else:
            seconds, out = timer(device)(self.attend)
            with record() as runs:
                if self.entry.kind == SPARSE:
                    self.attend()
        self.runs += runs
        if self.out is None:
            # Sampled rows only: keeping the whole output would leave the next turn cold memory.
            self.out = out[:, :, self.rows].clone()
        return seconds
