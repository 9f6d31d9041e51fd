"""NOUN what tuning keeps of one attention call: all keys and values, some query blocks.

Query blocks are kept whole, because prediction reads statistics of whole blocks; all keys are
kept, because smoothing and prediction read them. So a kept block, run at its own place in the
sequence (`tokens`), gives the rows of the whole call, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..geometry import BLOCK_Q, block_range, diagonal_offset, n_blocks, sampled_rows
from ..tokenmask import TokenMask, as_4d

BLOCKS = 8
"""Query blocks kept of each call, evenly spread, the last one included."""


@dataclass(frozen=True)
class Capture:
    """One call of one sequence.

    query `[1, Hq, rows, D]`: the kept blocks one behind another; key, value `[1, Hk, Lk, …]`.
    starts: the first row of each kept block in the whole call, ascending.
    offset: query row i of the whole call stands at key position `i + offset`.
    attn_mask: `[1, 1|Hq, 1|rows, 1|Lk]`, the rows of the kept blocks; None without one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    starts: tuple[int, ...]
    scale: float
    is_causal: bool = False
    offset: int = 0
    attn_mask: Tensor | None = None

    @property
    def Hq(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    def rows(self, i: int) -> slice:
        """Where block i lies in `query`; only the last may be shorter than the others."""
        return block_range(i, BLOCK_Q, self.query.shape[2])

    def tokens(self, i: int) -> TokenMask:
        """What block i may attend, at its place in the whole call."""
        rows = self.rows(i)
        mask = self.attn_mask
        mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows].contiguous()
        Lq, offset = rows.stop - rows.start, self.starts[i] + self.offset
        return TokenMask(Lq, self.key.shape[2], self.is_causal, offset, mask)

    def head(self, h: int) -> Capture:
        """One query head alone."""
        kv = h // self.group
        query = self.query[:, h : h + 1].contiguous()
        key, value = (x[:, kv : kv + 1].contiguous() for x in (self.key, self.value))
        mask = self.attn_mask
        mask = mask[:, h : h + 1] if mask is not None and mask.shape[1] > 1 else mask
        return replace(self, query=query, key=key, value=value, attn_mask=mask)


def captures_of(
    query: Tensor, key: Tensor, value: Tensor, facts: Mapping[str, Any], *, blocks: int = BLOCKS
) -> list[Capture]:
    """One capture for each sequence of the batch.

    facts: the other arguments of `attention`, such as is_causal and scale. Tensors are copied.
    """
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ValueError(f"blocks must be a whole number of at least 1, got {blocks!r}")
    Lq, Lk, scale = query.shape[2], key.shape[2], facts.get("scale")
    offset = diagonal_offset(Lq, Lk, facts.get("causal_align", "top_left"))
    chosen = [block_range(i, BLOCK_Q, Lq) for i in sampled_rows(n_blocks(Lq, BLOCK_Q), blocks)]
    at = torch.cat([torch.arange(rows.start, rows.stop) for rows in chosen]).to(query.device)
    mask = as_4d(facts.get("attn_mask"))
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, at]
    made = []
    for b in range(query.shape[0]):
        own = None if mask is None else mask[b : b + 1] if mask.shape[0] > 1 else mask
        made.append(
            Capture(
                query=query[b : b + 1, :, at].detach().clone(),
                key=key[b : b + 1].detach().clone(),
                value=value[b : b + 1].detach().clone(),
                starts=tuple(rows.start for rows in chosen),
                scale=float(query.shape[3] ** -0.5 if scale is None else scale),
                is_causal=bool(facts.get("is_causal", False)),
                offset=offset,
                attn_mask=None if own is None else own.detach().clone(),
            )
        )
    return made
