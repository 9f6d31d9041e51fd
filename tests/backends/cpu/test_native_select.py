"""The stages predict and select of `torch.ops.sparge_cpu.run`: the mass map, and what is kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparge import KeepMass, Recipe
from sparge.backends.cpu import library as native
from sparge.rules.forced_blocks import forced_blocks
from sparge.values.tokenmask import TokenMask

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

MEAN, ROWS, BLEND = range(3)
ALL, MASS, FRACTION = range(3)
PREDICT, SELECT = 2, 3
EXACT = 3


def predict(query, key, predictor, *, offset=None, sample_rows=4):
    """The mass map of exact scores; `offset` of the diagonal, None for no diagonal."""
    (B, Hq, Lq, D), Lk = query.shape, key.shape[2]
    n_q, n_k = -(-Lq // 128), -(-Lk // 64)
    mean = key - key.mean(2, keepdim=True)
    pooled = [
        torch.stack([block.mean(2) for block in x.split(size, 2)], 2)
        for x, size in ((query, 128), (mean, 64))
    ]
    mass = torch.full((B, Hq, n_q, n_k), 7.0)
    torch.ops.sparge_cpu.run(
        shape=[B, Hq, key.shape[1], Lq, Lk, D, D], first=PREDICT, last=PREDICT, query=query,
        key=key, q_pooled=pooled[0], k_pooled=pooled[1], mass=mass, precision=EXACT, keep=MASS,
        predictor=predictor, sample_rows=sample_rows, softmax_scale=D**-0.5,
        is_causal=offset is not None, offset=offset or 0, isa=native.isa_number(),
    )  # fmt: skip
    return mass


def select(mass, keep, amount, *, offset=None, sink_blocks=0, window=0):
    """The kept set as a bool mask, and `allowed`."""
    B, Hq, n_q, n_k = mass.shape
    indices = torch.full(mass.shape, 7, dtype=torch.int32)
    counts, allowed = (torch.empty(B, Hq, n_q, dtype=torch.int32) for _ in range(2))
    torch.ops.sparge_cpu.run(
        shape=[B, Hq, Hq, n_q * 128, n_k * 64, 1, 1], first=SELECT, last=SELECT, mass=mass,
        keep=keep, amount=torch.full((Hq,), amount, dtype=torch.float64), sample_rows=4,
        sink_blocks=sink_blocks, window=window, is_causal=offset is not None, offset=offset or 0,
        counts=counts, indices=indices, allowed=allowed, isa=native.isa_number(),
    )  # fmt: skip
    kept = torch.zeros(mass.shape, dtype=torch.bool)
    for row in torch.cartesian_prod(*map(torch.arange, mass.shape[:3])).tolist():
        n = int(counts[tuple(row)])
        kept[(*row, indices[tuple(row)][:n].long())] = True
        assert (indices[tuple(row)][n:] == -1).all()
    return kept, allowed


def may_attend(n_q, n_k, offset):
    last = torch.arange(1, n_q + 1)[:, None] * 128 - 1 + offset
    return torch.arange(n_k) * 64 <= last


@pytest.mark.rule("3.3")
@pytest.mark.parametrize("predictor", [MEAN, ROWS, BLEND], ids=["mean", "rows", "blend"])
def test_the_mass_map_is_a_share_of_the_allowed_blocks(predictor):
    q, k = torch.randn(2, 4, 600, 24), torch.randn(2, 2, 500, 24)
    mass = predict(q, k, predictor, offset=-130)
    may = may_attend(5, 8, -130)
    assert (mass[..., ~may] == 0).all()
    assert (mass[..., may] > 0).all()
    assert not may[0].any()
    # Every row from the third block on attends something.
    torch.testing.assert_close(mass.sum(-1)[..., 2:], torch.ones(2, 4, 3))


@pytest.mark.parametrize("predictor", [MEAN, ROWS, BLEND], ids=["mean", "rows", "blend"])
def test_a_broken_row_is_nan_where_it_may_attend(predictor):
    """And selection keeps all of it."""
    q, k = torch.randn(1, 2, 384, 16), torch.randn(1, 2, 448, 16)
    q[0, 1, 255] = math.nan
    mass = predict(q, k, predictor, offset=0)
    may = may_attend(3, 7, 0)
    assert mass[0, 1, 1, may[1]].isnan().all()
    assert (mass[0, 1, 1, ~may[1]] == 0).all()
    assert mass[0, 0].isfinite().all()
    assert mass[0, 1, [0, 2]].isfinite().all()
    kept, _ = select(mass.masked_fill(~may, 0.0), FRACTION, 0.01)
    assert kept[0, 1, 1].all()
    assert kept[0, 0].sum(-1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -0.0])
def test_a_row_that_is_no_mass_keeps_everything(value):
    """A caller may hand in any map: what cannot be ranked is not dropped."""
    mass = torch.rand(1, 1, 3, 20)
    mass[0, 0, 1, 5] = value
    kept, allowed = select(mass, MASS, 0.3)
    assert kept[0, 0, 1].all()
    assert not kept[0, 0, 0].all()
    assert (allowed == 20).all()


def test_maps_of_two_machines_are_reduced_between_the_ops():
    """Halves of the query rows, predicted apart: their average selects as the whole map does."""
    q, k = torch.randn(1, 2, 128, 16), torch.randn(1, 2, 1300, 16)
    whole = predict(q, k, ROWS, sample_rows=128)
    halves = [predict(x.contiguous(), k, ROWS, sample_rows=64) for x in q.split(64, 2)]
    torch.testing.assert_close((halves[0] + halves[1]) / 2, whole)
    kept, _ = select((halves[0] + halves[1]) / 2, FRACTION, 0.3)
    assert torch.equal(kept, select(whole, FRACTION, 0.3)[0])


def by_sorting(row, may, keep, amount):
    """Rules 3.5, 3.6 and 3.7 by a plain sort."""
    ranked = sorted((j for j, ok in enumerate(may) if ok), key=lambda j: (-row[j], j))
    if keep == FRACTION:
        return set(ranked[: max(1, math.ceil(amount * len(ranked) - 1e-9))])
    if amount >= 1:
        return set(ranked)
    target, reached, kept = amount * math.fsum(row[j] for j in ranked), 0.0, set()
    for j in ranked:
        if reached >= target and kept:
            break
        kept.add(j)
        reached += row[j]
    return kept


@given(
    weights=st.lists(st.sampled_from([0, 1, 2, 3, 8, 64]), min_size=1, max_size=40),
    keep=st.sampled_from([MASS, FRACTION]),
    amount=st.sampled_from([1e-9, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0]),
    offset=st.integers(-200, 3000),
    sink_blocks=st.sampled_from([0, 1, 2]),
    window=st.sampled_from([0, 1]),
    seed=st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_selection_is_that_of_a_plain_sort(
    weights, keep, amount, offset, sink_blocks, window, seed
):
    """Small integers: sums are exact, and ties are many."""
    n_k = len(weights)
    g = torch.Generator().manual_seed(seed)
    rows = [torch.tensor(weights)[torch.randperm(n_k, generator=g)] for _ in range(3)]
    mass = torch.stack(rows).float()[None, None]
    may = may_attend(3, n_k, offset)
    recipe = Recipe(KeepMass(0.5), sink_blocks=sink_blocks, local_blocks=window)
    diagonal = TokenMask(3 * 128, n_k * 64, True, offset)
    forced = forced_blocks(diagonal, recipe, torch.device("cpu"))
    always = {"sink_blocks": sink_blocks, "window": window}
    kept, allowed = select(mass, keep, amount, offset=offset, **always)
    assert torch.equal(allowed[0, 0], may.sum(-1).int())
    for i in range(3):
        row = mass[0, 0, i].tolist()
        expected = set(torch.where(may[i])[0].tolist())
        if any(row):
            expected &= by_sorting(row, may[i].tolist(), keep, amount) | set(
                torch.where(forced[i])[0].tolist()
            )
        assert set(torch.where(kept[0, 0, i])[0].tolist()) == expected


def test_keep_all_needs_no_map():
    kept, _ = select(torch.empty(2, 3, 4, 9), ALL, 1.0, offset=64)
    assert torch.equal(kept, may_attend(4, 9, 64).expand(kept.shape))
