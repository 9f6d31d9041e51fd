"""Attention over a plan: three errors apart, each against fp64.

Kernel error: same plan, same quantized inputs, tight. Quantization error: same plan, the
caller's numbers. Sparsity error: against dense attention.
"""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from calls import KERNEL_TOLERANCE, QUANTIZATION_TOLERANCE, limit, operands_of
from oracle import clustered_qkv, dense, make_qkv, relative_l1
from sparge import BlockPlan, KeepAll, KeepMass, Recipe
from sparge.values.call import diagonal_offset
from sparge.values.tokenmask import TokenMask

PRECISIONS = ["int8", "int8-fast", "half", "exact"]


def operands_in_fp64(q, k, v, precision, backend):
    """The numbers that the kernel reads, dequantized."""
    done = operands_of(q, k, v, precision, backend)
    if precision == "half":
        return [x.to(torch.bfloat16).double() for x in (q, k, v)]
    if precision == "exact":
        return [x.double() for x in (q, k, v)]
    value = v.to(torch.bfloat16) if precision == "int8" else done.value.dequantize()
    return [done.query.dequantize().double(), done.key.dequantize().double(), value.double()]


def some_plan(q, k, is_causal, seed=1):
    n_q, n_k = -(-q.shape[2] // 128), -(-k.shape[2] // 64)
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(q.shape[0], q.shape[1], n_q, n_k, generator=g) < 0.5
    mask[..., 0] = True
    return BlockPlan.from_mask(mask, Lq=q.shape[2], Lk=k.shape[2], is_causal=is_causal)


@pytest.mark.rule("4.1", "5.1", "5.2", "5.3", "5.4")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernel_error(backend, precision, is_causal):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=300, Lk=300, D=64)
    plan = some_plan(q, k, is_causal)
    recipe = Recipe(precision=precision)
    out, _ = sparge.attend(q, k, v, plan, enable_gqa=True, recipe=recipe, backend=backend)
    q64, k64, v64 = operands_in_fp64(q, k, v, precision, backend)
    truth, _ = dense(q64, k64, v64, is_causal=is_causal, kept=plan.to_mask())
    assert relative_l1(out, truth) < limit(KERNEL_TOLERANCE, precision, backend)


@pytest.mark.rule("5.1", "5.2", "5.3", "5.4")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantization_error(backend, precision):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=300, Lk=300, D=64)
    plan = some_plan(q, k, True)
    recipe = Recipe(precision=precision)
    out, _ = sparge.attend(q, k, v, plan, enable_gqa=True, recipe=recipe, backend=backend)
    truth, _ = dense(q, k, v, is_causal=True, kept=plan.to_mask())
    error = relative_l1(out, truth)
    assert error < limit(QUANTIZATION_TOLERANCE, precision, backend)
    if precision != "exact":
        assert error > 1e-5, "a quantized precision that loses nothing was not run"


@pytest.mark.parametrize("predictor", ["mean", "rows", "blend"])
def test_sparsity_error(backend, predictor):
    q, k, v = clustered_qkv(L=640)
    recipe = Recipe(KeepMass(0.95), predictor=predictor, precision="exact", sink_blocks=0)
    with sparge.record() as runs:
        out = sparge.attention(q, k, v, recipe=recipe, backend=backend)
    truth, _ = dense(q, k, v)
    assert runs[0].density < 0.8
    # Dropping 5 % of the mass moves a row by about twice that at most.
    assert 1e-6 < relative_l1(out, truth) < 0.1


@pytest.mark.rule("5.3")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_at_density_one_is_dense(backend, dtype):
    q, k, v = make_qkv(Lq=260, D=64, dtype=dtype)
    out = sparge.attention(q, k, v, recipe=Recipe(KeepAll(), precision="half"), backend=backend)
    truth, _ = dense(q, k, v)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    # Measured against plain code, not guessed: no worse than twice what torch itself loses.
    assert relative_l1(out, truth) < 2 * relative_l1(torchs, truth) + 1e-6


@pytest.mark.rule("5.2")
def test_fast_codes_survive_a_far_maximum(backend):
    """A sink 12 nats above the rest: P of every other block is tiny, and must not code as zero."""
    q, k, v = make_qkv(Hq=1, Lq=128, Lk=2048, D=32, sharp=0.2)
    k[:, :, 0] = q.mean(2) * 0
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, 0, 0] = 12.0 / 8.0 * math.sqrt(32)
    recipe = Recipe(KeepAll(), precision="int8-fast")
    out = sparge.attention(q, k, v, recipe=recipe, backend=backend)
    truth, _ = dense(q, k, v)
    assert relative_l1(out, truth) < 0.05


@pytest.mark.rule("4.3", "1.4")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_lse_is_natural_log_over_the_kept_keys(backend, precision):
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=300, Lk=260, D=64)
    k += 3.0  # an offset that smoothing takes away and the LSE must have back
    plan = some_plan(q, k, False)
    recipe = Recipe(precision=precision)
    _, lse = sparge.attend(q, k, v, plan, enable_gqa=True, recipe=recipe, backend=backend)
    _, truth = dense(q, k, v, kept=plan.to_mask())
    assert lse.shape == (1, 4, 300)
    assert lse.dtype == torch.float32
    tolerance = {"exact": 1e-5, "half": 0.1}.get(precision, 0.1)
    assert (lse - truth).abs().max() < tolerance
    assert (lse - truth).abs().mean() < tolerance / 4


