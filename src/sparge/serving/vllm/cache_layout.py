"""How vLLM's CPU attention packs a block of its paged cache, found by writing to one.

Each block holds, for each key head, `block x D` keys and then as many values, in an order that
depends on the instruction set that vLLM chose. All orders seen are of one family: the tokens (or
the channels) lie in groups, and inside a group pairs of the other axis lie side by side.

    tokens in groups:     [block / group, D / pair, group, pair]
    channels in groups:   [D / group, block / pair, group, pair]

`find_cache_layout` writes numbers through vLLM's own function and looks for the order that reads
them back. An order outside of the family is unknown, and such a cache is left to vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS = (1, 2, 4)
Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes key and value `[T, 1, D]` to a cache `[blocks, 1, block, 2 D]` at the slots given."""


@dataclass(frozen=True)
class Order:
    """Where token `t`, channel `d` of a block lies. grouped: the axis whose groups come first."""

    grouped: str
    group: int
    pair: int

    def unpacked(self, packed: Tensor, block: int, D: int) -> Tensor:
        """`[..., block * D]` as a view `[..., block / a, a, D / b, b]`, of which a copy is
        `[..., block, D]`."""
        tokens_first = self.grouped == "tokens"
        outer, inner = (block, D) if tokens_first else (D, block)
        lead = packed.shape[:-1]
        parts = packed.view(*lead, outer // self.group, inner // self.pair, self.group, self.pair)
        order = (0, 2, 1, 3) if tokens_first else (1, 3, 0, 2)
        return parts.permute(*range(len(lead)), *(len(lead) + i for i in order))


@dataclass(frozen=True)
class CacheLayout:
    """The order of keys and of values in a block of `block` tokens and `D` channels."""

    block: int
    D: int
    keys: Order
    values: Order

    def read(self, cache: Tensor, blocks: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy the tokens of `blocks` into key and value `[T, Hk, D]`, as many as they hold.

        cache: `[all blocks, Hk, block, 2 D]`, as vLLM allocates it.
        """
        halves = cache.view(cache.shape[0], cache.shape[1], 2, self.block * self.D)
        tokens = key.shape[0]
        taken = halves[blocks[: -(-tokens // self.block)].long()]
        for half, (order, out) in enumerate(((self.keys, key), (self.values, value))):
            parts = order.unpacked(taken[:, :, half], self.block, self.D)
            rows = parts.permute(0, 2, 3, 1, 4, 5)  # blocks, tokens, heads, channels
            whole = tokens // self.block
            shape = (self.block, *out.shape[1:])
            if whole:
                into = out[: whole * self.block].view(whole, *rows.shape[1:])
                into.copy_(rows[:whole])
            if left := tokens - whole * self.block:
                out[whole * self.block :] = rows[whole].reshape(shape)[:left]


def orders(block: int, D: int) -> Iterator[Order]:
    """The family, plainest first."""
    yield Order("channels", D, 1)  # rows as they are
    for pair in PAIRS:
        for group in _divisors(block):
            if D % pair == 0:
                yield Order("tokens", group, pair)
        for group in _divisors(D):
            if block % pair == 0:
                yield Order("channels", group, pair)


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]


def find_cache_layout(
    write: Write, *, dtype: torch.dtype, block: int, D: int
) -> CacheLayout | None:
    """The layout of a cache that `write` fills; None if it is unknown."""
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    slots = torch.arange(block) + block
    rows, columns = torch.arange(block)[:, None], torch.arange(D)
    seen = []
    for numbers in (rows.expand(block, D), columns.expand(block, D)):
        key = numbers.to(bits).contiguous().view(dtype).view(block, 1, D)
        cache = torch.zeros(2, 1, block, 2 * D, dtype=dtype)
        write(key, key.clone(), cache, slots)
        seen.append(cache.view(2, 2, block * D)[1].view(bits).long())
    there = seen[0] * D + seen[1]  # the number of the token and channel at each place
    found: list[Order] = []
    for half in there:
        fits = (order for order in orders(block, D) if _reads(order, half, block, D))
        order = next(fits, None)
        if order is None:
            return None
        found.append(order)
    return CacheLayout(block, D, *found)


def _reads(order: Order, packed: Tensor, block: int, D: int) -> bool:
    return torch.equal(order.unpacked(packed, block, D).reshape(-1), torch.arange(block * D))
