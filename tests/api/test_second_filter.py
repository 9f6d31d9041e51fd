"""The softmax-aware filter, against a row-by-row simulation in fp64."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from oracle import dense, make_qkv, pairs, relative_l1
from sparge import KeepAll, Recipe


def simulate(q, k, v, pv_skip, *, is_causal=False, blocks=None):
    """`(out, skips [n_q])` of one head: groups of 16 rows, blocks ascending, row_max before."""
    Lq, Lk = q.shape[2], k.shape[2]
    allowed, _ = pairs((1, 1, Lq, Lk), is_causal=is_causal)
    s = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)[0, 0]
    v = v.double()[0, 0]
    out = torch.zeros(Lq, v.shape[1], dtype=torch.float64)
    skips = [0] * -(-Lq // 128)
    for first in range(0, Lq, 16):
        rows = range(first, min(first + 16, Lq))
        row_max, kept = dict.fromkeys(rows, -math.inf), {r: [] for r in rows}
        for left in range(0, Lk, 64):
            keys = range(left, min(left + 64, Lk))
            if blocks is not None and not blocks[first // 128][left // 64]:
                continue
            if not allowed[
                0, 0, first // 128 * 128 : (first // 128 + 1) * 128, left : left + 64
            ].any():
                continue
            block_max = {r: s[r, keys.start : keys.stop].max().item() for r in rows}
            if all(row_max[r] - block_max[r] >= pv_skip for r in rows):
                skips[first // 128] += 1
                continue
            for r in rows:
                row_max[r] = max(row_max[r], block_max[r])
                kept[r] += keys
        for r in rows:
            if row_max[r] > -math.inf:
                out[r] = torch.softmax(s[r, kept[r]], 0) @ v[kept[r]]
    return out[None, None], skips


@pytest.mark.rule("4.4", "4.5", "4.7", "6.2")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pv_skip", [0.5, 2.0, 6.0])
@pytest.mark.parametrize(("Lq", "Lk"), [(256, 640), (150, 330), (5, 200)])
def test_groups_are_skipped_as_simulated(backend, Lq, Lk, pv_skip, is_causal):
    q, k, v = make_qkv(Hq=1, Lq=Lq, Lk=Lk, D=16, sharp=3.0)
    k[:, :, ::64] *= torch.linspace(3, 0.1, -(-Lk // 64))[:, None]
    k *= torch.linspace(2, 0.05, Lk)[:, None]  # later blocks fall ever lower
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=pv_skip)
    with sparge.record() as runs:
        out = sparge.attention(q, k, v, is_causal=is_causal, recipe=recipe, backend=backend)
    truth, skips = simulate(q, k, v, pv_skip, is_causal=is_causal)
    assert relative_l1(out, truth) < 1e-5
    plan = sparge.make_plan(q, k, is_causal=is_causal, recipe=recipe, backend=backend)
    units = int((plan.counts[0, 0] * plan.row_groups()).sum())
    assert runs[0].pv_skipped == pytest.approx(sum(skips) / units)
    if (Lq, pv_skip) in ((256, 0.5), (256, 2.0)):
        assert sum(skips) > 0, "the example shows nothing"


@pytest.mark.rule("4.5")
@pytest.mark.parametrize("is_causal", [False, True])
def test_none_is_off(backend, is_causal):
    q, k, v = make_qkv(Hq=2, Lq=200, Lk=300, D=16, sharp=20.0)
    recipe = Recipe(KeepAll(), precision="exact")
    with sparge.record() as runs:
        out = sparge.attention(q, k, v, is_causal=is_causal, recipe=recipe, backend=backend)
    assert runs[0].pv_skipped == 0.0
    assert relative_l1(out, dense(q, k, v, is_causal=is_causal)[0]) < 1e-5


@pytest.mark.rule("4.6")
def test_blocks_are_visited_in_ascending_order(backend):
    """A maximum in the first block lets later blocks be skipped; in the last block it cannot."""
    q = torch.ones(1, 1, 16, 4)
    v = torch.randn(1, 1, 256, 4, generator=torch.Generator().manual_seed(0))
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=3.0)
    skipped = {}
    for name, place in (("first", slice(0, 64)), ("last", slice(192, 256))):
        k = torch.zeros(1, 1, 256, 4)
        k[:, :, place] = 2.5  # a score 5 above the rest
        with sparge.record() as runs:
            sparge.attention(q, k, v, recipe=recipe, backend=backend)
        skipped[name] = runs[0].pv_skipped
    assert skipped == {"first": 0.75, "last": 0.0}


@pytest.mark.rule("4.4")
def test_one_row_of_the_group_that_needs_a_block_keeps_it_for_all(backend):
    q = torch.zeros(1, 1, 32, 4)
    q[..., 0] = 1.0
    q[0, 0, 20] = torch.tensor([0.0, 1.0, 0.0, 0.0])  # looks at the second block instead
    k = torch.zeros(1, 1, 128, 4)
    k[:, :, :64, 0], k[:, :, 64:, 1] = 20.0, 20.0
    v = torch.randn(1, 1, 128, 4, generator=torch.Generator().manual_seed(0))
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=4.0)
    with sparge.record() as runs:
        out = sparge.attention(q, k, v, recipe=recipe, backend=backend)
    assert runs[0].pv_skipped == 1 / 4  # group 0 skips the second block, group 1 nothing
    truth = simulate(q, k, v, 4.0)[0]
    assert relative_l1(out, truth) < 1e-5
    # natural-log units: a gap of exactly 10 is skipped at 9.99 and not at 10.01
    for pv_skip, expected in ((9.99, 1 / 4), (10.01, 0.0)):
        with sparge.record() as runs:
            sharp = Recipe(KeepAll(), precision="exact", pv_skip=pv_skip)
            sparge.attention(q, k, v, scale=0.5, recipe=sharp, backend=backend)
        assert runs[0].pv_skipped == expected


@pytest.mark.rule("4.4")
def test_per_head_thresholds(backend):
    q, k, v = make_qkv(Hq=2, Lq=128, Lk=320, D=16, sharp=3.0)
    q, k, v = (x[:, :1].repeat(1, 2, 1, 1) for x in (q, k, v))
    k *= torch.linspace(2, 0.05, 320)[:, None]
    recipe = Recipe(KeepAll(), precision="exact", pv_skip=(1.0, None))
    out = sparge.attention(q, k, v, recipe=recipe, backend=backend)
    assert relative_l1(out[:, :1], simulate(q[:, :1], k[:, :1], v[:, :1], 1.0)[0]) < 1e-5
    assert relative_l1(out[:, 1:], dense(q[:, 1:], k[:, 1:], v[:, 1:])[0]) < 1e-5


@pytest.mark.rule("6.1", "6.2", "6.3")
def test_sparsity_counts_both_filters(backend):
    q, k, v = make_qkv(Hq=1, Lq=150, Lk=640, D=16, sharp=3.0)
    k *= torch.linspace(2, 0.05, 640)[:, None]
    blocks = torch.rand(2, 10, generator=torch.Generator().manual_seed(1)) < 0.6
    recipe = Recipe(precision="exact", pv_skip=1.0)
    with sparge.record() as runs:
        sparge.attention(q, k, v, is_causal=True, block_mask=blocks, recipe=recipe, backend=backend)
    _, skips = simulate(q, k, v, 1.0, is_causal=True, blocks=blocks.tolist())
    allowed = [2, 3]  # rows 0–127 see key blocks 0–1, rows 128–149 blocks 0–2
    kept = [int(blocks[i, : allowed[i]].sum()) for i in range(2)]
    groups = [8, 2]
    skipped_qk = sum(allowed) - sum(kept)
    skipped_pv = skipped_qk + sum(skips[i] / groups[i] for i in range(2))
    assert runs[0].density == pytest.approx(sum(kept) / sum(allowed))
    assert runs[0].sparsity == pytest.approx((skipped_qk + skipped_pv) / (2 * sum(allowed)))
