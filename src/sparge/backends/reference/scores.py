"""Scores of one head, rectangle by rectangle, in base-2 units with the token mask applied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...support.ordered_sums import LOG2E, dot, exp2, shift_of
from ...values.call import Call, slices_of
from ...values.stages import QTensor, working
from ...values.tokenmask import Index, TokenMask

KEYS_AT_ONCE = 4096


@dataclass(frozen=True)
class HeadScores:
    """`s[i, j] = scale · (q_i · k_j) + bias`, times log2(e); -inf where masked."""

    call: Call
    query: Tensor | QTensor
    key: Tensor | QTensor
    tokens: TokenMask
    b: int
    h: int

    @property
    def h_k(self) -> int:
        """The key head that this query head shares with its group."""
        return self.h * self.key.shape[1] // self.query.shape[1]

    def scores(self, rows: Index, cols: slice) -> Tensor:
        s = self.products(rows, cols)
        allowed, bias = self.tokens.region(self.b, self.h, rows, cols, s.device)
        if bias is None:
            s = s * (self.call.scale * LOG2E)
        else:
            # A bias as low as the dtype goes is a number, not a mask, and must stay one.
            s = (s * self.call.scale + bias.to(s.dtype)) * LOG2E
            s = s.clamp(min=torch.finfo(s.dtype).min)
        return s if allowed is None else torch.where(allowed, s, -math.inf)

    def over_all_keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of some rows over all keys, and what they are lowered by, `[r, 1]`."""
        parts = [self.scores(rows, cols) for cols in slices_of(self.tokens.Lk, KEYS_AT_ONCE)]
        scores = torch.cat(parts, dim=1)
        return scores, shift_of(scores.amax(1, keepdim=True))

    def weights(self, rows: Tensor) -> Tensor:
        """exp(score - row_max) of some rows over all keys `[r, Lk]`; zeros where masked."""
        scores, shift = self.over_all_keys(rows)
        return exp2(scores - shift)

    def products(self, rows: Index, cols: Index) -> Tensor:
        """`q_i · k_j`, fp32 (fp64 for fp64 inputs in `"exact"`)."""
        query, key = self.query, self.key
        if isinstance(query, QTensor):
            assert isinstance(key, QTensor)
            q, k = query.codes[self.b, self.h, rows], key.codes[self.b, self.h_k, cols]
            # At most 127² · 256 < 2²⁴: fp32 adds these integers exactly, in any order.
            sums = q.float() @ k.float().T
            q_scale = query.row_scale()[self.b, self.h, rows]
            return sums * q_scale[:, None] * key.row_scale()[self.b, self.h_k, cols]
        assert isinstance(key, Tensor)
        q, k = query[self.b, self.h, rows], key[self.b, self.h_k, cols]
        precision = self.call.recipe.precision
        return dot(working(q, precision), working(k, precision))
