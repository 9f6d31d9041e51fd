"""One call: `Inputs`, its tensors, and `Call`, its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .recipe import KeepAll, KeepError, Recipe

BLOCK_Q = 128
"""Rows of a query block."""
BLOCK_K = 64
"""Rows of a key block."""
ROW_GROUP = 16
"""Consecutive query rows that the second filter judges together."""
MAX_HEAD_DIM = 256
MAX_OFFSET = 1 << 40
"""Positions beyond this are a mistake; sums of them stay far from the end of int64."""
CAUSAL_ALIGNS = ("top_left", "bottom_right")


def n_blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def block_range(i_block: int, block: int, length: int) -> slice:
    """The valid rows of one block; the tail block is shorter, padding never counts."""
    return slice(i_block * block, min((i_block + 1) * block, length))


def slices_of(length: int, step: int) -> list[slice]:
    """`0 … length-1` in slices of `step`, the last one shorter."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def block_sizes(length: int, block: int, device: torch.device | None = None) -> torch.Tensor:
    """Valid rows of every block, `[n]` int64."""
    starts = torch.arange(0, length, block, device=device)
    return (length - starts).clamp(max=block)


def in_blocks(x: torch.Tensor, dim: int, block: int, *, fill: float | bool = 0) -> torch.Tensor:
    """`dim` cut into `[n, block]`, the tail filled up; `dim` counts from the end, as -1."""
    pad = -x.shape[dim] % block
    return F.pad(x, (0, 0) * (-dim - 1) + (0, pad), value=fill).unflatten(dim, (-1, block))


def diagonal_offset(Lq: int, Lk: int, causal_align: str) -> int:
    """Query row `i` stands at key position `i + offset`; a causal row sees keys up to there."""
    return Lk - Lq if causal_align == "bottom_right" else 0


def allowed_blocks(Lq: int, Lk: int, *, is_causal: bool, offset: int = 0) -> int:
    """Blocks that one head may attend, by the diagonal alone."""
    n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
    if not is_causal:
        return n_q * n_k
    ends = (min((i + 1) * BLOCK_Q, Lq) + offset for i in range(n_q))
    return sum(min(n_blocks(max(end, 0), BLOCK_K), n_k) for end in ends)


def sampled_rows(n_valid: int, sample_rows: int) -> list[int]:
    """Rows of a block that the `"rows"` predictor scores: evenly spaced, the last one included."""
    r = min(sample_rows, n_valid)
    return [(t + 1) * n_valid // r - 1 for t in range(r)]


class Inputs(NamedTuple):
    """The tensors of one call. A plan without `KeepError` needs no value."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    attn_mask: Tensor | None = None
    block_mask: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """Call metadata: shapes, dtype, device and flags; no tensor data."""

    B: int
    Hq: int
    Hk: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: str
    scale: float
    recipe: Recipe
    index: int = 0
    """Which of the devices of its type."""
    is_causal: bool = False
    offset: int = 0
    """Query row `i` stands at key position `i + offset`."""
    has_mask: bool = False
    has_block_mask: bool = False
    return_lse: bool = False
    needs_grad: bool = False
    plan_measured: bool = False
    """The plan to attend was chosen by measured errors, and may raise heads."""
    label: str = ""
    """The caller's name for the call; shown in the record."""

    @property
    def where(self) -> tuple[str, int]:
        """Type and index of the device."""
        return self.device, self.index

    @property
    def n_q(self) -> int:
        return n_blocks(self.Lq, BLOCK_Q)

    @property
    def n_k(self) -> int:
        return n_blocks(self.Lk, BLOCK_K)

    @property
    def predicts(self) -> bool:
        """Whether the recipe needs a mass map."""
        return not isinstance(self.recipe.keep, KeepAll)

    @property
    def pools_blocks(self) -> bool:
        """Whether prediction reads pooled tokens."""
        return self.predicts and self.recipe.predictor != "rows"

    @property
    def measures_error(self) -> bool:
        """Whether the plan is chosen by measured errors, for which planning computes as `attend`
        does."""
        return isinstance(self.recipe.keep, KeepError)

    @property
    def own_precision(self) -> str:
        """The precision that computes with the caller's own numbers."""
        return "half" if self.dtype in (torch.bfloat16, torch.float16) else "exact"

    @property
    def may_raise(self) -> bool:
        """Whether heads may run in `own_precision` in place of 8 bits."""
        return self.recipe.quantized and (self.measures_error or self.plan_measured)

    @property
    def rounds(self) -> bool:
        """Whether the recipe's precision rounds the caller's numbers."""
        return self.recipe.precision not in ("exact", self.own_precision)

    @property
    def samples_rows(self) -> bool:
        """Whether prediction scores a few rows exactly."""
        return self.predicts and self.recipe.predictor != "mean"

    def __str__(self) -> str:
        heads = f"{self.Hq}" if self.Hq == self.Hk else f"{self.Hq}/{self.Hk}"
        lengths = f"{self.Lq}" if self.Lq == self.Lk else f"{self.Lq}x{self.Lk}"
        dims = f"{self.D}" if self.Dv == self.D else f"{self.D}/{self.Dv}"
        at = f" offset {self.offset}" if self.offset else ""
        causal = f" causal{at}" if self.is_causal else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"[{self.B}, {heads}, {lengths}, {dims}] {dtype} on {self.device}{causal}"


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What LSEs, gradients and dense sums are held in: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def half_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type an input runs in: its own if it is one, else bf16, for its range."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16
