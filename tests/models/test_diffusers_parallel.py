"""diffusers' context parallelism on two and four processes, against one."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sparge
from gloo_ranks import run_ranks
from parallel_denoisers import MODES, RINGS, in_four, in_two
from sparge.models.tokens import Placed, ranges_of
from sparge.models.ulysses import (
    GATHERED,
    ONE_SELECTION,
    ULYSSES,
    HeadShare,
    Shards,
    order_within,
    places_in_ring,
    share_heads,
    tokens_of_ranks,
)
from tiny_denoiser_parts import SAME, randn

ROUNDING = 2e-5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two():
    """What both ranks found, by the name of the check."""
    return run_ranks(in_two, 2, timeout=120)


@pytest.fixture(scope="module")
def four():
    return run_ranks(in_four, 4, timeout=120)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["wan", "flux", "qwen"])
def test_all_blocks_are_dense_attention(name, mode, two):
    way = ONE_SELECTION if mode in RINGS else ULYSSES
    for found in two:
        same = found[f"{name} {mode} same"]
        assert same["dense"] < ROUNDING
        assert same["sparse"]
        assert set(same["parallel"]) == {way}
        assert way in same["text"]


@pytest.mark.parametrize("mode", ["ulysses", "ulysses_anything"])
@pytest.mark.parametrize("name", ["wan", "flux", "qwen"])
def test_ulysses_with_numbers_per_head_is_one_process(name, mode, two):
    for found in two:
        heads = found[f"{name} {mode} heads"]
        assert heads["alone"] < ROUNDING < 0.01 < heads["dense"], "sparse, and the same"


def test_heads_that_do_not_divide(two):
    heads = [found["wan ulysses_anything heads"]["heads"] for found in two]
    assert heads == [[2, 2], [1, 1]]


@pytest.mark.parametrize("mode", RINGS)
def test_a_ring_with_numbers_per_head_is_one_process(mode, two):
    for found in two:
        row = found[f"wan {mode} row"]
        assert row["alone"] < ROUNDING < 0.01 < row["dense"]
        # Elsewhere ranks order their own tokens: other blocks than one process has, as good.
        for name in ("wan", "flux", "qwen"):
            assert found[f"{name} {mode} heads"]["dense"] < 0.3


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_error_budgets_per_head_are_those_of_one_process(mode, two):
    for found in two:
        budget = found[f"wan {mode} budget"]
        assert budget["alone"] < ROUNDING < 1e-3 < budget["dense"]


def test_reference_pictures(two):
    for found in two:
        assert found["kontext ulysses heads"]["alone"] < ROUNDING
        assert found["kontext ring same"]["dense"] < ROUNDING


@pytest.mark.parametrize("mode", MODES)
def test_masks(mode, two):
    for found in two:
        masked = found[f"qwen {mode} mask"]
        assert masked["dense"] < ROUNDING
        if mode in RINGS:
            assert set(masked["parallel"]) == {GATHERED}
            assert list(masked["fallbacks"]) == ["a mask: the ring has none"]
        else:
            assert masked["sparse"]


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_the_name_alone_serves_masks_of_heads(mode, two):
    """LTX splits its text, and its mask has heads; diffusers' own backends fail on both."""
    for found in two:
        assert found[f"ltx {mode} name"]["dense"] < ROUNDING


def test_split_before_and_after_accelerating(two):
    for found in two:
        assert found["before"]["dense"] < ROUNDING
        assert found["before"]["parallel"] == {ULYSSES: 2}
        assert found["after"]["dense"] < ROUNDING
        assert found["after"]["heads"] == [1, 1, 1]


def test_a_gradient_is_left_to_diffusers(two):
    for found in two:
        assert found["gradient"]["dense"] < ROUNDING
        assert "gradient" in next(iter(found["gradient"]["fallbacks"]))


def test_ranks_that_disagree_say_so(two):
    for found in two:
        assert "rank 0 its own, rank 1 sparse" in found["disagree"]["error"]


