"""Causal diagonals and token masks: exact to the token, in every alignment and shape."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from calls import limit
from oracle import allowed_blocks, dense, make_qkv, pairs, relative_l1
from sparge import KeepAll, KeepMass, Recipe

EXACT = Recipe(KeepAll(), precision="exact")


def check(q, k, v, backend, recipe=EXACT, tolerance=1e-5, **options):
    out, lse = sparge.attention(
        q, k, v, enable_gqa=q.shape[1] != k.shape[1], recipe=recipe, backend=backend,
        return_lse=True, **options,
    )  # fmt: skip
    truth, truth_lse = dense(q, k, v, **options)
    assert relative_l1(out, truth) < tolerance
    nothing = truth_lse == -math.inf
    assert torch.equal(lse == -math.inf, nothing)
    assert (lse - truth_lse)[~nothing].abs().max() < (1e-4 if tolerance < 1e-3 else 0.2)
    return out


@pytest.mark.rule("3.19", "3.20")
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("Lq", "Lk"),
    [(1, 1), (1, 200), (200, 1), (130, 130), (127, 300), (128, 192), (300, 127), (129, 65)],
)  # fmt: skip
def test_causal(backend, Lq, Lk, align):
    q, k, v = make_qkv(Hq=2, Lq=Lq, Lk=Lk, D=16)
    check(q, k, v, backend, is_causal=True, causal_align=align)


@pytest.mark.rule("3.19")
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_no_query_sees_its_future(backend, precision):
    """Whatever stands behind the diagonal changes nothing, not even a bit, inside its block."""
    q, k, v = make_qkv(Hq=1, Lq=200, D=16)
    recipe = Recipe(KeepAll(), precision=precision)
    first = sparge.attention(q, k, v, is_causal=True, recipe=recipe, backend=backend)
    later = 100
    v[:, :, later:] = v[:, :, later:].flip(2)
    if precision in ("half", "exact"):  # smoothing and scales look at all keys
        k[:, :, later:] *= -3.0
    second = sparge.attention(q, k, v, is_causal=True, recipe=recipe, backend=backend)
    if precision == "int8-fast":  # V has one scale per block: those of the changed blocks differ
        later = 64
    assert torch.equal(first[:, :, :later], second[:, :, :later])
    assert not torch.equal(first[:, :, later:], second[:, :, later:])


@pytest.mark.rule("3.20")
def test_top_left_is_the_default_and_torch_s(backend):
    q, k, v = make_qkv(Hq=2, Lq=100, Lk=150, D=16)
    out = sparge.attention(q, k, v, is_causal=True, recipe=EXACT, backend=backend)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out, torchs, atol=1e-5)


@pytest.mark.rule("3.21")
@pytest.mark.parametrize("shape", [(200,), (1, 200), (150, 200), (150, 1), (4, 1, 200),
                                   (2, 1, 1, 200), (1, 4, 150, 200), (2, 4, 150, 200)])  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "additive", "additive-inf"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_token_masks(backend, shape, kind, is_causal):
    q, k, v = make_qkv(B=2, Hq=4, Hk=2, Lq=150, Lk=200, D=8)
    g = torch.Generator().manual_seed(7)
    mask = torch.rand(shape, generator=g) < 0.7
    if kind != "bool":
        bias = torch.randn(shape, generator=g)
        mask = bias.masked_fill(~mask, -math.inf) if kind == "additive-inf" else bias
    check(q, k, v, backend, attn_mask=mask, is_causal=is_causal)


@pytest.mark.rule("3.21")
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_token_masks_in_every_precision(backend, precision, kind):
    q, k, v = make_qkv(Hq=2, Lq=150, Lk=200, D=32)
    g = torch.Generator().manual_seed(8)
    mask = torch.rand(150, 200, generator=g)
    mask = mask < 0.5 if kind == "bool" else (mask * 4).masked_fill(mask < 0.3, -math.inf)
    recipe = Recipe(KeepAll(), precision=precision)
    limits = {"int8": 0.03, "int8-fast": 0.03, "half": 0.03, "fp8": 0.045}
    check(q, k, v, backend, recipe, limit(limits, precision, backend), attn_mask=mask)


@pytest.mark.rule("3.21", "3.3")
def test_wholly_masked_blocks_are_excluded(backend):
    q, k, _ = make_qkv(B=2, Hq=2, Lq=300, Lk=300, D=8)
    mask = torch.ones(2, 1, 300, 300, dtype=torch.bool)
    mask[0, :, :, 64:128] = False
    mask[1, :, :128, 200:] = False
    mask[1, :, 128:, 299] = False
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        plan = sparge.make_plan(q, k, attn_mask=given, recipe=EXACT, backend=backend)
        allowed, _ = pairs((2, 2, 300, 300), attn_mask=mask)
        assert torch.equal(plan.to_mask(), allowed_blocks(allowed))
        assert plan.allowed[:, 0].tolist() == [[4, 4, 4], [4, 5, 5]]


@pytest.mark.rule("3.21")
def test_mask_and_diagonal_exclude_together(backend):
    """A block whose only open pairs lie behind the diagonal may not be attended by any pair."""
    q, k, v = make_qkv(Hq=1, Lq=128, Lk=128, D=8)
    mask = torch.zeros(128, 128, dtype=torch.bool)
    mask[:, 0] = True
    mask[:64, 64:] = True
    plan = sparge.make_plan(q, k, attn_mask=mask, is_causal=True, recipe=EXACT, backend=backend)
    assert plan.to_mask()[0, 0].tolist() == [[True, False]]
    check(q, k, v, backend, attn_mask=mask, is_causal=True)


@pytest.mark.rule("4.2", "3.21")
def test_all_masked_batch_entry(backend):
    q, k, v = make_qkv(B=2, Hq=2, Lq=150, D=8)
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    mask[0] = False
    for recipe in (EXACT, Recipe(KeepMass(0.9))):
        out, lse = sparge.attention(
            q, k, v, attn_mask=mask, recipe=recipe, backend=backend, return_lse=True
        )
        assert (out[0] == 0).all()
        assert (lse[0] == -math.inf).all()
        assert torch.isfinite(lse[1]).all()


@pytest.mark.rule("3.21")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_finite_bias_is_a_number(backend, dtype):
    """Masks made with finfo.min: a row of nothing else attends evenly, as with SDPA."""
    q, k, v = make_qkv(Hq=1, Lq=70, Lk=100, D=8, dtype=torch.float32)
    low = torch.finfo(dtype).min
    mask = torch.zeros(70, 100)
    mask[:, 50:] = low
    mask[3] = low
    out = sparge.attention(
        q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask.to(dtype),
        recipe=EXACT, backend=backend,
    )  # fmt: skip
    some, _ = dense(q.to(dtype), k.to(dtype)[:, :, :50], v.to(dtype)[:, :, :50])
    rows = [r for r in range(70) if r != 3]
    assert relative_l1(out[:, :, rows], some[:, :, rows]) < 1e-2
    if dtype != torch.float16:  # at -65504, fp16 scores still tell the keys apart
        assert torch.allclose(out[0, 0, 3].double(), v.to(dtype)[0, 0].double().mean(0), atol=1e-2)


def test_left_padding_with_causal_is_two_arguments(backend):
    """Padding as `[B, 1, 1, Lk]` beside is_causal: nothing of size Lq x Lk, and the same result."""
    q, k, v = make_qkv(B=2, Hq=2, Lq=200, D=16)
    padding = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    padding[1, ..., :90] = False
    out = check(q, k, v, backend, attn_mask=padding, is_causal=True)
    both = padding & torch.ones(200, 200, dtype=torch.bool).tril()
    same = sparge.attention(q, k, v, attn_mask=both, recipe=EXACT, backend=backend)
    assert torch.equal(out, same)


@pytest.mark.rule("6.3")
def test_blocks_that_a_mask_hides_are_not_counted_by_attend(backend):
    """A plan made without the mask counted them as allowed."""
    q, k, v = make_qkv(Hq=2, Lq=200, Lk=300, D=16)
    mask = torch.ones(200, 300, dtype=torch.bool)
    mask[:, 64:192] = False
    plan = sparge.make_plan(q, k, recipe=Recipe(KeepAll()), backend=backend)
    options = {"attn_mask": mask, "recipe": Recipe(precision="exact"), "backend": backend}
    with sparge.record() as runs:
        out, _ = sparge.attend(q, k, v, plan, **options)
        whole = sparge.attention(q, k, v, **{**options, "recipe": EXACT})
    assert [run.allowed for run in runs] == [2 * 2 * 3] * 2
    assert [run.kept for run in runs] == [2 * 2 * 3] * 2
    assert torch.equal(out, whole)
