"""Synthetic video tokens: shapes, seeds, and the structure that is promised."""

from __future__ import annotations

import pytest
import torch

from sparge import KeepMass, Recipe, attention, record
from sparge.reorder import reorder_tokens
from sparge_tools.measuring import threads
from sparge_tools.synthetic_video import CHUNK, HEADS, video_qkv

GRID, TEXT = (6, 16, 16), 20


def logits(query, key, h):
    """Scores of one head, without what all keys of a query share, `[L, L]`."""
    key = key[0, h].double()
    return query[0, h].double() @ (key - key.mean(0)).T / query.shape[-1] ** 0.5


def mean_at(scores, grid, *, frames, rows, columns):
    """Mean score of tokens with the token this many frames, rows and columns away."""
    T, H, W = grid
    t, y, x = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    there = [(t + frames), (y + rows), (x + columns)]
    inside = torch.stack([(a >= 0) & (a < n) for a, n in zip(there, grid, strict=True)]).all(0)
    key = ((there[0] * H + there[1]) * W + there[2])[inside]
    query = torch.arange(T * H * W).view(grid)[inside]
    return float(scores[query, key].mean())


def test_shapes_dtype_and_seeds():
    q, k, v = video_qkv(GRID, text=TEXT, heads=2, D=32, dtype=torch.bfloat16)
    assert {x.shape for x in (q, k, v)} == {(1, 2, TEXT + 6 * 16 * 16, 32)}
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
    with threads(2):
        same = video_qkv(GRID, text=TEXT, heads=2, D=32, dtype=torch.bfloat16)
    other = video_qkv(GRID, text=TEXT, heads=2, D=32, dtype=torch.bfloat16, seed=1)
    for a, b, c in zip((q, k, v), same, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_an_order_moves_visual_tokens_only():
    plain = video_qkv(GRID, text=TEXT, heads=1, D=16)
    for order in ("hilbert", "tiles:2x4x4"):
        ordered = video_qkv(GRID, text=TEXT, heads=1, D=16, order=order)
        for a, b in zip(plain, ordered, strict=True):
            assert torch.equal(reorder_tokens(a, GRID, order, start=TEXT), b)


def test_a_picture_and_more_tokens_than_a_chunk():
    q, k, v = video_qkv((72, 64), heads=1, D=16)
    assert q.shape[2] == 72 * 64 > CHUNK
    assert all(x.isfinite().all() for x in (q, k, v))


def test_heads_are_local_temporal_and_global():
    """Without motion the matter stays in its place: only the local head forgets it over time."""
    q, k, _ = video_qkv(GRID, heads=3, motion=0.0, noise=0.1)
    near = [mean_at(logits(q, k, h), GRID, frames=0, rows=0, columns=1) for h in range(3)]
    late = [mean_at(logits(q, k, h), GRID, frames=5, rows=0, columns=0) for h in range(3)]
    far = [mean_at(logits(q, k, h), GRID, frames=0, rows=12, columns=12) for h in range(3)]
    assert list(HEADS) == ["local", "temporal", "global"]
    assert all(a > b + 4 for a, b in zip(near, far, strict=True))
    assert near[0] > late[0] + 3
    assert all(late[h] > near[h] - 2 for h in (1, 2))


def test_content_moves():
    """The temporal head finds its matter `motion` tokens away in the next frame, in one direction
    that the seed decides."""
    q, k, _ = video_qkv(GRID, heads=2, motion=4.0, locality=2.0, noise=0.0)
    scores = logits(q, k, 1)
    next_frame = {
        (rows, columns): mean_at(scores, GRID, frames=1, rows=rows, columns=columns)
        for rows in range(-6, 7)
        for columns in range(-6, 7)
    }
    best = max(next_frame, key=next_frame.__getitem__)
    assert abs((best[0] ** 2 + best[1] ** 2) ** 0.5 - 4.0) < 1.0
    assert next_frame[best] > next_frame[0, 0] + 3


def test_noise_removes_structure():
    spread = []
    for noise in (0.0, 0.5, 1.0):
        q, k, _ = video_qkv(GRID, heads=1, noise=noise)
        scores = logits(q, k, 0)
        near, far = (mean_at(scores, GRID, frames=0, rows=n, columns=n) for n in (1, 12))
        spread.append(near - far)
    assert spread[0] > spread[1] > 2 > 0.5 > abs(spread[2])


def test_visual_tokens_read_the_text_and_text_has_clusters():
    q, k, _ = video_qkv(GRID, text=32, heads=3, noise=0.0)
    scores = logits(q, k, 2)
    assert scores[32:, :32].mean() > scores[32:, 32:].mean() + 1
    same = torch.arange(32)[:, None] // 8 == torch.arange(32) // 8
    among = scores[:32, :32]
    assert among[same].mean() > among[~same].mean() + 3


def test_densities_are_those_of_video_models_and_hilbert_needs_fewer():
    found = {}
    for order in ("row", "hilbert"):
        inputs = video_qkv((8, 24, 32), text=64, heads=3, order=order)
        with record() as runs:
            attention(*inputs, recipe=Recipe(KeepMass(0.95), protect=((0, 64),)))
        found[order] = runs[0].density
    assert 0.3 < found["hilbert"] < 0.6
    assert found["hilbert"] < found["row"] - 0.1


@pytest.mark.parametrize(
    ("wrong", "kind", "why"),
    [
        ({"text": -1}, ValueError, "text must be at least 0"),
        ({"heads": 0}, ValueError, "heads must be at least 1"),
        ({"heads": 1.5}, TypeError, "heads must be a whole number"),
        ({"D": 8}, ValueError, "D must be at least 16"),
        ({"locality": 0.0}, ValueError, "locality must be greater than 0"),
        ({"motion": -1.0}, ValueError, "motion must be at least 0"),
        ({"motion": float("nan")}, ValueError, "motion must be at least 0"),
        ({"noise": 1.1}, ValueError, "noise must be from 0 to 1"),
        ({"seed": -1}, ValueError, "seed must be from 0"),
        ({"order": "zigzag"}, ValueError, "order must be one of"),
        ({"grid": (4,)}, ValueError, "grid must have two or three sizes"),
    ],
)
def test_wrong_parameters_are_refused(wrong, kind, why):
    with pytest.raises(kind, match=why):
        video_qkv(**{"grid": (2, 4, 4), **wrong})
