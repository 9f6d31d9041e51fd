"""What protected tokens keep."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge import KeepFraction, Recipe

# --- what protect keeps -----------------------------------------------------------------------

Lq = Lk = 500  # 4 x 8 blocks, the last of each a tail


def kept(Lq=Lq, Lk=Lk, *, is_causal=False, causal_align="top_left", **options):
    """The map of a recipe that keeps one predicted block per row besides what is forced."""
    g = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 1, Lq, 16, generator=g), torch.randn(1, 1, Lk, 16, generator=g)
    recipe = Recipe(keep=KeepFraction(1e-6), predictor="mean", sink_blocks=0, **options)
    call = {"is_causal": is_causal, "causal_align": causal_align, "backend": "reference"}
    return sparge.make_plan(query, key, recipe=recipe, **call).to_mask()[0, 0]


def added(protect, **call):
    """What protecting adds, and where it could."""
    plain, safe = kept(**call), kept(protect=protect, **call)
    assert bool((safe | ~plain).all())
    return safe, plain


def expected(plain, tokens, offset=0, Lq=Lq):
    """`plain` with the key blocks of these tokens, and the query blocks that stand at them."""
    want = plain.clone()
    for token in tokens:
        want[:, token // 64] = True
        if 0 <= token - offset < Lq:
            want[(token - offset) // 128] = True
    return want


@pytest.mark.parametrize(
    "protect",
    [
        pytest.param(((0, 1),), id="first token"),
        pytest.param(((63, 65),), id="across a key block's edge"),
        pytest.param(((64, 128),), id="exactly one key block"),
        pytest.param(((127, 129),), id="across a query block's edge"),
        pytest.param(((499, 500),), id="last token"),
        pytest.param(((-1, None),), id="last token from the end"),
        pytest.param(((300, None),), id="to the end"),
        pytest.param(((-60, -50),), id="both from the end"),
        pytest.param(((10, -440),), id="stop from the end"),
        pytest.param(((-450, 70),), id="start from the end"),
        pytest.param(((0, 10), (490, 495)), id="two ranges"),
        pytest.param(((450, 10**6),), id="stop beyond the sequence"),
        pytest.param(((-(10**6), 10),), id="start before the sequence"),
        pytest.param(((0, None),), id="everything"),
        pytest.param(((500, 600),), id="wholly beyond the sequence"),
        pytest.param(((-900, -800),), id="wholly before the sequence"),
        pytest.param(((400, -400),), id="empty in this sequence"),
    ],
)
def test_protected_tokens_are_kept_as_keys_and_as_queries(protect):
    safe, plain = added(protect)
    tokens = [t for start, stop in protect for t in range(Lk)[start:stop]]
    assert torch.equal(safe, expected(plain, tokens))


def test_protecting_changes_the_map_of_this_sequence():
    safe, plain = added(((127, 129),))
    assert int(plain.sum()) == 4
    assert int(safe.sum()) > int(plain.sum())


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_protected_queries_stand_where_the_diagonal_says(align):
    sizes = {"Lq": 300, "Lk": 500}
    offset = 200 if align == "bottom_right" else 0
    call = {**sizes, "is_causal": True, "causal_align": align}
    safe, plain = added(((260, 270),), **call)
    rows, cols = torch.arange(300)[:, None], torch.arange(500)
    pairs = torch.nn.functional.pad(cols <= rows + offset, (0, 12, 0, 84))
    allowed = pairs.view(3, 128, 8, 64).any(3).any(1)
    want = expected(plain, range(260, 270), offset, Lq=300) & allowed
    assert torch.equal(safe, want)


def test_local_and_sink_blocks_are_kept():
    plain = kept()
    i_q, i_k = torch.arange(4)[:, None], torch.arange(8)
    # A query block of 128 rows has two key blocks of its own.
    near = (i_k >= 2 * i_q - 1) & (i_k <= 2 * i_q + 2)
    assert torch.equal(kept(local_blocks=1), plain | near)
    assert torch.equal(kept(local_blocks=10**9), torch.ones_like(plain))
    x = torch.randn(1, 1, Lq, 16, generator=torch.Generator().manual_seed(1))
    few = Recipe(keep=KeepFraction(1e-6), predictor="mean", sink_blocks=2)
    mask = sparge.make_plan(x, x, recipe=few, backend="reference").to_mask()
    assert bool(mask[..., :2].all())
    assert not bool(mask.all())