def test_ulysses_inside_a_ring(four):
    for found in four:
        assert found["wan same"]["dense"] < ROUNDING
        assert found["wan same"]["sparse"]
        assert found["flux same"]["dense"] < ROUNDING
        assert found["wan row"]["alone"] < ROUNDING < 0.01 < found["wan row"]["dense"]
        assert found["qwen mask"]["dense"] < ROUNDING
        assert set(found["qwen mask"]["parallel"]) == {GATHERED}


@pytest.mark.parametrize("heads, world", [(4, 2), (3, 2), (30, 8), (5, 1)])
def test_heads_are_shared_without_rest(heads, world):
    shares = [share_heads(heads, rank, world) for rank in range(world)]
    assert [h for s in shares for h in range(s.start, s.stop)] == list(range(heads))


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ValueError, match="9 heads over 8 ranks, 2 each, leave none for rank 5"):
        share_heads(9, 5, 8)


def test_a_recipe_for_another_number_of_heads_is_refused():
    recipe = sparge.Recipe(sparge.KeepFraction((0.1, 0.2, 0.3, 0.4)))
    assert HeadShare(2, 4, 4).recipe_of(recipe).keep.fraction == (0.3, 0.4)
    assert HeadShare(2, 4, 4).recipe_of(SAME) == SAME
    with pytest.raises(ValueError, match="head"):
        HeadShare(1, 2, 2).recipe_of(recipe)


@pytest.mark.parametrize("streams", [(5, 12), (12, 5), (17, 0), (3, 7)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_streams_come_back(streams, world):
    shards = Shards(streams, world)
    tokens = torch.arange(sum(streams))
    each = torch.split(tokens, streams)
    parts = [part for rank in range(world) for part in (s.tensor_split(world)[rank] for s in each)]
    collected = torch.cat(parts)
    assert torch.equal(tokens_of_ranks(shards, 0, world), collected)
    index, back = order_within(shards, 0, world, None, CPU)
    assert torch.equal(collected[index], tokens)
    assert torch.equal(tokens[back], collected)
    assert sum(shards.held_by(rank, rank + 1) for rank in range(world)) == len(tokens)
    assert torch.equal(collected, tokens) or not shards.in_order


def test_a_rank_orders_its_own_tokens():
    shards, placed = Shards((2, 12), 2), Placed((1, 3, 4), 2, "column")
    mine = tokens_of_ranks(shards, 1, 2)
    assert mine.tolist() == [1, 8, 9, 10, 11, 12, 13]
    index, back = order_within(shards, 1, 2, placed, CPU)
    assert mine[index].tolist() == [1, 10, 11, 8, 12, 9, 13], "by columns, text in front"
    assert torch.equal(mine[index][back], mine)
    places = places_in_ring(shards, 2, placed)
    assert places[[0, 1]].tolist() == [0, 7], "the text of each rank begins its part"
    assert torch.equal(places.sort().values, torch.arange(14))


def test_positions_as_ranges():
    assert ranges_of(torch.tensor([4, 1, 2, 9, 5])) == ((1, 3), (4, 6), (9, 10))
    assert ranges_of(torch.tensor([], dtype=torch.long)) == ()


def test_the_backend_returns_an_lse():
    query, key = randn(1, 200, 2, 8), randn(1, 30, 2, 8, seed=2)
    for keys in (query, key):  # sparse, and cross-attention by torch
        out, lse = dispatch_attention_fn(
            query, keys, keys, attention_kwargs={"return_lse": True}, backend="sparge"
        )
        scores = torch.einsum("blhd,bkhd->blhk", query, keys) * 8**-0.5
        assert lse.dtype == torch.float32
        assert lse.shape == (1, 200, 2)
        assert (lse - scores.logsumexp(-1)).abs().max() < 0.05
        want = torch.einsum("blhk,bkhd->blhd", scores.softmax(-1), keys)
        assert (out - want).norm() < 0.1 * want.norm()


def test_a_mask_of_keys_with_two_dimensions():
    query, mask = randn(2, 200, 2, 8), torch.rand(2, 200) > 0.3
    want = dispatch_attention_fn(query, query, query, attn_mask=mask, backend="native")
    out = dispatch_attention_fn(query, query, query, attn_mask=mask, backend="sparge")
    assert (out - want).norm() < 0.1 * want.norm()
