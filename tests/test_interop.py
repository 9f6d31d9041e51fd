"""Plans as CSR and as lists of partial and full blocks, and back."""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from plans import a_plan, lengths, random_mask
from refusals import refused
from sparge import BlockPlan
from sparge.interop import (
    BlockCSR,
    BlockLists,
    from_block_lists,
    from_csr,
    to_block_lists,
    to_csr,
    to_flex,
)
from sparge.values.blockplan import checked_tokens, plan_from_mask
from sparge.values.tokenmask import TokenMask

MASKS = ("none", "keys", "pairs", "bias", "heads")

some_plan = {
    "Lq": lengths,
    "Lk": lengths,
    "is_causal": st.booleans(),
    "offset": st.one_of(st.sampled_from([0, 64]), st.integers(-700, 700)),
    "B": st.integers(1, 2),
    "Hq": st.integers(1, 3),
    "share": st.sampled_from([0.0, 0.3, 1.0]),
    "mask": st.sampled_from(MASKS),
    "seed": st.integers(0, 1000),
}


def token_mask(kind, B, Hq, Lq, Lk, seed):
    g = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    if kind == "keys":
        return torch.arange(Lk) < torch.randint(1, Lk + 1, (B, 1, 1, 1), generator=g)
    if kind == "heads":
        return torch.rand(B, Hq, 1, Lk, generator=g) < 0.97
    pairs = (torch.arange(Lq)[:, None] // 128 + torch.arange(Lk) // 64) % 3 != 0
    return pairs if kind == "pairs" else torch.zeros(Lq, Lk).masked_fill(~pairs, float("-inf"))


def make(Lq, Lk, is_causal, offset, B, Hq, share, mask, seed):
    """A plan, and the facts to make it again."""
    tokens = token_mask(mask, B, Hq, Lq, Lk, seed)
    kept = random_mask(B, Hq, Lq, Lk, seed, share)
    facts = {"Lq": Lq, "Lk": Lk, "is_causal": is_causal, "offset": offset, "attn_mask": tokens}
    return plan_from_mask(kept, checked_tokens(TokenMask(**facts), (B, Hq), kept.device)), facts


def pairs_of(facts, B, Hq):
    """Pairs that may attend without a bias, and pairs that may attend at all."""
    shape = (B, Hq, facts["Lq"], facts["Lk"])
    causal = torch.ones(shape, dtype=torch.bool)
    if facts["is_causal"]:
        rows = torch.arange(facts["Lq"])[:, None] + facts["offset"]
        causal &= torch.arange(facts["Lk"]) <= rows
    mask = facts["attn_mask"]
    if mask is None:
        return causal, causal
    if mask.dtype == torch.bool:
        return causal & mask, causal & mask
    return causal & (mask == 0), causal & (mask != float("-inf"))


def in_blocks(pairs, fill):
    Lq, Lk = pairs.shape[-2:]
    padded = F.pad(pairs, (0, -Lk % 64, 0, -Lq % 128), value=fill)
    return padded.unflatten(2, (-1, 128)).unflatten(4, (-1, 64))


# --- round trips ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(**some_plan)
def test_csr_round_trip(B, Hq, **options):
    plan, facts = make(B=B, Hq=Hq, **options)
    csr = to_csr(plan)
    same = from_csr(*csr, B=B, Hq=Hq, **facts)
    assert same == plan
    same.validate()
    assert {csr.indptr.dtype, csr.indices.dtype} == {torch.int32}
    assert csr.indptr.shape == (plan.counts.numel() + 1,)
    assert len(csr.indices) == int(plan.counts.sum()) == int(csr.indptr[-1])


@settings(deadline=None, max_examples=150)
@given(**some_plan)
def test_lists_round_trip_and_say_which_blocks_are_full(B, Hq, **options):
    plan, facts = make(B=B, Hq=Hq, **options)
    lists = to_block_lists(plan, facts["attn_mask"])
    same = from_block_lists(*lists, **facts)
    assert same == plan
    same.validate()
    assert {x.dtype for x in lists} == {torch.int32}
    assert lists.mask_block_idx.shape == lists.full_block_idx.shape == plan.indices.shape
    assert lists.mask_block_cnt.shape == lists.full_block_cnt.shape == plan.counts.shape
    # Behind the counts stands a block that exists, as in flash-attention's own lists.
    assert min(int(lists.mask_block_idx.min()), int(lists.full_block_idx.min())) >= 0
    plain, allowed = pairs_of(facts, B, Hq)
    whole = in_blocks(plain, fill=True).all(-1).all(3)
    some = in_blocks(allowed, fill=False).any(-1).any(3)
    full, partial = map_of(*lists[2:], plan), map_of(*lists[:2], plan)
    assert torch.equal(full, plan.to_mask() & whole)
    assert torch.equal(partial, plan.to_mask() & some & ~whole)


def map_of(counts, indices, plan):
    """The bool map of lists, entry by entry; each list must ascend."""
    mask = torch.zeros_like(plan.to_mask())
    for b, h, i_q in itertools.product(*map(range, counts.shape)):
        row = indices[b, h, i_q, : counts[b, h, i_q]].tolist()
        assert row == sorted(set(row))
        mask[b, h, i_q, row] = True
    return mask


@settings(deadline=None, max_examples=40)
@given(**some_plan)
def test_one_head_is_csr_of_its_own(B, Hq, **options):
    plan, facts = make(B=B, Hq=Hq, **options)
    n_q = plan.counts.shape[-1]
    for b, h in itertools.product(range(B), range(Hq)):
        csr = to_csr(plan, b, h)
        assert csr.indptr[0] == 0
        assert len(csr.indptr) == n_q + 1
        alone = from_csr(*csr, **{**facts, "attn_mask": None})
        assert torch.equal(alone.to_mask()[0, 0], plan.to_mask()[b, h])
    heads = to_csr(plan, b=B - 1)
    assert len(heads.indptr) == Hq * n_q + 1
    assert torch.equal(heads.indices, plan.indices[B - 1][plan.indices[B - 1] >= 0])


@pytest.mark.parametrize("form", [BlockCSR, BlockLists])
def test_the_four_lines_of_the_docstrings_make_the_mask(form):
    plan = a_plan(300, 500, is_causal=True, align="bottom_right")
    export = to_csr(plan) if form is BlockCSR else to_block_lists(plan)
    (code,) = re.findall(r"map of the blocks is\n\n(.*)", inspect.getdoc(form), re.DOTALL)
    lines = textwrap.dedent(code).strip()
    assert len(lines.splitlines()) == 4
    B, Hq, n_q, n_k = plan.indices.shape
    names = {"torch": torch, "itertools": itertools, "B": B, "Hq": Hq, "n_q": n_q, "n_k": n_k}
    names |= export._asdict()
    exec(lines, names)
    assert torch.equal(names["mask"], plan.to_mask())


# --- consumers --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse")
def test_torch_takes_the_csr_pair_as_a_bsr_matrix():
    plan = a_plan(300, 500, is_causal=True)
    indptr, indices = to_csr(plan)
    n_q, n_k = plan.indices.shape[2:]
    values = torch.ones(len(indices), 128, 64)
    size = (6 * n_q * 128, n_k * 64)
    matrix = torch.sparse_bsr_tensor(indptr, indices, values, size=size, check_invariants=True)
    blocks = matrix.to_dense().view(2, 3, n_q, 128, n_k, 64)[:, :, :, 0, :, 0]
    assert torch.equal(blocks.bool(), plan.to_mask())


def test_scipy_takes_the_csr_pair_of_a_head():
    sparse = pytest.importorskip("scipy.sparse")
    plan = a_plan(300, 500)
    indptr, indices = to_csr(plan, 1, 2)
    values = torch.ones(len(indices), 128, 64).numpy()
    matrix = sparse.bsr_matrix((values, indices.numpy(), indptr.numpy()), shape=(384, 512))
    assert matrix.has_sorted_indices
    blocks = torch.from_numpy(matrix.toarray())[::128, ::64]
    assert torch.equal(blocks.bool(), plan.to_mask()[1, 2])


@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_of_a_flex_block_mask_make_the_plan(is_causal):
    plan = a_plan(500, 700, is_causal=is_causal, align="bottom_right")
    flex = to_flex(plan)
    lists = (flex.kv_num_blocks, flex.kv_indices, flex.full_kv_num_blocks, flex.full_kv_indices)
    facts = {"Lq": 500, "Lk": 700, "is_causal": is_causal, "offset": 200}
    assert from_block_lists(*lists, **facts) == plan


def test_a_block_that_the_end_cuts_is_full():
    lists = to_block_lists(a_plan(130, 70, B=1, H=1, seed=4))
    assert int(lists.mask_block_cnt.sum()) == 0
    facts = {"Lq": 3, "Lk": 70, "is_causal": True, "causal_align": "bottom_right"}
    every = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    causal = to_block_lists(BlockPlan.from_mask(every, **facts))
    assert causal.full_block_idx[0, 0, 0, : causal.full_block_cnt[0, 0, 0]].tolist() == [0]
    assert causal.mask_block_idx[0, 0, 0, : causal.mask_block_cnt[0, 0, 0]].tolist() == [1]


def test_a_mask_that_the_plan_was_made_without_is_taken_as_attend_takes_it():
    plan = BlockPlan.from_mask(torch.ones(1, 1, 1, 4, dtype=torch.bool), Lq=100, Lk=256)
    tokens = torch.ones(100, 256, dtype=torch.bool)
    tokens[:, 64:128] = False  # a whole block
    tokens[5, 130] = False
    lists = to_block_lists(plan, tokens)
    assert lists.full_block_idx[0, 0, 0, : lists.full_block_cnt[0, 0, 0]].tolist() == [0, 3]
    assert lists.mask_block_idx[0, 0, 0, : lists.mask_block_cnt[0, 0, 0]].tolist() == [2]


def test_narrow_lists_and_partial_lists_alone_are_enough():
    plan = a_plan(300, 500)
    lists = to_block_lists(plan)
    width = int(plan.counts.max())
    narrow = (lists.full_block_cnt, lists.full_block_idx[..., :width])
    assert from_block_lists(*narrow, Lq=300, Lk=500) == plan
    none = (torch.zeros_like(plan.counts), plan.indices[..., :0])
    empty = from_block_lists(*none, Lq=300, Lk=500)
    assert int(empty.counts.sum()) == 0


def test_blocks_that_nothing_may_attend_are_dropped():
    every = a_plan(256, 256, B=1, H=1)
    facts = {"Lq": 256, "Lk": 256, "is_causal": True}
    causal = BlockPlan.from_mask(every.to_mask(), **facts)
    assert from_csr(*to_csr(every), **facts) == causal
    lists = (every.counts, every.indices)
    assert from_block_lists(*lists, **facts) == causal


def test_exports_stay_on_the_device():
    plan = a_plan(is_causal=True).to("meta")
    assert {x.device.type for x in to_block_lists(plan)} == {"meta"}  # reads nothing, or fails


# --- mistakes ---------------------------------------------------------------------------------

PLAN = a_plan(300, 500, B=1, H=2)  # 3 x 8 blocks
INDPTR, INDICES = to_csr(PLAN)
LISTS = to_block_lists(PLAN)
SIZES = {"Lq": 300, "Lk": 500}
CSR = {"indptr": INDPTR, "indices": INDICES, "B": 1, "Hq": 2, **SIZES}
ONE_MORE = torch.cat([INDPTR, INDPTR[-1:]])


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "changes, error, says",
    [
        pytest.param({"indptr": None}, TypeError, ("indptr", "int32", "NoneType"), id="no indptr"),
        pytest.param(
            {"indptr": INDPTR.long()}, TypeError, ("indptr", "int64", "indptr.int()"), id="int64"
        ),
        pytest.param({"indices": INDICES.float()}, TypeError, ("indices", "float32"), id="floats"),
        pytest.param(
            {"indices": INDICES.to("meta")}, ValueError, ("device", "cpu and meta"), id="device"
        ),
        pytest.param(
            {"indptr": INDPTR[None]}, ValueError, ("one dimension", "(1, 7)"), id="two dimensions"
        ),
        pytest.param({"Hq": 1}, ValueError, ("1 · 1 · 3 + 1 = 4", "got 7"), id="heads"),
        pytest.param({"indptr": ONE_MORE}, ValueError, ("= 7 entries", "got 8"), id="length"),
        pytest.param({"B": 0}, ValueError, ("B", "at least 1", "got 0"), id="no batch"),
        pytest.param({"Hq": 2.0}, TypeError, ("Hq", "whole number", "2.0"), id="half heads"),
        pytest.param({"Lq": 0}, ValueError, ("Lq", "at least 1"), id="no queries"),
        pytest.param({"offset": 1.5}, TypeError, ("offset", "1.5"), id="offset"),
        pytest.param({"is_causal": 1}, TypeError, ("is_causal", "got 1"), id="causal"),
        pytest.param(
            {"attn_mask": torch.ones(7, 7).bool()}, ValueError, ("[1, 2, 300, 500]",), id="mask"
        ),
        pytest.param({"indptr": INDPTR + 1}, ValueError, ("rise from 0", "got 1 …"), id="from 1"),
        pytest.param({"indices": INDICES[:-1]}, ValueError, ("rise from 0",), id="too few"),
        pytest.param(
            {"indptr": INDPTR[[0, 2, 1, 3, 4, 5, 6]]}, ValueError, ("least step -",), id="falls"
        ),
        pytest.param({"indices": INDICES + 8}, ValueError, ("0 … 7", "got 8 …"), id="above"),
        pytest.param({"indices": INDICES - 1}, ValueError, ("0 … 7", "got -1"), id="below"),
        pytest.param({"indices": INDICES.flip(0)}, ValueError, ("ascending", "sort"), id="order"),
        pytest.param({"indices": INDICES * 0}, ValueError, ("ascending", "twice"), id="twice"),
    ],
)
def test_csr_that_is_none(changes, error, says):
    refused(lambda: from_csr(**{**CSR, **changes}), error, *says)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "changes, error, says",
    [
        pytest.param({"mask_block_cnt": None}, TypeError, ("mask_block_cnt", "NoneType"), id="no"),
        pytest.param({"full_block_idx": None}, ValueError, ("belong together",), id="half"),
        pytest.param(
            {"full_block_idx": LISTS.full_block_idx.long()},
            TypeError,
            ("full_block_idx", "int64", ".int()"),
            id="int64",
        ),
        pytest.param(
            {"mask_block_idx": LISTS.mask_block_idx.to("meta")},
            ValueError,
            ("one device", "cpu and meta"),
            id="device",
        ),
        pytest.param({"Lq": 500}, ValueError, ("[B, Hq, 4]", "(1, 2, 3)"), id="other queries"),
        pytest.param(
            {"Lk": 400}, ValueError, ("mask_block_idx", "up to 7", "[1, 2, 3, 8]"), id="other keys"
        ),
        pytest.param(
            {"full_block_cnt": LISTS.full_block_cnt[:, :1]},
            ValueError,
            ("full_block_cnt", "[1, 2, 3]", "[1, 1, 3]"),
            id="other heads",
        ),
        pytest.param({"Lk": "500"}, TypeError, ("Lk", "'500'"), id="length a string"),
        pytest.param(
            {"attn_mask": torch.ones(7, 7).bool()}, ValueError, ("[1, 2, 300, 500]",), id="mask"
        ),
        pytest.param(
            {"full_block_cnt": LISTS.full_block_cnt + 8}, ValueError, ("0 … 8",), id="count above"
        ),
        pytest.param(
            {"mask_block_cnt": LISTS.mask_block_cnt - 1}, ValueError, ("got -1 …",), id="below 0"
        ),
        pytest.param(
            {"full_block_idx": LISTS.full_block_idx + 8}, ValueError, ("0 … 7", "got 8"), id="range"
        ),
        pytest.param(
            {"full_block_idx": 7 - LISTS.full_block_idx},
            ValueError,
            ("full_block_idx", "ascending"),
            id="descending",
        ),
        pytest.param(
            {"mask_block_cnt": LISTS.full_block_cnt, "mask_block_idx": LISTS.full_block_idx},
            ValueError,
            ("share a block", "twice"),
            id="in both",
        ),
        pytest.param(
            {"is_causal": True}, ValueError, ("every pair", "is_causal=True"), id="full, yet cut"
        ),
    ],
)
def test_lists_that_are_none(changes, error, says):
    options = {**LISTS._asdict(), **SIZES, **changes}
    refused(lambda: from_block_lists(**options), error, *says)


def test_a_plan_made_with_a_mask_needs_it_for_lists():
    tokens = torch.ones(300, 500, dtype=torch.bool).tril()
    plan = BlockPlan.from_mask(PLAN.to_mask(), **SIZES, attn_mask=tokens)
    refused(lambda: to_block_lists(plan), ValueError, "attn_mask", "got None", "same mask")
    refused(lambda: to_block_lists(plan, tokens[:7]), ValueError, "[1, 2, 300, 500]")
    refused(lambda: to_block_lists(plan, tokens.int()), TypeError, "bool", "int32")


@pytest.mark.parametrize(
    "b, h, error, says",
    [
        (1, 0, IndexError, ("b must be within 0 … 0", "got 1")),
        (0, -1, IndexError, ("h must be within 0 … 1", "got -1")),
        (0, 1.0, TypeError, ("h must be a whole number", "1.0")),
    ],
)
def test_a_head_that_is_not_there(b, h, error, says):
    refused(lambda: to_csr(PLAN, b, h), error, *says)
