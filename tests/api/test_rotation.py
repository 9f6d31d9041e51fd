"""The rotation of q and k before they are coded."""

from __future__ import annotations

import pytest
import torch

import sparge
from calls import operands_of
from oracle import dense, make_qkv, relative_l1
from sparge import KeepAll, Recipe
from sparge.backends.reference import prepare as slow
from sparge.backends.reference.rotation import rotate

SOME_DIMS = (1, 2, 3, 7, 8, 16, 24, 40, 64, 72, 80, 96, 100, 128, 130, 192, 255, 256)


@pytest.mark.rule("5.15")
@pytest.mark.parametrize("D", SOME_DIMS)
def test_the_rotation_is_orthogonal(D):
    matrix = rotate(torch.eye(D)).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(D, dtype=torch.float64), atol=1e-6)


@pytest.mark.rule("5.15")
@pytest.mark.parametrize("D", [D for D in SOME_DIMS if D >= 16])
def test_neither_one_channel_nor_equal_channels_stay_together(D):
    """In one number of size sqrt(D) everything would stay together, in D of size 1 nothing."""
    one_channel, equal = torch.eye(D) * D**0.5, torch.ones(D)
    assert rotate(one_channel).abs().max() < 2.6
    assert rotate(equal).abs().max() < 2.6


@pytest.mark.rule("5.15")
@pytest.mark.parametrize("D", SOME_DIMS)
def test_every_backend_has_the_codes_of_the_reference(backend, D):
    q, k, v = make_qkv(Lq=70, D=D)
    q[:, :, 5] *= 1e37  # near the end of fp32, where sums of a row overflow
    q[:, :, 6] *= 1e-37
    found = operands_of(q, k, v, "int8", backend).query
    expected = slow.quantize_rows(q)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.rule("5.15")
@pytest.mark.parametrize("D", [64, 80, 128])
@pytest.mark.parametrize("larger", ["query", "key", "both"])
def test_one_huge_channel_costs_the_others_no_precision(backend, larger, D):
    q, k, v = make_qkv(Lq=300, D=D)
    if larger != "key":
        q[..., 3] *= 20
    if larger != "query":
        k[..., 3] *= 20
    truth, _ = dense(q, k, v)
    recipe = Recipe(KeepAll(), precision="int8")
    error = relative_l1(sparge.attention(q, k, v, recipe=recipe, backend=backend), truth)
    smooth = slow.smooth_keys(k)
    unrotated, _ = dense(slow.code_rows(q).dequantize(), slow.code_rows(smooth).dequantize(), v)
    # The unrotated codes have one scale per token; scales of more keys cost a little.
    per_token = operands_of(q, k, v, "int8", backend).key.rows_per_scale == 1
    assert error < (0.6 if per_token else 0.65) * relative_l1(unrotated, truth)


@pytest.mark.rule("5.15", "5.9")
def test_rows_at_the_end_of_fp32_have_finite_codes(backend):
    """A row of equal numbers is rotated to one that is larger than any of them."""
    q, k, v = make_qkv(Lq=128, D=128)
    most = torch.finfo(torch.float32).max
    q[:, :, 3], q[:, :, 4] = most, rotate(torch.eye(128))[:, 0].sign() * most
    found = operands_of(q, k, v, "int8", backend).query
    assert found.scale.isfinite().all()
    length = (found.codes.double() * found.scale.double().unsqueeze(-1)).norm(dim=-1)
    assert torch.allclose(length, q.double().norm(dim=-1), rtol=0.01)
