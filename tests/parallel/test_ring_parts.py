"""The parts of the ring that need no other process: layouts, messages, who plans what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calls import a_call
from sparge.backends.cpu import stages as native
from sparge.parallel.exchange import from_bytes, pack_bits, size_of, to_bytes, unpack_bits
from sparge.parallel.global_plan import make_units
from sparge.parallel.layout import contiguous, sharding_of, zigzag


def covers(layout, total):
    ends = [(piece.start, piece.stop) for piece in layout.pieces]
    return [x for _, x in ends] == [*[x for x, _ in ends[1:]], total] and ends[0][0] == 0


@given(st.integers(1, 5000), st.integers(1, 9), st.sampled_from([1, 64, 128]))
def test_zigzag_deals_every_row_once_and_evenly(total, world, block):
    layout = zigzag(total, world, block)
    assert covers(layout, total)
    lengths = [layout.length(rank) for rank in range(world)]
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 2 * block
    assert all(piece.start % block == 0 for piece in layout.pieces)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6).filter(sum))
def test_whole_blocks_change_little(lengths):
    layout = contiguous(lengths)
    moved = layout.on_blocks(128)
    assert covers(layout, sum(lengths))
    assert covers(moved, sum(lengths))
    assert all(piece.start % 128 == 0 for piece in moved.pieces)
    for rank in range(len(lengths)):
        assert abs(moved.length(rank) - layout.length(rank)) <= 128


def test_lengths_that_are_no_zigzag():
    assert sharding_of("zigzag", [5, 5], "query").total == 10
    with pytest.raises(ValueError, match=r"gives rank 0 5 of 10 rows, its tensor has 6"):
        sharding_of("zigzag", [6, 4], "query")


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_bits_go_there_and_back(n, seed):
    mask = torch.rand((2, 3, n), generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = pack_bits(mask)
    assert bits.shape == (2, 3, -(-n // 8))
    assert torch.equal(unpack_bits(bits, n), mask)


def test_messages_go_there_and_back():
    given = [torch.randn(3, 5).to(torch.bfloat16), torch.empty(0, 4), torch.arange(7)]
    given += [torch.randn(2, 3, 4).transpose(0, 2), torch.tensor([1.5], dtype=torch.float64)]
    message = to_bytes(given, torch.device("cpu"))
    assert message.numel() == size_of(given)
    for x, y in zip(given, from_bytes(message, given), strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3000))
def test_every_head_and_block_is_planned_once(world, Hk, L):
    call = a_call(L, Hq=Hk, Hk=Hk)
    units = make_units(call, world)
    planned = sorted((unit.head, i) for unit in units for i in range(unit.first, unit.stop))
    assert planned == [(head, i) for head in range(Hk) for i in range(call.n_q)]
    assert all(0 <= unit.rank < world for unit in units)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_the_mean_of_sums_is_the_mean_of_all(L, D, seed, half):
    g = torch.Generator().manual_seed(seed)
    key = 3.0 + torch.randn((2, 2, L, D), generator=g) * torch.logspace(-3, 3, D)
    key = key.to(torch.bfloat16) if half else key
    call = a_call(1, Lk=L, B=2, Hq=2, Hk=2, D=D, Dv=D, dtype=key.dtype)
    want = native.prepare_keys(call, key, key, to_plan=False, to_attend=True).mean
    parts = [native.sum_keys(part) for part in key.split(128, dim=2)]
    assert torch.equal(native.mean_of_sums(torch.cat(parts, 2), L), want)
