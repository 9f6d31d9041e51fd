"""Plans as FlexAttention block masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import sparge
from plans import EXACT, a_plan
from sparge import BlockPlan
from sparge.interop import to_flex

# --- FlexAttention ----------------------------------------------------------------------------


def tensors(Lq, Lk, *, B=1, Hq=2, Hk=2, D=16, Dv=16):
    g = torch.Generator().manual_seed(3)
    sizes = ((B, Hq, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv))
    return [torch.randn(size, generator=g) for size in sizes]


def flex_and_attend(plan, q, k, v, flex=flex_attention):
    gqa = q.shape[1] != k.shape[1]
    got = flex(q, k, v, block_mask=to_flex(plan), enable_gqa=gqa)
    want, _ = sparge.attend(q, k, v, plan, recipe=EXACT, enable_gqa=gqa, backend="reference")
    return got, want


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "Lq, Lk, is_causal, align",
    [
        pytest.param(256, 256, False, "top_left", id="whole blocks"),
        pytest.param(256, 256, True, "top_left", id="whole blocks causal"),
        pytest.param(200, 150, False, "top_left", id="tails"),
        pytest.param(200, 200, True, "top_left", id="tails causal"),
        pytest.param(130, 333, True, "top_left", id="top left, more keys"),
        pytest.param(130, 333, True, "bottom_right", id="bottom right, more keys"),
        pytest.param(333, 130, True, "bottom_right", id="bottom right, rows without a key"),
        pytest.param(1, 70, True, "bottom_right", id="one query"),
    ],
)
def test_flex_computes_the_same_pairs(Lq, Lk, is_causal, align):
    q, k, v = tensors(Lq, Lk)
    plan = a_plan(Lq, Lk, is_causal=is_causal, align=align, B=1, H=2)
    assert plan.density < 1 or Lq == 1
    got, want = flex_and_attend(plan, q, k, v)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_with_shared_heads_and_batches():
    q, k, v = tensors(140, 200, B=2, Hq=4, Hk=2, Dv=32)
    plan = a_plan(140, 200, is_causal=True, align="bottom_right", B=2, H=4)
    got, want = flex_and_attend(plan, q, k, v)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_lists_name_each_kept_block_once(is_causal):
    plan = a_plan(500, 700, is_causal=is_causal, align="bottom_right")
    block_mask = to_flex(plan)
    assert tuple(block_mask.BLOCK_SIZE) == (128, 64)
    assert tuple(block_mask.seq_lengths) == (500, 700)
    seen = torch.zeros_like(plan.to_mask(), dtype=torch.int64)
    for counts, lists in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        used = torch.arange(lists.shape[-1]) < counts[..., None]
        seen += F.one_hot(lists.long(), lists.shape[-1]).mul(used[..., None]).sum(-2)
    assert torch.equal(seen, plan.to_mask().long())
    # Whole blocks take the fast path; without a diagonal all of them are whole.
    assert bool((block_mask.full_kv_num_blocks.sum() > 0).item())
    assert is_causal == bool(block_mask.kv_num_blocks.sum() > 0)


def test_flex_compiled():
    q, k, v = tensors(200, 300)
    plan = a_plan(200, 300, is_causal=True, align="bottom_right", B=1, H=2)
    assert plan.density < 1
    got, want = flex_and_attend(plan, q, k, v, torch.compile(flex_attention))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_plan_made_with_a_token_mask_has_no_flex_form():
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    tokens = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    plan = BlockPlan.from_mask(mask, Lq=10, Lk=10, attn_mask=tokens)
    with pytest.raises(ValueError, match=r"attn_mask.*mask_mod"):
        to_flex(plan)
