"""The launch path of the Triton backend, in its interpreter: what is launched, and replayed."""

from __future__ import annotations

import pytest
import torch

import sparge
from oracle import clustered_qkv, dense, make_qkv, relative_l1
from sparge import DEFAULT, KeepAll, KeepError, KeepFraction, KeepMass, Recipe

pytestmark = pytest.mark.usefixtures("interpreted")

RECIPES = {
    "default": DEFAULT,
    "drop": Recipe(KeepMass(0.9)),
    "mean": Recipe(KeepMass(0.8), predictor="mean", min_similarity=0.1),
    "fraction": Recipe(KeepFraction(0.5), precision="half", pv_skip=3.0),
    "fast": Recipe(KeepMass(0.9), precision="int8-fast"),
    "exact": Recipe(KeepAll(), precision="exact"),
}


@pytest.fixture
def launches():
    from sparge.backends.triton.launch import watch_launches

    with watch_launches() as found:
        yield found


@pytest.mark.parametrize("name", RECIPES)
def test_replay_with_other_numbers(launches, name):
    """What a captured graph does: the same launches on the same memory, which holds other numbers
    by then. Whatever was decided on the host by numbers would show."""
    shape = {"Hq": 2, "Hk": 1, "L": 400, "D": 32}
    q, k, v = clustered_qkv(seed=1, **shape)
    others = clustered_qkv(seed=2, noise=1.0, **shape)
    options = {"is_causal": True, "enable_gqa": True, "recipe": RECIPES[name], "backend": "triton"}
    first = sparge.attention(q, k, v, **options)
    captured = list(launches)
    wanted = sparge.attention(*others, **options)
    assert not torch.equal(first, wanted)
    for mine, other in zip((q, k, v), others, strict=True):
        mine.copy_(other)
    for made in captured:
        made.kernel[made.grid](**made.arguments, **made.options)
    assert torch.equal(first, wanted)


def test_a_call_launches_at_most_eight_kernels(launches):
    q, k, v = clustered_qkv(Hq=2, L=400)
    sparge.attention(q, k, v, is_causal=True, recipe=DEFAULT, backend="triton")
    names = [made.name for made in launches]
    assert len(names) <= 8
    assert names[-1] == "attend_blocks"
    assert len(set(names)) == len(names)


def test_packed_sequences_take_as_many_launches_as_one(launches):
    g = torch.Generator().manual_seed(0)
    counts = []
    for lengths in ([300], [70, 130, 5, 200]):
        cuts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        q, k, v = (torch.randn(sum(lengths), 2, 16, generator=g) for _ in range(3))
        launches.clear()
        sparge.attention_varlen(q, k, v, cuts, cuts, recipe=Recipe(), backend="triton")
        counts.append(len(launches))
    assert counts[0] == counts[1] <= 8


@pytest.mark.parametrize(
    "recipe, way", [(Recipe(KeepError(0.2)), "error"), (Recipe(protect=((0, -5),)), "protect")]
)
def test_what_cannot_be_packed_runs_one_by_one(recipe, way):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(100, 1, 16, generator=g) for _ in range(3))
    cuts = torch.tensor([0, 30, 100], dtype=torch.int32)
    out = sparge.attention_varlen(q, k, v, cuts, cuts, recipe=recipe, backend="triton")
    alone = [
        sparge.attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), recipe=recipe,
                         backend="triton")[0].transpose(0, 1)
        for a, b in ((0, 30), (30, 100))
    ]  # fmt: skip
    assert torch.equal(out, torch.cat(alone)), way


def test_sums_of_fp8_products_keep_their_digits_over_160k_keys():
    """Matrix units of Ada and Hopper add 8-bit products with 13 bits. Chained over 160k keys that
    would lose most of the sum; ours is chained over 64 keys alone."""
    import interpreter

    L = 160_000
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 16, 32, generator=g) * 0.1
    k = torch.randn(1, 1, L, 32, generator=g) * 0.1
    v = torch.ones(1, 1, L, 16)  # every average is known: what is lost is lost by the sum
    v[..., 1::2] = 0.5
    recipe = Recipe(KeepAll(), precision="int8-fast")
    with interpreter.coarse_accumulation():
        out = sparge.attention(q, k, v, recipe=recipe, backend="triton")
    # 8-bit P alone is off by up to 0.02 here: equal weights round alike.
    assert (out / v[:, :, :1] - 1).abs().max() < 0.025


def test_blocks_of_very_different_values_share_a_sum():
    """The unit of 8-bit sums follows the values: far smaller ones must not push large ones out, nor
    be lost where they are all that a row attends."""
    q, k, v = make_qkv(Hq=1, Lq=128, Lk=512, D=16)
    v[:, :, :64] *= 1e20
    v[:, :, 64:128] *= 1e-20
    v[:, :, 128:192] = 0.0
    blocks = torch.zeros(1, 8, dtype=torch.bool)
    recipe = Recipe(precision="int8-fast")
    for kept in ((0, 1, 2, 3), (1, 2), (3, 1), (2,), (1, 3, 7)):
        blocks[:] = False
        blocks[0, list(kept)] = True
        options = {"block_mask": blocks, "recipe": recipe}
        out = sparge.attention(q, k, v, backend="triton", **options)
        truth, _ = dense(q, k, v, kept=blocks.expand(1, 1, 1, 8))
        assert relative_l1(out, truth) < 0.05 if truth.abs().sum() else (out == 0).all(), kept


@pytest.mark.parametrize("precision", ["half", "exact"])
def test_gradients_are_those_of_the_reference(precision):
    q, k, v = (x.requires_grad_() for x in make_qkv(Hq=4, Hk=2, Lq=150, Lk=200, D=16))
    recipe = Recipe(KeepFraction(0.5), precision=precision, pv_skip=2.0)
    found = []
    for backend in ("triton", "reference"):
        out, lse = sparge.attention(
            q, k, v, is_causal=True, causal_align="bottom_right", enable_gqa=True, recipe=recipe,
            backend=backend, return_lse=True,
        )  # fmt: skip
        loss = (out * torch.linspace(-1, 1, out.shape[-1])).sum() + (lse * 0.1).sum()
        found.append(torch.autograd.grad(loss, (q, k, v)))
    for mine, theirs in zip(*found, strict=True):
        assert relative_l1(mine, theirs.double()) < (1e-5 if precision == "exact" else 1e-2)
