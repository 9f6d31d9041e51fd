"""yunchang's `LongContextAttention` and `UlyssesAttention` with sparge's processor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
pytest.importorskip("yunchang")

import sparge
from gloo_ranks import run_ranks
from sparge import KeepAll, KeepFraction, Recipe
from sparge.models.ulysses import ONE_SELECTION, PER_CHUNK, ULYSSES
from sparge.models.yunchang import AttentionProcessor, register

L, H, HK, D = 1024, 4, 2, 32
SAME = Recipe(KeepAll(), precision="exact")
HEADS = Recipe(KeepFraction((0.2, 0.4, 0.6, 0.8)), precision="exact", sink_blocks=0)


def whole(kv_heads=H):
    """q, k, v `[B, L, H, D]` with structure that blocks can be chosen by."""
    g = torch.Generator().manual_seed(0)
    topics = 0.8 * torch.randn(16, D, generator=g)
    at = torch.arange(L) // 64
    q, k = (torch.randn(1, L, heads, D, generator=g) for heads in (H, kv_heads))
    v = torch.randn(1, L, kv_heads, D, generator=g)
    return q + topics[at, None], k + topics[(at * 5) % 16, None], v


def alone(qkv, recipe, causal=False):
    """One process: `[B, L, H, D]`."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    gqa = q.shape[1] != k.shape[1]
    out = sparge.attention(q, k, v, is_causal=causal, enable_gqa=gqa, recipe=recipe, backend="cpu")
    return out.transpose(1, 2)


def mine(x, rank, world, ring_impl):
    if "zigzag" not in ring_impl:
        return x.chunk(world, dim=1)[rank].contiguous()
    parts = x.chunk(2 * world, dim=1)
    return torch.cat([parts[rank], parts[2 * world - 1 - rank]], dim=1).contiguous()


@torch.no_grad()
def run(rank, world, recipe, ring_impl, causal=False, kv_heads=H):
    from yunchang import LongContextAttention

    qkv = whole(kv_heads)
    processor = AttentionProcessor(recipe, backend="cpu")
    layer = LongContextAttention(
        ring_impl_type=ring_impl, attn_type="sparge", attn_processor=processor
    )
    out = layer(*(mine(x, rank, world, ring_impl) for x in qkv), causal=causal)
    wants = {"dense": alone(qkv, SAME, causal), "alone": alone(qkv, recipe, causal)}
    found = {
        name: float((out - part).norm() / part.norm())
        for name, want in wants.items()
        for part in [mine(want, rank, world, ring_impl)]
    }
    report = processor.report()
    found["parallel"], found["text"] = report.parallel, str(report)
    found["heads"] = len(report.layers[0].density_by_head)
    return found


def degrees(ulysses, ring, rank, world):
    from yunchang import set_seq_parallel_pg

    set_seq_parallel_pg(ulysses, ring, rank, world)
    register()


def in_ulysses(rank, world):
    degrees(2, 1, rank, world)
    found = {"same": run(rank, world, SAME, "basic"), "heads": run(rank, world, HEADS, "basic")}
    found["gqa"] = run(rank, world, HEADS, "basic", causal=True, kv_heads=HK)
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    processor = layer.attn_fn = AttentionProcessor(
        HEADS, backend="cpu", ulysses_group=dist.group.WORLD
    )
    qkv = whole()
    with torch.no_grad():
        out = layer(*(mine(x, rank, world, "basic") for x in qkv), causal=True)
    want = mine(alone(qkv, HEADS, causal=True), rank, world, "basic")
    error = float((out - want).norm() / want.norm())
    found["attn_fn"] = {"alone": error, "parallel": processor.report().parallel}
    return found


