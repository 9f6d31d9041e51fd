"""How sequences are cut into blocks. The same numbers on every backend and every chip."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