@pytest.mark.rule("4.2")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_attend_nothing(backend, precision):
    q, k, v = make_qkv(Hq=2, Lq=300, Lk=200, D=16)
    mask = torch.ones(300, 200, dtype=torch.bool)
    mask[[0, 17, 130, 299]] = False
    recipe = Recipe(precision=precision)
    options = {"attn_mask": mask, "recipe": recipe, "backend": backend, "return_lse": True}
    out, lse = sparge.attention(q, k, v, **options)
    assert (out[:, :, [0, 17, 130, 299]] == 0).all()
    assert (lse[:, :, [0, 17, 130, 299]] == -math.inf).all()
    others = mask.any(1)
    assert torch.isfinite(lse[:, :, others]).all()
    assert (out[:, :, others] != 0).any(-1).all()


@pytest.mark.rule("4.2", "3.13")
def test_a_row_of_no_blocks_attends_nothing(backend):
    q, k, v = make_qkv(Lq=300, D=16)
    blocks = torch.ones(3, 5, dtype=torch.bool)
    blocks[1] = False
    out, lse = sparge.attention(q, k, v, block_mask=blocks, backend=backend, return_lse=True)
    plan = sparge.BlockPlan.from_mask(blocks.expand(1, q.shape[1], 3, 5), Lq=300, Lk=300)
    again, _ = sparge.attend(q, k, v, plan, enable_gqa=True, backend=backend)
    assert torch.equal(again, out)  # without a recipe, blocks of the caller's are taken exactly
    assert (out[:, :, 128:256] == 0).all()
    assert (lse[:, :, 128:256] == -math.inf).all()
    assert torch.isfinite(lse[:, :, :128]).all()


@pytest.mark.rule("5.7")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_every_dtype_comes_back_as_itself(backend, dtype, precision, widest):
    q, k, v = make_qkv(Lq=140, D=16, dtype=dtype)
    recipe = Recipe(KeepAll(), precision=precision)
    options = {"recipe": recipe, "backend": backend, "return_lse": True}
    if dtype.itemsize > widest.itemsize:
        with pytest.raises(sparge.Unsupported, match="float64"):
            sparge.attention(q, k, v, **options)
        return
    out, lse = sparge.attention(q, k, v, **options)
    truth, truth_lse = dense(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_l1(out, truth) < 0.04
    assert (lse - truth_lse).abs().max() < 0.1


@pytest.mark.rule("5.4")
def test_fp64_is_computed_in_fp64(fp64_backend):
    q, k, v = make_qkv(Lq=200, D=40, dtype=torch.float64)
    out, lse = sparge.attention(
        q, k, v, recipe=Recipe(KeepAll(), precision="exact"), backend=fp64_backend, return_lse=True
    )
    truth, truth_lse = dense(q, k, v)
    assert (out - truth).abs().max() < 1e-13
    assert (lse - truth_lse).abs().max() < 1e-13


@pytest.mark.rule("0.2")
@pytest.mark.parametrize("Hk", [1, 2, 3], ids=["mqa", "gqa-2", "gqa-3"])
def test_each_key_head_serves_its_group(backend, Hk):
    q, k, v = make_qkv(Hq=6, Hk=Hk, Lq=150, D=16)
    options = {"recipe": Recipe(KeepMass(0.9)), "backend": backend, "return_lse": True}
    out, lse = sparge.attention(q, k, v, enable_gqa=True, **options)
    wide = [x.repeat_interleave(6 // Hk, 1) for x in (k, v)]
    repeated, repeated_lse = sparge.attention(q, *wide, **options)
    assert torch.equal(out, repeated)
    assert torch.equal(lse, repeated_lse)


def test_tokenmask_regions_agree_with_pairs():
    """The mask noun against every pair, rectangle by rectangle."""
    from oracle import allowed_blocks, pairs

    g = torch.Generator().manual_seed(3)
    attn_mask = torch.rand(2, 1, 150, 170, generator=g) < 0.5
    attn_mask[:, :, :, 64:128] = False
    for align in ("top_left", "bottom_right"):
        tokens = TokenMask(150, 170, True, diagonal_offset(150, 170, align), attn_mask)
        truth, _ = pairs((2, 3, 150, 170), attn_mask=attn_mask, is_causal=True, causal_align=align)
        rows, cols = slice(30, 150), slice(10, 170)
        allowed, bias = tokens.region(1, 2, rows, cols, torch.device("cpu"))
        assert torch.equal(allowed, truth[1, 2, rows, cols])
        assert bias is None
        some = tokens.block_kinds(torch.device("cpu")) != 0
        assert torch.equal(some.expand(2, 3, 2, 3), allowed_blocks(truth))
