"""Triton's kernels in a ring, in the interpreter: keys travel as rows, and are prepared again."""

from __future__ import annotations

import torch

import sparge
from gloo_ranks import run_ranks
from sparge import KeepFraction, Recipe
from sparge.parallel import ring_attention, ring_plan, shard, unshard


def interpreted_ring(rank, world):
    import interpreter

    interpreter.install()
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, heads, 300, 16, generator=g).half() for heads in (2, 1, 1)]
    parts = [shard(x) for x in qkv]
    recipe = Recipe(KeepFraction(0.5), skipped="pool", pool_group=16)
    options = {"recipe": recipe, "backend": "triton", "enable_gqa": True}
    plan = sparge.make_plan(*qkv[:2], **options).to_mask()
    for first, part in ring_plan(*parts, **options):
        assert torch.equal(part.to_mask(), plan[:, :, first : first + part.counts.shape[2]])
    out, want = unshard(ring_attention(*parts, **options)), sparge.attention(*qkv, **options)
    return float((out.float() - want.float()).abs().max()), float(plan.float().mean())


def test_two_ranks(interpreted):
    for error, density in run_ranks(interpreted_ring, 2, timeout=200):
        assert error < 2e-3
        assert density < 0.8
