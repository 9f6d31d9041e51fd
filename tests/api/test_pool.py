"""Skipped blocks that are pooled: entries of the same softmax, against fp64.

Three errors apart, as in test_attend.py: kernel (same plan, same pooled operands), quantization
(same plan, the caller's numbers), sparsity (against dense attention).
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from calls import KERNEL_TOLERANCE, QUANTIZATION_TOLERANCE, call_of, half_step, limit, only
from interpreted import examples
from oracle import block_means, clustered_qkv, dense, make_qkv, pairs, relative_l1, same_bits
from oracle import open_blocks as open_blocks_of
from oracle import pooled as truth_of
from plans import random_mask
from sparge import BlockPlan, KeepAll, KeepFraction, KeepMass, Recipe
from sparge.backends.reference.rotation import rotate
from sparge.routing import get_backend
from sparge.values.call import Inputs
from sparge.values.recipe import POOL_GROUPS
from sparge.values.stages import QTensor, prepare

PRECISIONS = ["int8", "int8-fast", "half", "exact"]


def pool(precision="exact", group=64, **more):
    return Recipe(precision=precision, skipped="pool", pool_group=group, **more)


def attend(q, k, v, blocks, recipe, backend, **options):
    """`(out, lse)` over a block mask; heads may be grouped."""
    return sparge.attention(
        q, k, v, block_mask=blocks, recipe=recipe, backend=backend, return_lse=True,
        enable_gqa=q.shape[1] != k.shape[1], **options,
    )  # fmt: skip


def assert_close(got, want, tolerance=5e-6):
    (out, lse), (truth, truth_lse) = got, want
    assert relative_l1(out, truth) < tolerance
    empty = truth_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (out[empty] == 0).all()
    assert (lse - truth_lse)[~empty].abs().max() < max(10 * tolerance, 1e-5)


# --- what is computed -------------------------------------------------------------------------

SHAPES = {
    "whole blocks": {"Lq": 256, "Lk": 512},
    "a tail of 10 keys, 2 in its last group": {"Lq": 130, "Lk": 330},
    "a tail of one key": {"Lq": 128, "Lk": 257},
    "fewer keys than a group": {"Lq": 200, "Lk": 3},
    "more than 64 entries of 64 keys": {"Lq": 20, "Lk": 64 * 66 + 7, "Hq": 1, "Hk": 1},
    "one query": {"Lq": 1, "Lk": 300},
    "head dim 1": {"Lq": 150, "Lk": 300, "D": 1},
    "head dims 17 and 5": {"Lq": 150, "Lk": 300, "D": 17, "Dv": 5},
    "head dim 256": {"Lq": 150, "Lk": 300, "D": 256},
    "groups of 4 heads": {"Lq": 150, "Lk": 300, "Hq": 4, "Hk": 1},
}


@pytest.mark.rule("4.8", "4.9")
@pytest.mark.parametrize("group", [64, 16, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_entries_of_the_same_softmax(backend, name, group):
    shape = {"B": 2, "Hq": 2, "D": 16, **SHAPES[name]}
    q, k, v = make_qkv(**shape)
    blocks = random_mask(shape["B"], shape["Hq"], q.shape[2], k.shape[2], share=0.4)
    got = attend(q, k, v, blocks, pool(group=group), backend)
    assert_close(got, truth_of(q, k, v, blocks, group))


@pytest.mark.rule("4.10", "3.20")
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("Lq", "Lk"), [(400, 400), (200, 500), (500, 200)])
def test_blocks_on_the_diagonal_are_dropped(backend, Lq, Lk, align):
    q, k, v = make_qkv(Hq=2, Lq=Lq, Lk=Lk, D=16)
    blocks = random_mask(1, 2, Lq, Lk, share=0.3)
    options = {"is_causal": True, "causal_align": align}
    got = attend(q, k, v, blocks, pool(group=16), backend, **options)
    assert_close(got, truth_of(q, k, v, blocks, 16, **options))


def token_masks(Lq, Lk):
    g = torch.Generator().manual_seed(5)
    one_hidden = torch.ones(Lq, Lk, dtype=torch.bool)
    one_hidden[140, 70] = False
    bias = torch.zeros(1, 2, Lq, Lk)
    bias[:, 1, 140, 70] = 0.5
    bias[:, :, 20, 200:] = -math.inf
    bias[:, :, 30] = -math.inf
    padding = torch.ones(2, 1, 1, Lk, dtype=torch.bool)
    padding[1, ..., 150:] = False
    scattered = torch.rand(2, 2, Lq, Lk, generator=g) < 0.5
    scattered[:, :, :, 64:192] = True
    return {"one pair": one_hidden, "bias": bias, "padding": padding, "scattered": scattered}


@pytest.mark.rule("4.10", "4.2")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["one pair", "bias", "padding", "scattered"])
def test_partly_masked_blocks_are_dropped(backend, name, is_causal):
    q, k, v = make_qkv(B=2, Hq=2, Lq=300, Lk=300, D=16)
    mask = token_masks(300, 300)[name]
    blocks = random_mask(2, 2, 300, 300, share=0.3)
    options = {"attn_mask": mask, "is_causal": is_causal}
    got = attend(q, k, v, blocks, pool(group=16), backend, **options)
    assert_close(got, truth_of(q, k, v, blocks, 16, **options))
    # Some blocks are pooled, or the test shows nothing.
    allowed, bias = pairs((2, 2, 300, 300), **options)
    assert (open_blocks_of(allowed & (bias == 0)) & ~blocks).any()


def test_a_row_of_no_kept_blocks_reads_pooled_ones(backend):
    q, k, v = make_qkv(Lq=300, D=16)
    blocks = torch.ones(1, 2, 3, 5, dtype=torch.bool)
    blocks[:, :, 1] = False
    got = attend(q, k, v, blocks, pool(), backend)
    assert_close(got, truth_of(q, k, v, blocks, 64))
    assert (got[0][:, :, 128:256] != 0).any(-1).all()


@pytest.mark.rule("4.8")
@settings(max_examples=examples(25), deadline=None)
@given(
    Lq=st.integers(1, 200),
    Lk=st.integers(1, 400),
    D=st.integers(1, 40),
    group=st.sampled_from(POOL_GROUPS),
    is_causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_groups_of_equal_keys_lose_nothing(backend, Lq, Lk, D, group, is_causal, seed):
    """With equal keys in each group, means of values are exact: pooling a block computes it."""
    q, k, v = make_qkv(Hq=2, Lq=Lq, Lk=Lk, D=D, seed=seed)
    k = k[:, :, ::group].repeat_interleave(group, 2)[:, :, :Lk]
    allowed, _ = pairs((1, 2, Lq, Lk), is_causal=is_causal)
    blocks = random_mask(1, 2, Lq, Lk, seed=seed) | ~open_blocks_of(allowed)
    got = attend(q, k, v, blocks, pool(group=group), backend, is_causal=is_causal)
    truth, lse = dense(q, k, v, is_causal=is_causal)
    assert (got[0] - truth).abs().max() < 1e-4
    assert (got[1] - lse).abs().max() < 1e-4


# --- three errors -----------------------------------------------------------------------------


def numbers(x):
    return x.dequantize().double() if isinstance(x, QTensor) else x.double()


@pytest.mark.rule("4.9", "5.1", "5.2", "5.3", "5.4")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("group", [64, 16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernel_error(backend, precision, group, is_causal):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=300, Lk=500, D=64)
    recipe = pool(precision, group)
    blocks = random_mask(1, 4, 300, 500, share=0.4)
    out, _ = attend(q, k, v, blocks, recipe, backend, is_causal=is_causal)
    stages, call = get_backend(backend).stages(), call_of(q, k, v, recipe=recipe)
    made = prepare(stages, call, Inputs(q, k, v), to_plan=False, to_attend=True)
    operands = [numbers(x) for x in (made.queries.rows, made.keys.key, made.keys.value)]
    means = [numbers(x) for x in (made.keys.entries.key, made.keys.entries.value)]
    if precision == "half":
        operands, means = ([x.bfloat16().double() for x in some] for some in (operands, means))
    if precision == "int8":
        operands[2], means[1] = (x.bfloat16().double() for x in (operands[2], means[1]))
    truth, _ = truth_of(*operands, blocks, group, means=means, is_causal=is_causal)
    assert relative_l1(out, truth) < limit(KERNEL_TOLERANCE, precision, backend)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantization_error(backend, precision):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=300, Lk=300, D=64)
    k += 3.0  # smoothing takes it away, of keys and of their means
    blocks = random_mask(1, 4, 300, 300, share=0.4)
    out, lse = attend(q, k, v, blocks, pool(precision, 16), backend)
    truth, truth_lse = truth_of(q, k, v, blocks, 16)
    assert relative_l1(out, truth) < limit(QUANTIZATION_TOLERANCE, precision, backend)
    assert (lse - truth_lse).abs().max() < (1e-4 if precision == "exact" else 0.15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sixteen_bits(backend, dtype, precision):
    q, k, v = make_qkv(Hq=2, Lq=200, Lk=330, D=40, dtype=dtype)
    blocks = random_mask(1, 2, 200, 330, share=0.4)
    out, _ = attend(q, k, v, blocks, pool(precision, 16), backend)
    truth, _ = truth_of(q, k, v, blocks, 16)
    assert out.dtype == dtype
    limits = dict.fromkeys(PRECISIONS, 0.02) | {"fp8": QUANTIZATION_TOLERANCE["fp8"]}
    assert relative_l1(out, truth) < limit(limits, precision, backend)


def test_fp64_is_pooled_in_fp64(fp64_backend):
    q, k, v = make_qkv(Lq=200, Lk=330, D=24, dtype=torch.float64)
    blocks = random_mask(1, 2, 200, 330, share=0.4)
    out, lse = attend(q, k, v, blocks, pool(group=16), fp64_backend)
    truth, truth_lse = truth_of(q, k, v, blocks, 16)
    assert (out - truth).abs().max() < 1e-13
    assert (lse - truth_lse).abs().max() < 1e-13


def test_sparsity_error(backend):
    """On inputs whose keys are alike within a block pooling gives most of it back."""
    q, k, v = clustered_qkv(L=640, noise=0.2)
    truth, _ = dense(q, k, v)
    errors = {}
    for recipe in (Recipe(KeepFraction(0.3), precision="exact"), pool(keep=KeepFraction(0.3))):
        out = sparge.attention(q, k, v, recipe=recipe, backend=backend)
        errors[recipe.skipped] = relative_l1(out, truth)
    assert 0 < errors["pool"] < 0.5 * errors["drop"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_means_are_those_of_the_reference(backend, precision):
    q, k, v = make_qkv(B=2, Hq=2, Lq=10, Lk=330, D=24, Dv=40)
    recipe = pool(precision, 16)
    stages, call = get_backend(backend).stages(), call_of(q, k, v, recipe=recipe)
    made = prepare(stages, call, Inputs(q, k, v), to_plan=False, to_attend=True).keys.entries
    assert made.group == 16
    smooth = k - k.mean(2, keepdim=True) if recipe.quantized else k
    means = block_means(smooth, 16)
    means = rotate(means.float()).double() if recipe.quantized else means  # as codes are
    for x, want in ((made.key, means), (made.value, block_means(v, 16))):
        assert x.shape == want.shape
        assert ((numbers(x) - want).abs() <= half_step(x, want) + 2e-6).all()


# --- beside the rest --------------------------------------------------------------------------


@pytest.mark.rule("4.11")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_everything_kept_pooling_changes_no_bit(backend, precision, is_causal):
    q, k, v = make_qkv(Hq=2, Lq=300, Lk=330, D=24)
    kinds = [Recipe(KeepAll(), precision=precision), pool(precision, 16, keep=KeepAll())]
    options = {"is_causal": is_causal, "backend": backend, "return_lse": True}
    drop, pooled = (sparge.attention(q, k, v, recipe=recipe, **options) for recipe in kinds)
    assert same_bits(drop[0], pooled[0])
    assert same_bits(drop[1], pooled[1])


@pytest.mark.rule("4.11", "6.2")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_counts_are_those_of_dropped_blocks(backend, precision):
    q, k, v = clustered_qkv(Hq=2, L=400, D=24, noise=0.8)
    runs = []
    for recipe in (Recipe(KeepMass(0.7), precision=precision, pv_skip=2.0),
                   pool(precision, 16, keep=KeepMass(0.7), pv_skip=2.0)):  # fmt: skip
        with sparge.record() as recorded:
            sparge.attention(q, k, v, is_causal=True, recipe=recipe, backend=backend)
        runs.append(only(recorded))
    drop, pooled = runs
    assert 0 < drop.kept < drop.allowed
    assert drop.pv_skips > 0
    assert (pooled.kept, pooled.allowed) == (drop.kept, drop.allowed)
    assert (pooled.pv_skips, pooled.pv_groups) == (drop.pv_skips, drop.pv_groups)
    assert pooled.sparsity == drop.sparsity
    assert pooled.to_dict()["recipe"]["skipped"] == "pool"
    assert "(others pooled by 16)" in str(pooled)
    assert "pooled" not in str(drop)


@pytest.mark.rule("4.11")
def test_entries_are_not_subject_to_the_second_filter(backend):
    """One block is kept, all others stand far more than pv_skip below it, and still count."""
    q, k, v = make_qkv(Hq=1, Lq=128, Lk=640, D=16)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, :64, 0] = 16.0  # 4 above the rest
    blocks = torch.zeros(1, 1, 1, 10, dtype=torch.bool)
    blocks[..., 0] = True
    got = attend(q, k, v, blocks, pool(pv_skip=0.5), backend)
    assert_close(got, truth_of(q, k, v, blocks, 64))
    alone = dense(q, k, v, kept=blocks)
    assert relative_l1(got[0], alone[0]) > 0.05


@pytest.mark.rule("4.12", "5.10")
@pytest.mark.parametrize("precision", ["half", "exact"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_rows_that_pool_a_bad_block_are_nan_and_no_others(backend, precision, bad, where):
    q, k, v = make_qkv(Hq=2, Lq=400, Lk=500, D=16)
    (k if where == "key" else v)[0, 0, 300, 5] = bad
    blocks = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    blocks[..., 0] = True
    got = attend(q, k, v, blocks, pool(precision), backend, is_causal=True)
    # Block 4 holds the bad token. Rows 256 … 383 meet it on the diagonal, and drop it.
    wrong = torch.zeros(1, 2, 400, dtype=torch.bool)
    wrong[0, 0, 384:] = True
    for x in (got[0].isnan().all(-1), got[0].isnan().any(-1), got[1].isnan()):
        assert torch.equal(x, wrong)


@pytest.mark.rule("4.12", "5.11")
@pytest.mark.parametrize("precision", ["int8", "int8-fast"])
@pytest.mark.parametrize("where", ["key", "value"])
def test_quantized_precisions_return_no_number_for_a_bad_pooled_block(backend, precision, where):
    q, k, v = make_qkv(Hq=2, Lq=200, Lk=500, D=16)
    (k if where == "key" else v)[0, 0, 300, 5] = math.inf
    blocks = torch.zeros(1, 2, 2, 8, dtype=torch.bool)
    blocks[..., 0] = True
    out, lse = attend(q, k, v, blocks, pool(precision, 16), backend)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()


def test_values_at_the_end_of_the_range(backend):
    """Sums of the largest values stay finite, and no average exceeds them."""
    q, k, v = make_qkv(Hq=1, Lq=130, Lk=700, D=16)
    most = torch.finfo(torch.float32).max
    v = torch.where(v > 0, most, most * 0.99)
    blocks = random_mask(1, 1, 130, 700, share=0.3)
    for precision in PRECISIONS:
        out, _ = attend(q, k, v, blocks, pool(precision, 16), backend)
        assert out.isfinite().all()
        assert (out >= most * 0.95).all()


def test_scores_that_overflow_in_an_entry_that_is_not_read(backend):
    """The entries of a tile are scored together; one that overflows must not reach other rows."""
    q, k, v = make_qkv(Hq=1, Lq=256, Lk=640, D=16)
    k[:, :, 512:576] = 3e38
    q = q.abs()
    blocks = torch.zeros(1, 1, 2, 10, dtype=torch.bool)
    blocks[..., 0] = True
    mask = torch.ones(256, 640, dtype=torch.bool)
    mask[:, 520] = False  # so that the block is dropped
    out, lse = attend(q, k, v, blocks, pool(), backend, attn_mask=mask)
    truth = truth_of(q, k, v, blocks, 64, attn_mask=mask)
    assert_close((out, lse), truth)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attend_with_the_plan_is_attention(backend, precision):
    q, k, v = clustered_qkv(Hq=2, Hk=1, L=400, D=24)
    options = {"enable_gqa": True, "recipe": pool(precision, 16, keep=KeepMass(0.6))}
    options |= {"backend": backend}
    out, lse = sparge.attention(q, k, v, is_causal=True, return_lse=True, **options)
    plan = sparge.make_plan(q, k, is_causal=True, **options)
    assert plan.density < 0.9
    again, lse_again = sparge.attend(q, k, v, plan, **options)
    assert same_bits(out, again)
    assert same_bits(lse, lse_again)


@pytest.mark.rule("4.3", "4.9")
def test_parts_over_disjoint_keys_are_put_together_by_their_lse(backend):
    q, k, v = make_qkv(Hq=2, Lq=200, Lk=600, D=16)
    blocks = random_mask(1, 2, 200, 600, share=0.4)
    whole = attend(q, k, v, blocks, pool(), backend)
    parts = [
        attend(q, k[:, :, rows], v[:, :, rows], blocks[..., cols], pool(), backend)
        for rows, cols in ((slice(0, 320), slice(0, 5)), (slice(320, 600), slice(5, 10)))
    ]
    out, lse = sparge.merge(*parts[0], *parts[1])
    assert (out - whole[0]).abs().max() < 1e-5
    assert (lse - whole[1]).abs().max() < 1e-5


def test_in_a_compiled_graph(backend):
    q, k, v = clustered_qkv(Hq=2, L=300, D=16)
    recipe = pool("half", 16, keep=KeepMass(0.6))

    def run(q, k, v):
        return sparge.attention(q, k, v, is_causal=True, recipe=recipe, backend=backend) * 2

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert same_bits(compiled(q, k, v), run(q, k, v))


def test_a_plan_with_strided_inputs(backend):
    q, k, v = (x.mT.contiguous().mT for x in make_qkv(Hq=2, Lq=200, Lk=330, D=24))
    plan = BlockPlan.from_mask(random_mask(1, 2, 200, 330, share=0.4), Lq=200, Lk=330)
    for precision in PRECISIONS:
        options = {"recipe": pool(precision, 16), "backend": backend}
        strided = sparge.attend(q, k, v, plan, **options)
        plain = sparge.attend(*(x.contiguous() for x in (q, k, v)), plan, **options)
        assert relative_l1(strided[0], plain[0].double()) < 1e-5
