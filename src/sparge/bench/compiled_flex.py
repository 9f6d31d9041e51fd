"""FlexAttention compiled by torch, for one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Inputs = tuple[Tensor, Tensor, Tensor]


class CompiledFlex:
    """Compiled once for a shape, diagonal and number of threads; shared by all block masks.

    A failure of the compiler is kept: it takes as long as a success, and would repeat.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] | None = None
        self.fault: str | None = None

    def compile(self, inputs: Inputs, block_mask: BlockMask) -> str | None:
        """Compile and run once; return None, or the reason of a failure."""
        if self.fault is None:
            try:
                self.run = self.run or _compiled()
                # In this process: a pool of compilers would stay and use the measured cores.
                with torch._inductor.config.patch(compile_threads=1):
                    self(inputs, block_mask)
            except Exception as fault:  # whatever fails, the other rows are measured
                self.fault = f"does not compile here: {_first_line(fault)}"
        return self.fault

    def __call__(self, inputs: Inputs, block_mask: BlockMask) -> Tensor:
        assert self.run is not None
        with torch.no_grad():
            out = self.run(*inputs, block_mask=block_mask)
        assert isinstance(out, Tensor)
        return out


def _compiled() -> Callable[..., Any]:
    import torch._inductor.config
    from torch.nn.attention.flex_attention import flex_attention

    # Earlier shapes count towards a limit after which torch falls back to eager mode.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def _first_line(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return f"{type(fault).__name__}: {lines[0] if lines else 'no reason given'}"