def in_ring(rank, world):
    degrees(1, 2, rank, world)
    found = {}
    for causal in (False, True):
        for ring_impl in ("sparge", "basic"):
            for name, recipe in (("same", SAME), ("heads", HEADS)):
                key = f"{name} {ring_impl} {causal}"
                found[key] = run(rank, world, recipe, ring_impl, causal)
    found["heads sparge_zigzag"] = run(rank, world, HEADS, "sparge_zigzag", causal=True)
    found["gqa"] = run(rank, world, HEADS, "sparge", causal=True, kv_heads=HK)
    try:
        run(rank, world, Recipe(KeepAll(), precision="exact", protect=((0, 64),)), "basic")
    except ValueError as told:
        found["protect"] = str(told)
    return found


def in_both(rank, world):
    degrees(2, 2, rank, world)
    return {"heads": run(rank, world, HEADS, "sparge")}


@pytest.fixture(scope="module")
def ring():
    return run_ranks(in_ring, 2, timeout=120)


def test_ulysses_is_one_process():
    for found in run_ranks(in_ulysses, 2, timeout=120):
        assert found["same"]["dense"] < 1e-5
        for name in ("heads", "gqa"):
            assert found[name]["alone"] < 1e-5 < 0.01 < found[name]["dense"]
            assert found[name]["parallel"] == {ULYSSES: 1}
            assert found[name]["heads"] == H // 2
        assert found["attn_fn"]["alone"] < 1e-5
        assert found["attn_fn"]["parallel"] == {ULYSSES: 1}


@pytest.mark.parametrize("causal", [False, True])
def test_our_ring_selects_once(causal, ring):
    for found in ring:
        assert found[f"same sparge {causal}"]["dense"] < 1e-5
        heads = found[f"heads sparge {causal}"]
        assert heads["alone"] < 1e-5 < 0.01 < heads["dense"]
        assert heads["parallel"] == {ONE_SELECTION: 1}
        assert "of what dense rings send" in heads["text"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_of_yunchang_selects_per_chunk(causal, ring):
    for rank, found in enumerate(ring):
        same, heads = found[f"same basic {causal}"], found[f"heads basic {causal}"]
        assert same["dense"] < 1e-5
        assert heads["dense"] < 0.5
        chunks = rank + 1 if causal else 2
        assert heads["parallel"] == {PER_CHUNK: chunks}
        assert PER_CHUNK in heads["text"]


def test_zigzag(ring):
    for found in ring:
        assert found["heads sparge_zigzag"]["alone"] < 1e-5
        assert found["gqa"]["alone"] < 1e-5


def test_protected_ranges_need_one_selection(ring):
    for found in ring:
        assert "ring_impl_type='sparge'" in found["protect"]


def test_ulysses_inside_a_ring():
    for found in run_ranks(in_both, 4, timeout=120):
        assert found["heads"]["alone"] < 1e-5 < 0.01 < found["heads"]["dense"]
        assert found["heads"]["parallel"] == {ONE_SELECTION: 1}


@pytest.mark.parametrize(
    "given",
    [
        {"dropout_p": 0.1},
        {"window_size": (64, 64)},
        {"softcap": 20.0},
        {"alibi_slopes": torch.ones(4)},
        {"return_attn_probs": True},
    ],
)
def test_what_is_not_computed_is_refused(given):
    processor, (name,) = AttentionProcessor(SAME), given
    with pytest.raises(ValueError, match=f"{name} must be left at its default"):
        processor(*whole(), **given)


def test_a_gradient_is_refused():
    q, k, v = whole()
    with pytest.raises(ValueError, match="must not require a gradient"):
        AttentionProcessor(SAME)(q.requires_grad_(), k, v)


def test_settings_are_checked_at_once():
    with pytest.raises(TypeError, match=r"recipe must be a sparge\.Recipe, got float"):
        AttentionProcessor(0.5)
    with pytest.raises(ValueError, match="backend must be one of auto"):
        AttentionProcessor(backend="gpu")
    from sparge.models.yunchang import _ring

    with pytest.raises(TypeError, match="attn_processor must be a sparge"):
        _ring(*whole(), layout="contiguous", attn_processor=None)
