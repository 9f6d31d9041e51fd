"""Layouts of a paged cache are found by writing to it, and read back."""

from __future__ import annotations

import pytest
import torch

from sparge.serving.vllm.cache_layout import CacheLayout, Order, find_cache_layout, orders

ROWS = Order("channels", 64, 1)


def packed(x, order, block, D):
    """`[block, D]` as it lies in memory, by the formula of the layout."""
    if order.grouped == "tokens":
        parts = x.view(block // order.group, order.group, D // order.pair, order.pair)
        return parts.permute(0, 2, 1, 3).reshape(-1)
    parts = x.view(block // order.pair, order.pair, D // order.group, order.group)
    return parts.permute(2, 0, 3, 1).reshape(-1)


def writer(keys, values, block, D):
    """vLLM's function, as it would be with these orders."""

    def write(key, value, cache, slots):
        halves = cache.view(cache.shape[0], cache.shape[1], 2, block * D)
        for number in range(int(slots[0]) // block, int(slots[-1]) // block + 1):
            here = (slots // block == number).nonzero()[:, 0]
            for half, (x, order) in enumerate(((key, keys), (value, values))):
                for head in range(cache.shape[1]):
                    rows = x[here, head].contiguous()
                    if len(rows) < block:
                        rows = torch.cat([rows, rows.new_zeros(block - len(rows), D)])
                    halves[number, head, half] = packed(rows, order, block, D)

    return write


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "keys, values",
    [
        (ROWS, ROWS),
        (Order("tokens", 128, 1), ROWS),
        (Order("tokens", 16, 2), Order("channels", 16, 2)),
        (Order("tokens", 32, 4), Order("channels", 32, 4)),
    ],
)
def test_a_layout_is_found_and_read(keys, values, dtype):
    block, D = 128, 64
    write = writer(keys, values, block, D)
    layout = find_cache_layout(write, dtype=dtype, block=block, D=D)
    assert layout == CacheLayout(block, D, keys, values)
    tokens, Hk = 2 * block + 7, 3
    key, value = (torch.randn(tokens, Hk, D).to(dtype) for _ in range(2))
    cache = torch.zeros(3, Hk, block, 2 * D, dtype=dtype)
    write(key, value, cache, torch.arange(tokens))
    read = [torch.full_like(key, float("nan")) for _ in range(2)]
    layout.read(cache, torch.arange(3), *read)
    assert torch.equal(read[0], key)
    assert torch.equal(read[1], value)


def test_an_unknown_layout_is_none():
    def write(key, value, cache, slots):
        flat = torch.cat([key, value], 1).flatten()
        cache[1].view(-1)[:] = flat[torch.randperm(len(flat), generator=torch.manual_seed(0))]

    assert find_cache_layout(write, dtype=torch.bfloat16, block=32, D=64) is None


def test_every_order_holds_every_element_once():
    for order in orders(32, 96):
        numbers = torch.arange(32 * 96)
        assert torch.equal(order.unpacked(numbers, 32, 96).flatten().sort().values, numbers)
