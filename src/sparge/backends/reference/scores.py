"""Scores of one head, rectangle by rectangle, in base-2 units with the token mask applied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...support.ordered_sums import LOG2E, dot
from ...values.qtensor import Operands, QTensor, working
from ...values.tokenmask import Index, TokenMask


@dataclass(frozen=True)
class HeadScores:
    """`s[i, j] = scale · (q_i · k_j) + bias`, times log2(e); -inf where masked."""

    operands: Operands
    tokens: TokenMask
    b: int
    h: int
    scale: float
    precision: str

    @property
    def h_k(self) -> int:
        """The key head that this query head shares with its group."""
        return self.h * self.operands.key.shape[1] // self.operands.query.shape[1]

    def scores(self, rows: Index, cols: slice) -> Tensor:
        s = self.products(rows, cols)
        allowed, bias = self.tokens.region(self.b, self.h, rows, cols, s.device)
        if bias is None:
            s = s * (self.scale * LOG2E)
        else:
            # A bias as low as the dtype goes is a number, not a mask, and must stay one.
            s = (s * self.scale + bias.to(s.dtype)) * LOG2E
            s = s.clamp(min=torch.finfo(s.dtype).min)
        return s if allowed is None else torch.where(allowed, s, -math.inf)

    def products(self, rows: Index, cols: Index) -> Tensor:
        """`q_i · k_j`, fp32 (fp64 for fp64 inputs in `"exact"`)."""
        query, key = self.operands.query, self.operands.key
        if isinstance(query, QTensor):
            assert isinstance(key, QTensor)
            q, k = query.codes[self.b, self.h, rows], key.codes[self.b, self.h_k, cols]
            # At most 127² · 256 < 2²⁴: fp32 adds these integers exactly, in any order.
            sums = q.float() @ k.float().T
            q_scale = query.row_scale()[self.b, self.h, rows]
            return sums * q_scale[:, None] * key.row_scale()[self.b, self.h_k, cols]
        assert isinstance(key, Tensor)
        q, k = query[self.b, self.h, rows], key[self.b, self.h_k, cols]
        return dot(working(q, self.precision), working(k, self.precision))
