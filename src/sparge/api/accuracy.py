"""Exact attention of a few rows, and the error of an output against it.

The rows are recomputed in plain torch from the same inputs; it does not matter what made the
output: skipping, 8 bits, or another library.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..engine.check import check_call
from ..support.autocast import without_autocast
from ..values.call import slices_of, work_dtype
from ..values.tokenmask import TokenMask, as_4d

ROWS = 64
# Scores held at once: 4M fp32 numbers are 16 MB.
_SCORES = 1 << 22


def output_error(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    rows: int = ROWS,
) -> Tensor:
    """Relative L1 of `out` against exact attention on sampled rows, `[B, Hq]`.

    query, key, value and the other arguments as `attention` had them, out `[B, Hq, Lq, Dv]`.
    rows: how many query rows, one from each of as many equal parts of the sequence.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, got {type(out).__name__}")
    # No gradients here. check_call refuses what is not a tensor.
    query, key, value, out = (
        x.detach() if isinstance(x, Tensor) else x for x in (query, key, value, out)
    )
    call = check_call(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_align=causal_align,
    )
    needed = (*query.shape[:3], value.shape[3])
    if out.shape != needed:
        raise ValueError(f"out must be {list(needed)}, as attention returns, got {list(out.shape)}")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows must be a whole number of at least 1, got {rows!r}")
    tokens = TokenMask(call.Lq, call.Lk, is_causal, call.offset, as_4d(attn_mask))
    chosen = spread_rows(call.Lq, rows).to(query.device)
    # Σ|out - exact| and Σ|exact| over the rows of each head.
    wrong, right = torch.zeros((2, call.B, call.Hq), dtype=torch.float64, device=query.device)
    with torch.no_grad(), without_autocast(call.device):
        for b, h in product(range(call.B), range(call.Hq)):
            for part in slices_of(len(chosen), max(1, _SCORES // call.Lk)):
                some = chosen[part]
                exact = exact_outputs(query, key, value, tokens, b, h, some, scale=call.scale)
                wrong[b, h] += (out[b, h, some].double() - exact.double()).abs().sum()
                right[b, h] += exact.double().abs().sum()
    return torch.where(wrong == 0, 0.0, wrong / right).float()


def spread_rows(L: int, n: int) -> Tensor:
    """Up to n rows, one from each of n equal parts of the sequence; always the same ones.

    At random within its part: a fixed step would always meet the same place of a block.
    """
    n = min(n, L)
    edges = torch.arange(n + 1) * L // n
    within = torch.rand(n, generator=torch.Generator().manual_seed(0))
    return edges[:-1] + (within * (edges[1:] - edges[:-1])).long()


def exact_weights(
    query: Tensor, key: Tensor, tokens: TokenMask, b: int, h: int, rows: Tensor, *, scale: float
) -> Tensor:
    """Softmax weights `[rows, Lk]` of some rows of one query head, fp32 (fp64 for fp64 inputs).

    A row that may attend nothing has weights of zero, as `attention` returns zeros for it.
    """
    work = work_dtype(query.dtype)
    h_k = h * key.shape[1] // query.shape[1]
    scores = query[b, h, rows].to(work) @ key[b, h_k].to(work).mT * scale
    allowed, bias = tokens.region(b, h, rows, slice(None), query.device)
    scores = scores if bias is None else scores + bias
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(nothing, 0.0)


def exact_outputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: TokenMask,
    b: int,
    h: int,
    rows: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention output `[rows, Dv]` of some rows of one query head, in the same dtype."""
    weights = exact_weights(query, key, tokens, b, h, rows, scale=scale)
    h_k = h * key.shape[1] // query.shape[1]
    return weights @ value[b, h_k].to(weights.dtype)
