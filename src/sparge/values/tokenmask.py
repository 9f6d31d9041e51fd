"""Which token pairs may attend: the causal diagonal and the caller's mask.

`region()` returns the allowed pairs of a rectangle; `block_kinds()` classifies every block as
excluded, mixed or open. Nothing of size Lq x Lk is allocated; a mask keeps the size it came with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .call import BLOCK_K, BLOCK_Q, block_range, in_blocks, n_blocks

EXCLUDED, MIXED, OPEN = 0, 1, 2

Index = slice | Tensor


@dataclass(frozen=True)
class TokenMask:
    Lq: int
    Lk: int
    is_causal: bool = False
    offset: int = 0
    """Query row `i` stands at key position `i + offset`; a causal row sees keys up to there."""
    attn_mask: Tensor | None = None
    """Bool (True may attend) or additive float, viewed as 4-D: `[1|B, 1|Hq, 1|Lq, 1|Lk]`."""
    kinds: Tensor | None = None
    """What `block_kinds` returns, computed ahead for all stages of a call (`with_kinds`)."""

    @property
    def hides_nothing(self) -> bool:
        """True when every pair may attend and no bias is added, as for one query after all keys."""
        return self.attn_mask is None and not (self.is_causal and self.offset < self.Lk - 1)

    @property
    def diagonal(self) -> TokenMask:
        """The same without the caller's mask."""
        return TokenMask(self.Lq, self.Lk, self.is_causal, self.offset)

    def region(
        self, b: int, h: int, rows: Index, cols: Index, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """`(allowed bool | None for all, bias | None for none)` of rows x cols of one head."""
        allowed, bias = None, None
        if self.is_causal:
            q_pos = _positions(rows, self.Lq, device) + self.offset
            allowed = _positions(cols, self.Lk, device) <= q_pos[:, None]
        if self.attn_mask is not None:
            mask = _pick(_pick(self.attn_mask, 0, b), 0, h)
            mask = mask if mask.shape[0] == 1 else mask[rows]
            mask = mask if mask.shape[1] == 1 else mask[:, cols]
            if mask.dtype == torch.bool:
                allowed = mask if allowed is None else allowed & mask
            else:
                bias = mask
                unmasked = mask != float("-inf")
                allowed = unmasked if allowed is None else allowed & unmasked
        return allowed, bias

    def block_kinds(self, device: torch.device) -> Tensor:
        """EXCLUDED, MIXED or OPEN for each block, int8 `[1|B, 1|Hq, n_q, n_k]`."""
        if self.kinds is not None:
            return self.kinds
        if self.attn_mask is None:
            return self._causal_kinds(device)[None, None]
        rows = [self._kinds_of_row(i_q, device) for i_q in range(n_blocks(self.Lq, BLOCK_Q))]
        return torch.stack(rows, dim=2)

    def _causal_kinds(self, device: torch.device) -> Tensor:
        n_q, n_k = n_blocks(self.Lq, BLOCK_Q), n_blocks(self.Lk, BLOCK_K)
        if not self.is_causal:
            return torch.full((n_q, n_k), OPEN, dtype=torch.int8, device=device)
        first_q = torch.arange(n_q, device=device)[:, None] * BLOCK_Q
        last_q = (first_q + BLOCK_Q).clamp(max=self.Lq) - 1
        first_k = torch.arange(n_k, device=device) * BLOCK_K
        last_k = (first_k + BLOCK_K).clamp(max=self.Lk) - 1
        some = first_k <= last_q + self.offset
        every = last_k <= first_q + self.offset
        return some.to(torch.int8) + every.to(torch.int8)

    def _kinds_of_row(self, i_q: int, device: torch.device) -> Tensor:
        """Kinds of one row of blocks, `[1|B, 1|Hq, n_k]`; at most 128 x Lk pairs are looked at."""
        assert self.attn_mask is not None
        rows = block_range(i_q, BLOCK_Q, self.Lq)
        mask = self.attn_mask if self.attn_mask.shape[2] == 1 else self.attn_mask[:, :, rows]
        if mask.dtype == torch.bool:
            allowed, plain = mask, mask
        else:
            allowed, plain = mask != float("-inf"), mask == 0
        if self.is_causal:
            causal, _ = self.diagonal.region(0, 0, rows, slice(None), device)
            assert causal is not None
            allowed, plain = allowed & causal, plain & causal
        allowed = allowed.expand(*allowed.shape[:3], self.Lk)
        plain = plain.expand(*plain.shape[:3], self.Lk)
        some = in_blocks(allowed, -1, BLOCK_K, fill=False)
        every = in_blocks(plain, -1, BLOCK_K, fill=True)
        return some.any(-1).any(2).to(torch.int8) + every.all(-1).all(2).to(torch.int8)


def check_mask(
    attn_mask: Tensor,
    weights: tuple[int, int, int, int],
    *,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless this can mask attention weights `[B, Hq, Lq, Lk]`."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
    if attn_mask.dtype not in dtypes:
        floats = ", ".join(str(dtype)[6:] for dtype in dict.fromkeys(dtypes[1:]))
        raise TypeError(
            f"attn_mask must be bool (True may attend) or an additive {floats}, got "
            f"{attn_mask.dtype}; a 0/1 mask becomes one with .bool()"
        )
    if attn_mask.device != device:
        raise ValueError(f"attn_mask is on {attn_mask.device}, the query on {device}")
    if not broadcasts(attn_mask, weights):
        raise ValueError(
            f"attn_mask must broadcast to [B, Hq, Lq, Lk] = {list(weights)}, got "
            f"{list(attn_mask.shape)}; a key padding mask [B, Lk] becomes one with "
            "[:, None, None, :]"
        )


def as_4d(mask: Tensor | None) -> Tensor | None:
    """A view of a mask with leading dimensions of size 1 added."""
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


def broadcasts(x: Tensor, to: tuple[int, ...]) -> bool:
    if x.dim() > len(to):
        return False
    # dim by dim, so that a compiled graph can follow it
    return all(x.shape[-i] in (1, to[-i]) for i in range(1, x.dim() + 1))


def _positions(index: Index, length: int, device: torch.device) -> Tensor:
    if isinstance(index, Tensor):
        return index
    return torch.arange(*index.indices(length), device=device)


def _pick(mask: Tensor, dim: int, index: int) -> Tensor:
    return mask.select(dim, 0 if mask.shape[dim] == 1 else index)
