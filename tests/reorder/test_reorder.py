"""Orders of tokens: permutations, the Hilbert curve's steps and locality, tensors and graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparge.reorder import (
    ORDERS,
    check_grid,
    check_order,
    inverse_order,
    reorder_tokens,
    restore_tokens,
    token_order,
)

SIZES = st.integers(1, 14)
GRIDS = st.tuples(SIZES, SIZES, SIZES)
TILES = ("tiles:4x4x4", "tiles:8x8", "tiles:3x5")
VIDEO = [(13, 30, 45), (8, 24, 32), (16, 16, 16), (5, 31, 47)]


def coordinates(grid, order):
    _, H, W = grid
    index = token_order(grid, order)
    return torch.stack([index // (H * W), index // W % H, index % W], 1)


def steps(grid):
    """Absolute steps along the axes between neighbours on the curve, `[n - 1, 3]`."""
    return coordinates(grid, "hilbert").diff(dim=0).abs()


def self_distance(grid, order, block=64):
    """Mean distance of the tokens of a block from the middle of the block."""
    n = grid[0] * grid[1] * grid[2] // block * block
    blocks = coordinates(grid, order)[:n].double().view(-1, block, 3)
    return float((blocks - blocks.mean(1, keepdim=True)).norm(dim=-1).mean())


@settings(max_examples=40, deadline=None)
@given(grid=GRIDS, order=st.sampled_from((*ORDERS, *TILES)))
@example(grid=(1, 1, 1), order="hilbert")
def test_an_order_has_every_token_once_and_an_inverse(grid, order):
    places = token_order(grid, order)
    n = grid[0] * grid[1] * grid[2]
    assert places.dtype == torch.int64
    assert places.shape == (n,)
    assert torch.equal(places[inverse_order(grid, order)], torch.arange(n))
    assert torch.equal(inverse_order(grid, order)[places], torch.arange(n))


def test_the_curve_of_every_small_box_makes_unit_steps():
    """At most one step of a box is diagonal, and none where all sides are odd, or the longest is
    even."""
    for grid in itertools.product(range(1, 8), repeat=3):
        moved = steps(grid)
        assert (moved <= 1).all(), grid
        diagonal = int((moved.sum(1) > 1).sum())
        odd = [n % 2 for n in grid]
        free = all(odd) or max(grid) % 2 == 0
        assert diagonal <= (0 if free else 1), grid


@settings(max_examples=25, deadline=None)
@given(grid=st.tuples(*[st.integers(1, 40)] * 3))
@example(grid=(1, 37, 41))
@example(grid=(1, 2, 501))
@example(grid=(2, 2, 501))
@example(grid=(40, 39, 1))
def test_the_curve_of_larger_boxes_makes_unit_steps(grid):
    moved = steps(grid)
    assert (moved <= 1).all()
    assert int((moved.sum(1) > 1).sum()) <= 1


@settings(max_examples=20, deadline=None)
@given(sizes=st.tuples(SIZES, SIZES))
def test_a_picture_is_a_video_of_one_frame(sizes):
    for order in (*ORDERS, *TILES):
        assert token_order(sizes, order) is token_order((1, *sizes), order)


def test_blocks_of_the_curve_are_squares_and_cubes():
    for grid, side in (((1, 64, 64), [0, 7, 7]), ((16, 16, 16), [3, 3, 3])):
        blocks = coordinates(grid, "hilbert").view(-1, 64, 3)
        assert (blocks.amax(1) - blocks.amin(1) == torch.tensor(side)).all()


@pytest.mark.parametrize("grid", [*VIDEO, (1, 64, 64), (1, 48, 80), (21, 45, 80)])
def test_blocks_of_the_curve_are_more_compact_than_rows(grid):
    ordered = {order: self_distance(grid, order) for order in ("hilbert", "row", "random")}
    assert ordered["hilbert"] < 0.6 * ordered["row"]
    assert ordered["row"] < ordered["random"]


def test_the_other_orders_by_hand():
    rows = torch.arange(2 * 2 * 3).view(2, 2, 3)
    assert torch.equal(token_order((2, 2, 3), "row"), rows.flatten())
    assert token_order((2, 2, 3), "column").tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert token_order((2, 2, 3), "time").tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert token_order((2, 2, 3), "tiles:2x2").tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 9, 10, 8, 11]
    assert token_order((2, 2, 3), "tiles:2x1x3").tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    assert torch.equal(token_order((2, 2, 3), "tiles:9x9x9"), rows.flatten())
    assert not torch.equal(token_order((2, 2, 3), "random"), rows.flatten())


def test_orders_are_made_once():
    assert token_order((3, 4, 5)) is token_order([3, 4, 5], "hilbert", device="cpu")
    assert inverse_order((3, 4, 5)) is inverse_order((3, 4, 5), device=torch.device("cpu"))


@pytest.mark.parametrize("order", [*ORDERS, "tiles:2x2x2"])
@pytest.mark.parametrize("dim", [-2, 1, 0])
def test_tokens_are_permuted_and_restored(order, dim):
    grid, start = (3, 4, 5), 7
    x = torch.randn(2, 3, 80, 4).movedim(-2, dim)
    out = reorder_tokens(x, grid, order, dim=dim, start=start)
    assert torch.equal(restore_tokens(out, grid, order, dim=dim, start=start), x)
    moved, came = out.movedim(dim, 0), x.movedim(dim, 0)
    assert torch.equal(moved[:start], came[:start])
    assert torch.equal(moved[start + 60 :], came[start + 60 :])
    assert torch.equal(moved[start : start + 60], came[start + token_order(grid, order)])


def test_reordering_has_gradients_after_inference():
    grid = (2, 5, 11)  # of this test alone: kept while gradients are off
    with torch.inference_mode():
        reorder_tokens(torch.randn(110, 4), grid)
    x = torch.randn(110, 4, requires_grad=True)
    weight = torch.randn(110, 4)
    (reorder_tokens(x, grid) * weight).sum().backward()
    assert torch.equal(x.grad, restore_tokens(weight, grid))


def test_reordering_is_compiled_whole_for_grids_that_change():
    def forward(x):
        _, T, H, W, _ = x.shape
        tokens = torch.cat([x.flatten(1, 3), x.flatten(1, 3)[:, :2]], 1)
        there = reorder_tokens(tokens, (T, H, W)).cumsum(1)
        return there, restore_tokens(there, (T, H, W))

    graph = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for shape in ((1, 2, 3, 4, 8), (1, 2, 5, 4, 8), (1, 3, 6, 7, 8)):
        x = torch.randn(shape, requires_grad=True)
        for compiled, plain in zip(graph(x), forward(x), strict=True):
            torch.testing.assert_close(compiled, plain)


def test_a_graph_gets_its_own_copy():
    def forward(x):
        return token_order((2, 3, 4)).add_(x)

    torch.compile(forward, fullgraph=True, backend="aot_eager")(torch.tensor(100))
    assert int(token_order((2, 3, 4)).max()) == 23


def test_tensors_without_numbers_are_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert reorder_tokens(torch.empty(2, 91, 4), (1, 7, 13)).shape == (2, 91, 4)
    assert type(token_order((1, 7, 13))) is torch.Tensor


@pytest.mark.parametrize(
    ("grid", "kind", "why"),
    [
        ((4,), ValueError, "two or three sizes"),
        ((1, 2, 3, 4), ValueError, "two or three sizes"),
        ((0, 4), ValueError, "at least 1"),
        ((2, -4, 4), ValueError, "at least 1"),
        ((2.0, 4), TypeError, "whole numbers"),
        ((True, 4), TypeError, "whole numbers"),
        (64, TypeError, r"\(T, H, W\)"),
        ("44", TypeError, "whole numbers"),
    ],
)
def test_a_wrong_grid_is_refused(grid, kind, why):
    with pytest.raises(kind, match=f"grid must.*{why}"):
        check_grid(grid)


@pytest.mark.parametrize("order", ["Hilbert", "tiles", "tiles:", "tiles:4", "tiles:0x4", "", None])
def test_an_unknown_order_is_refused(order):
    with pytest.raises((ValueError, TypeError), match="order must be"):
        check_order(order)


@pytest.mark.parametrize(("start", "order"), [(0, "hilbert"), (1, "row"), (-1, "hilbert")])
def test_a_grid_that_does_not_match_the_tokens_is_refused(start, order):
    x = torch.zeros(1, 2, 60 - (start == 0), 8)
    with pytest.raises(ValueError, match=r"grid 3×4×5 does not match the tokens.*60 tokens"):
        reorder_tokens(x, (3, 4, 5), order, start=start)


def test_a_wrong_dimension_is_refused():
    with pytest.raises(ValueError, match="dim must be one of the 2 dimensions"):
        restore_tokens(torch.zeros(60, 8), (3, 4, 5), dim=2)
