"""FlexAttention as torch compiles it, one shape at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Inputs = tuple[Tensor, Tensor, Tensor]


class CompiledFlex:
    """For one shape, diagonal and number of threads; all block masks of that shape share it.

    A fault of the compiler is remembered: it costs as long as a success, and comes again.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] | None = None
        self.fault: str | None = None

    def compile(self, inputs: Inputs, block_mask: BlockMask) -> str | None:
        """Compile and run once; None, or why that failed."""
        if self.fault is None:
            try:
                self.run = self.run or _compiled()
                # In this process: a pool of compilers would stay, and share the cores we measure.
                with torch._inductor.config.patch(compile_threads=1):
                    self(inputs, block_mask)
            except Exception as fault:  # whatever the compiler says, the other rows go on
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

    # Shapes compiled before count towards a limit, after which torch would run it eagerly.
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def _first_line(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return f"{type(fault).__name__}: {lines[0] if lines else 'no reason given'}"
