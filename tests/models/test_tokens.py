"""Maps of tokens: where the grid begins, what is protected, and ranges that are moved."""

from __future__ import annotations

import pytest
import torch

from sparge.models.diffusers.models import RULES
from sparge.models.route import protected_ranges
from sparge.models.tokens import (
    Placed,
    TokenMap,
    Tokens,
    absolute_ranges,
    check_grid_option,
)
from sparge.reorder import token_order
from tiny_denoisers import DENOISERS

GRID = (2, 3, 4)


@pytest.mark.parametrize("before, after, L, start, others", [
    (0, 0, 24, 0, ()),
    (5, 0, 29, 5, ((0, 5),)),
    (0, 5, 29, 0, ((24, 29),)),
    (None, 0, 31, 7, ((0, 7),)),
    (0, None, 31, 0, ((24, 31),)),
    (5, None, 31, 5, ((0, 5), (29, 31))),
    (None, 2, 31, 5, ((0, 5), (29, 31))),
    (5, 0, 24, 0, ()),  # visual tokens alone
    (5, 0, 30, None, ()),
    (0, 5, 28, None, ()),
    (None, 9, 31, None, ()),
    (None, 0, 23, None, ()),
    (0, None, 12, None, ()),
])  # fmt: skip
def test_where_the_grid_begins(before, after, L, start, others):
    found = TokenMap(GRID, before, after)
    assert found.start(L) == start
    assert found.others(L) == others


def test_a_sequence_of_other_tokens_has_no_map():
    tokens = Tokens("hilbert")
    assert tokens.map_of(24) is None
    tokens.map = TokenMap(GRID, before=5)
    assert tokens.map_of(29) is tokens.map
    assert tokens.map_of(24) is tokens.map
    assert tokens.map_of(77) is None


@pytest.mark.parametrize("grid, L, found", [
    (GRID, 24, GRID), ([2, 3, 4], 24, GRID), ((6, 4), 24, (1, 6, 4)),
    ([GRID, (5, 5)], 24, GRID), ([GRID, (5, 5)], 25, (1, 5, 5)), ([GRID, (5, 5)], 26, None),
    (lambda n: (1, 1, n), 7, (1, 1, 7)), (lambda n: None, 7, None),
])  # fmt: skip
def test_grids_that_are_given(grid, L, found):
    got = Tokens("row", grid).map_of(L)
    assert (None if got is None else got.grid) == found


@pytest.mark.parametrize("grid, match", [
    (GRID, r"grid 2×3×4 has 24 tokens, and an attention layer has 25"),
    (lambda n: (2, 2, 2), r"grid 2×2×2 has 8 tokens"), (lambda n: (0, 1, 25), "grid"),
])  # fmt: skip
def test_a_grid_of_another_size_is_refused(grid, match):
    with pytest.raises((TypeError, ValueError), match=match):
        Tokens("row", grid).map_of(25)


@pytest.mark.parametrize("grid", [(2,), (1, 2, 3, 4), (2, -1), "24", 24, (2.5, 4), [GRID, (1,)]])
def test_what_is_no_grid_is_refused(grid):
    with pytest.raises((TypeError, ValueError), match="grid"):
        check_grid_option(grid)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("order", ["row", "hilbert", "time", "tiles:2x2x2"])
def test_moved_ranges_hold_the_same_tokens(order, start):
    placed = Placed(GRID, start, order)
    at = torch.cat([
        torch.arange(start), token_order(GRID, order) + start, torch.arange(start + 24, 36)
    ])  # fmt: skip
    for ranges in ([(0, 2)], [(3, 9), (20, 36)], [(start, start + 24)], [(35, 36)], [(7, 8)]):
        moved = placed.move_ranges(tuple(ranges))
        assert list(moved) == sorted(moved)
        tokens = {int(at[i]) for a, b in moved for i in range(a, b)}
        assert tokens == {i for a, b in ranges for i in range(a, b)}


def test_reordering_leaves_the_tokens_around_the_grid():
    placed, x = Placed(GRID, 3, "hilbert"), torch.randn(2, 30, 4)
    there = placed.reorder(x)
    assert torch.equal(there[:, :3], x[:, :3])
    assert torch.equal(there[:, 27:], x[:, 27:])
    assert torch.equal(there[:, 3:27], x[:, 3 + token_order(GRID, "hilbert")])
    assert torch.equal(placed.restore(there), x)


@pytest.mark.parametrize("shape", [(27, 27), (1, 27), (27, 1), (2, 1, 27, 27), (2, 1, 1, 27)])
def test_masks_are_reordered_where_they_have_tokens(shape):
    placed, mask = Placed(GRID, 3, "hilbert"), torch.randn(shape)
    full = mask.expand(*shape[:-2], 27, 27)
    got = placed.reorder_mask(mask, 27, 27)
    want = placed.reorder(placed.reorder(full, dim=-2), dim=-1)
    assert torch.equal(got.expand_as(want), want)
    assert placed.reorder_mask(None, 27, 27) is None


def test_a_mask_of_other_keys_is_reordered_by_query_alone():
    placed, mask = Placed(GRID, 0, "hilbert"), torch.randn(24, 7)
    assert torch.equal(placed.reorder_mask(mask, 24, 7), placed.reorder(mask, dim=-2))


def test_ranges_are_sliced_like_python():
    found = absolute_ranges(((0, 3), (-4, -1), (-2, None), (5, None)), 10)
    assert found == [(0, 3), (6, 9), (8, 10), (5, 10)]


@pytest.mark.parametrize("each", [(0, 11), (10, 12), (-11, 3), (10, None), (-3, -5)])
def test_ranges_out_of_bounds_are_refused(each):
    with pytest.raises(ValueError, match="protect must be ranges within the 10 tokens"):
        absolute_ranges((each,), 10)


def test_text_is_protected_beside_the_ranges_of_a_recipe():
    placed = Placed(GRID, 5, "hilbert")
    made = protected_ranges(((5, 7),), 29, ((0, 5),), (*GRID, 5), "hilbert")
    assert made[-1] == (0, 5)
    assert set(made[:-1]) == set(placed.move_ranges(((5, 7),)))
    assert protected_ranges(((5, 7), (-1, None)), 29, (), (), "") == ((5, 7), (28, 29))


@pytest.mark.parametrize("name", DENOISERS)
def test_the_rules_know_the_tokens_of_every_denoiser(name):
    tiny = DENOISERS[name]()
    rule = RULES.get(type(tiny.model).__name__)
    if rule is None:
        assert name == "unet"
        return
    given = dict(tiny.inputs)
    if "img_ids" in given:  # kept with an accelerated model
        from sparge.models.diffusers.models import GRIDS, GridsById

        setattr(tiny.model, GRIDS, GridsById())
    found = rule.tokens(tiny.model, given)
    assert found.grid == tiny.grid
    L = tiny.tokens
    ranges = [(0, tiny.before), (L - tiny.after, L)]
    assert found.others(L) == tuple((a, b) for a, b in ranges if a < b)
