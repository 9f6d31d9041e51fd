"""Calls of SDPA inside of any module: masks, shapes, grids, and what torch serves itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_any_module import DENSE, is_plain, randn
from torch import nn

import sparge
from sparge import KeepFraction, Recipe, Schedule
from tiny_denoiser_parts import SAME, SPARSE, assert_same
from tiny_modules import GRID, TEXT, SelfAttention, video_inputs, video_transformer


@pytest.mark.parametrize("mask", [
    torch.rand(240, 240) > 0.3, torch.randn(240, 240), torch.rand(1, 240) > 0.3,
    torch.rand(240, 1) > 0.3, torch.rand(2, 1, 1, 240) > 0.3, torch.randn(2, 1, 240, 240),
    torch.rand(2, 2, 240, 240) > 0.5, torch.zeros(240, 240, dtype=torch.bool),
    torch.rand(2, 240, 240) > 0.3,
], ids=lambda mask: f"{tuple(mask.shape)} {str(mask.dtype)[6:]}")  # fmt: skip
@pytest.mark.parametrize("order", ["row", "hilbert"])
def test_masks_follow_their_tokens(mask, order):
    torch.manual_seed(0)
    model, x = SelfAttention().requires_grad_(False), randn(2, 240, 32)
    model.qkv.weight.mul_(4.0)
    want = model(x, mask)
    with sparge.accelerate(model, SAME, backend="cpu", grid=GRID, order=order) as handle:
        out = model(x, mask)
        assert handle.report().layers[0].sparse_calls == 1
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


class Call(nn.Module):
    """A call of SDPA as it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


Q, K, V = randn(2, 4, 240, 8), randn(2, 4, 240, 8) + 1, randn(2, 4, 240, 8) - 1
CALLS = {
    "causal": ((Q, K, V), {"is_causal": True}),
    "scale": ((Q, K, V), {"scale": 0.7}),
    "grouped": ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True}),
    "one key head": ((Q, K[:, :1], V[:, :1]), {}),
    "another width of values": ((Q, K, torch.cat([V, V], -1)), {}),
}
OWN = {
    "three dimensions": ((Q[0], K[0], V[0]), {}, "3 dimensions"),
    "five dimensions": ((Q[None], K[None], V[None]), {}, "5 dimensions"),
    "broadcast keys": ((Q, K[:1], V[:1]), {}, "broadcast"),
    "broadcast values": ((Q, K, V[:, :1]), {}, "heads that are broadcast"),
    "dropout": ((Q, K, V), {"dropout_p": 0.5}, "dropout"),
    "wide heads": (tuple(x.repeat(1, 1, 1, 40) for x in (Q, K, V)), {}, "head dim 320"),
    "one query": ((Q[:, :, :1], K[:, :, :1], V[:, :, :1]), {}, "one query"),
    "empty": ((Q[:, :, :0], K[:, :, :0], V[:, :, :0]), {}, "empty"),
    "a gradient": ((Q.clone().requires_grad_(), K, V), {}, "a gradient"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_served(name):
    (query, key, value), options = CALLS[name]
    model = Call()
    with sparge.accelerate(model, SAME, backend="cpu", grid=GRID) as handle:
        assert_same(model(query, key, value, **options), DENSE(query, key, value, **options))
        assert handle.report().layers[0].sparse_calls == 1


@pytest.mark.parametrize("name", OWN)
def test_calls_that_torch_serves_are_bit_equal_and_say_why(name):
    tensors, options, reason = OWN[name]
    model = Call()
    torch.manual_seed(0)
    want = DENSE(*tensors, **options)
    with sparge.accelerate(model, SAME, backend="cpu") as handle:
        torch.manual_seed(0)
        assert torch.equal(model(*tensors, **options), want)
        (why,) = handle.report().fallbacks
    assert reason in why


def of_240(n):
    return GRID if n == 240 else None


@pytest.mark.parametrize("grid", [GRID, list(GRID), [GRID, (5, 7)], of_240])
def test_ways_to_give_a_grid(grid):
    model, inputs = video_transformer(), video_inputs()
    outs = []
    for given in (GRID, grid):
        with sparge.accelerate(model, SPARSE, backend="cpu", grid=given):
            outs.append(model(*inputs))
    assert torch.equal(*outs)


@pytest.mark.parametrize("grid, error, match", [
    ((3, 8, 11), ValueError, r"grid 3×8×11 has 264 tokens, and an attention layer has 240"),
    (lambda n: (2, 2), ValueError, r"grid 1×2×2 has 4 tokens"),
])  # fmt: skip
def test_a_grid_that_does_not_match_is_refused_in_the_first_layer(grid, error, match, no_work):
    model, inputs = video_transformer(), video_inputs()
    with (
        sparge.accelerate(model, SAME, backend="cpu", grid=grid, schedule=Schedule(1.0)),
        pytest.raises(error, match=match),
    ):
        model(*inputs)
    assert is_plain(model)


@pytest.mark.parametrize("grid", [(0, 8, 10), (3,), "3x8x10", 5, (3, 8.5, 10), []])
def test_what_is_no_grid_is_refused_at_once(grid):
    model = video_transformer()
    with pytest.raises((TypeError, ValueError), match="grid"):
        sparge.accelerate(model, grid=grid)
    assert is_plain(model)


def test_text_that_is_in_the_sequence_is_the_callers_to_protect():
    """No rule tells where it is; ranges of the recipe count in the module's own order."""
    model, x = Call(), randn(1, 2, 240 + TEXT, 8)
    recipe = Recipe(KeepFraction(0.01), sink_blocks=0, protect=((-TEXT, None),))
    with sparge.accelerate(model, recipe, backend="cpu"), sparge.record() as runs:
        model(x, x, x)
    assert runs[0].recipe.protect == ((240, 249),)
    assert 0.2 < runs[0].density < 1.0
