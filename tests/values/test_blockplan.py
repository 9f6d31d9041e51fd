"""Plans as bool masks, their counts and their pictures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plans import a_plan, allowed_blocks, call, random_mask
from sparge import BlockPlan

# --- masks ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(**call, seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_mask_round_trip_drops_only_what_nothing_may_attend(Lq, Lk, is_causal, align, seed, share):
    mask = random_mask(2, 2, Lq, Lk, seed, share)
    sizes = {"Lq": Lq, "Lk": Lk, "is_causal": is_causal, "causal_align": align}
    plan = BlockPlan.from_mask(mask, **sizes)
    may = allowed_blocks(Lq, Lk, is_causal, align)
    assert torch.equal(plan.to_mask(), mask & may)
    assert torch.equal(plan.allowed, may.sum(-1, dtype=torch.int32).expand(2, 2, -1))
    assert torch.equal(plan.counts, (mask & may).sum(-1, dtype=torch.int32))
    plan.validate()
    assert BlockPlan.from_mask(plan.to_mask(), **sizes).equal(plan)


def test_lists_are_ascending_int32_then_minus_one():
    mask = torch.tensor([[[[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]]]).bool()
    plan = BlockPlan.from_mask(mask, Lq=200, Lk=300)
    assert plan.counts.tolist() == [[[3, 0]]]
    assert plan.indices.tolist() == [[[[1, 3, 4, -1, -1], [-1] * 5]]]
    assert {plan.counts.dtype, plan.indices.dtype, plan.allowed.dtype} == {torch.int32}


def test_blocks_that_a_token_mask_closes_are_dropped():
    tokens = torch.ones(1, 1, 200, 300, dtype=torch.bool)
    tokens[..., :128, 64:128] = False
    tokens[..., 128:, :127] = False  # one pair of block 1 stays open
    mask = torch.ones(1, 2, 2, 5, dtype=torch.bool)
    plan = BlockPlan.from_mask(mask, Lq=200, Lk=300, attn_mask=tokens)
    assert plan.to_mask()[0, 0].tolist() == [[True, False, True, True, True], [False, *[True] * 4]]
    assert plan.allowed.tolist() == [[[4, 4], [4, 4]]]
    assert plan.has_mask
    assert plan.density == 1.0


def test_a_two_dimensional_token_mask_is_as_good_as_in_attention():
    tokens = torch.ones(200, 300, dtype=torch.bool).tril()
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    flat = BlockPlan.from_mask(mask, Lq=200, Lk=300, attn_mask=tokens)
    assert flat.equal(BlockPlan.from_mask(mask, Lq=200, Lk=300, attn_mask=tokens[None, None]))


def test_a_plan_does_not_follow_the_mask_it_was_made_of():
    mask = random_mask(1, 1, 300, 500)
    plan, before = BlockPlan.from_mask(mask, Lq=300, Lk=500), mask.clone()
    mask.fill_(True)
    assert torch.equal(plan.to_mask(), before)


def test_equal_looks_at_tensors_and_facts():
    plan = a_plan()
    assert plan.equal(a_plan())
    assert not plan.equal(a_plan(seed=1))
    for name, value in {"Lq": 299, "Lk": 499, "is_causal": True, "has_mask": True}.items():
        assert not plan.equal(dataclasses.replace(plan, **{name: value}))
    assert not plan.equal(dataclasses.replace(plan, offset=200))


def test_plans_compare_by_what_they_keep():
    assert a_plan(is_causal=True) == a_plan(is_causal=True)
    assert a_plan(is_causal=True) != a_plan()
    assert a_plan(seed=0) != a_plan(seed=1)
    assert a_plan() != "a plan"
    with pytest.raises(TypeError, match="unhashable"):
        hash(a_plan())


def test_a_plan_moves_to_another_device():
    plan = a_plan(is_causal=True)
    moved = plan.to("meta")
    assert {x.device.type for x in (moved.counts, moved.indices, moved.allowed)} == {"meta"}
    assert (moved.Lq, moved.Lk, moved.is_causal) == (300, 500, True)
    assert plan.to("cpu") == plan


# --- counting ---------------------------------------------------------------------------------


def test_density_of_a_causal_plan_counts_only_allowed_blocks():
    # 2 x 4 blocks; the first row may attend 2, the second 4.
    mask = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
    mask[..., 0] = True
    causal = BlockPlan.from_mask(mask, Lq=256, Lk=256, is_causal=True)
    assert causal.density == 2 / 6
    assert BlockPlan.from_mask(mask, Lq=256, Lk=256).density == 2 / 8
    full = BlockPlan.from_mask(torch.ones_like(mask), Lq=256, Lk=256, is_causal=True)
    assert full.density == 1.0
    assert full.sparsity() == 0.0


def test_head_density():
    mask = torch.zeros(2, 2, 2, 4, dtype=torch.bool)
    mask[0, 0] = True
    mask[0, 1, :, 0] = True
    mask[1, 0, 1, 3] = True
    plan = BlockPlan.from_mask(mask, Lq=256, Lk=256, is_causal=True)
    want = torch.tensor([[1.0, 2 / 6], [1 / 6, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(plan.head_density(), want, rtol=1e-15, atol=0)
    assert plan.density == 9 / 24


def test_where_nothing_may_be_attended_nothing_is_missing():
    tokens = torch.zeros(1, 2, 10, 10, dtype=torch.bool)
    tokens[:, 1] = True
    mask = torch.zeros(1, 2, 1, 1, dtype=torch.bool)
    plan = BlockPlan.from_mask(mask, Lq=10, Lk=10, attn_mask=tokens)
    assert plan.head_density().tolist() == [[1.0, 0.0]]
    closed = BlockPlan.from_mask(mask[:, :1], Lq=10, Lk=10, attn_mask=tokens[:, :1])
    assert (closed.density, closed.sparsity(), closed.pv_skipped(None)) == (1.0, 0.0, 0.0)


def test_sparsity_as_the_paper_counts_it():
    # 2 x 4 blocks, 3 of 8 kept: 5 QK and 5 PV blocks are skipped.
    mask = torch.tensor([[[[1, 0, 1, 0], [0, 1, 0, 0]]]]).bool()
    plan = BlockPlan.from_mask(mask, Lq=130, Lk=200)
    assert plan.sparsity() == (5 + 5) / 16
    # The first query block has 8 groups of 16 rows; the tail of 2 rows is one group, so that
    # one skip is a whole block there and an eighth of one above.
    assert plan.row_groups().tolist() == [8, 1]
    pv_skips = torch.tensor([[[4, 1]]], dtype=torch.int32)
    assert plan.sparsity(pv_skips) == (5 + 5 + 4 / 8 + 1) / 16
    assert plan.pv_skipped(pv_skips) == 5 / (2 * 8 + 1 * 1)
    assert plan.pv_skipped(torch.zeros_like(pv_skips)) == 0.0


@pytest.mark.parametrize(
    "Lq, groups", [(1, [1]), (16, [1]), (17, [2]), (129, [8, 1]), (250, [8, 8])]
)
def test_row_groups_of_tails(Lq, groups):
    mask = torch.ones(1, 1, len(groups), 1, dtype=torch.bool)
    assert BlockPlan.from_mask(mask, Lq=Lq, Lk=5).row_groups().tolist() == groups


@settings(deadline=None, max_examples=50)
@given(**call, seed=st.integers(0, 1000))
def test_sparsity_without_a_second_filter_is_what_density_leaves(Lq, Lk, is_causal, align, seed):
    plan = a_plan(Lq, Lk, is_causal=is_causal, align=align, seed=seed)
    assert plan.sparsity() == pytest.approx(1 - plan.density, abs=1e-12)
    everything = plan.counts * plan.row_groups()
    kept = int(plan.counts.sum())
    assert plan.pv_skipped(everything) == (1.0 if kept else 0.0)
    half = 1 - plan.density / 2
    assert plan.sparsity(everything) == pytest.approx(half if int(plan.allowed.sum()) else 0.0)


# --- printing ---------------------------------------------------------------------------------


def test_prints_sizes_density_and_a_picture():
    mask = torch.tensor([[[[1, 0, 1, 0], [0, 1, 0, 0]]]]).bool().expand(2, 3, 2, 4)
    text = str(BlockPlan.from_mask(mask, Lq=130, Lk=200))
    head, title, *picture = text.splitlines()
    for words in ("2 x 3 heads", "130 queries", "200 keys", "2 x 4 blocks", "density 0.375"):
        assert words in head
    assert "causal" not in head
    assert title == "head 0:"
    assert picture == ["  █ █ ", "   █  "]


def test_repr_is_one_line_with_the_density():
    plan = a_plan(is_causal=True, align="bottom_right")
    assert f"density {plan.density:.3f}" in repr(plan)
    assert "causal offset 200" in repr(plan)
    assert "\n" not in repr(plan)
    assert f"density {plan.density:.3f}" in str(plan)


def test_the_causal_future_is_drawn_as_dots():
    mask = torch.ones(1, 1, 4, 8, dtype=torch.bool)
    mask[..., 3, 1:4] = False
    plan = BlockPlan.from_mask(mask, Lq=512, Lk=512, is_causal=True)
    assert plan.picture().splitlines() == ["  ██······", "  ████····", "  ██████··", "  █   ████"]


def test_picture_of_a_chosen_head():
    mask = torch.zeros(2, 2, 1, 3, dtype=torch.bool)
    mask[1, 0, 0, 1] = True
    plan = BlockPlan.from_mask(mask, Lq=128, Lk=192)
    assert plan.picture(b=1, h=0) == "   █ "
    assert plan.picture(b=0, h=1).strip() == ""


@pytest.mark.parametrize("Lq, Lk", [(1, 1), (12_800, 64), (64, 19_200), (12_800, 19_200)])
def test_a_picture_is_never_large(Lq, Lk):
    plan = a_plan(Lq, Lk, B=1, H=1)
    lines = plan.picture().splitlines()
    assert 1 <= len(lines) <= 16
    assert len({len(line) for line in lines}) == 1
    assert 3 <= len(lines[0]) <= 2 + 32
    assert len(str(plan).splitlines()) == 2 + len(lines)


def test_shades_say_how_much_of_a_patch_is_kept():
    # 32 characters for 128 blocks: patches of 4 blocks hold 0 … 4 kept ones.
    mask = torch.zeros(1, 1, 1, 128, dtype=torch.bool)
    for patch in range(5):
        mask[..., 4 * patch : 4 * patch + patch] = True
    line = BlockPlan.from_mask(mask, Lq=1, Lk=128 * 64).picture().strip("\n")[2:]
    assert line[0] == " "
    assert line[4] == "█"
    assert all(shade in "░▒▓" for shade in line[1:4])
    assert list(line[1:4]) == sorted(line[1:4])
    assert line[5:].strip() == ""


@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_a_picture_keeps_to_its_width(width):
    lines = a_plan(3000, 6400).picture(width=width).splitlines()
    assert len(lines) >= 1
    assert all(2 < len(line) <= 2 + width for line in lines)
