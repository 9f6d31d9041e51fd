"""`ring_attention` on 1, 2, 3 and 4 gloo processes: one process's plan, and its output."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import sparge
from gloo_ranks import run_ranks
from ring_cases import CASES, run_cases
from sparge import KeepFraction, KeepMass, Recipe
from sparge.parallel import ring_attention, ring_plan, shard, unshard

TOLERANCES = {"exact": 1e-5, "half": 6e-3, "int8": 6e-3, "int8-fast": 2e-2}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def found(request):
    """What every rank found of every case."""
    return run_ranks(run_cases, request.param, list(CASES), timeout=150)


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_process_s_plan_and_output(found, name):
    for of_rank in found:
        result, precision = of_rank[name], CASES[name].recipe.precision
        assert result.same_plan
        assert result.same_nan
        assert result.error <= TOLERANCES[precision]
        assert result.lse_error <= (1e-5 if CASES[name].dtype == torch.float64 else 2e-4)
        assert result.density <= 1.0


def test_sparse_cases_skip_something(found):
    for name in ("exact", "int8, causal, zigzag", "bf16, pooled, zigzag", "half", "rows"):
        assert found[0][name].density < 0.9, name


def test_one_rank_is_attention(found):
    if len(found) == 1:
        for name in ("exact", "int8, causal, not balanced", "int8-fast, pooled", "budget"):
            assert found[0][name].error == 0.0, name


def test_every_rank_reports_all_ranks(found):
    world = len(found)
    for of_rank in found:
        run = of_rank["int8, causal, zigzag"].run
        assert run.what == "ring_attention"
        assert [share.rank for share in run.ring.shares] == list(range(world))
        assert run.kept == run.ring.shares[found.index(of_rank)].kept
        assert sum(share.kept for share in run.ring.shares) == sum(
            other["int8, causal, zigzag"].run.kept for other in found
        )
        assert f"ring of {world}" in str(run.ring)
        assert run.to_dict()["ring"]["dense_bytes"] == run.ring.dense_bytes
    sent = found[0]["int8, causal, zigzag"].run.ring
    assert (sent.bytes_sent > 0) == (world > 1)


def test_causal_ranks_have_as_much_to_do(found):
    if len(found) > 1:
        balanced = found[0]["exact, causal"].run.ring
        not_balanced = found[0]["int8, causal, not balanced"].run.ring
        assert balanced.imbalance < not_balanced.imbalance
        assert all(share.sent["move"] > 0 for share in balanced.shares)


def test_blocks_that_nobody_keeps_do_not_travel(found):
    if len(found) > 1:
        everything, some = (found[0][name].run.ring for name in ("everything, exact", "rows"))
        assert sum(x.sent["blocks"] for x in some.shares) < sum(
            x.sent["blocks"] for x in everything.shares
        )
        assert everything.bytes_ratio == pytest.approx(1.0, abs=0.25)  # 700 rows on blocks of 64


def test_dense_is_said(found):
    run = found[0]["dense"].run
    assert run.routed_to_dense
    assert run.kept == run.allowed
    assert "dense attention is faster" in run.reason


def uneven(rank, world):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 500, 16, generator=g) for _ in range(3))
    q_cuts, k_cuts = ([0, 3, 300, 500], [0, 200, 201, 500])
    rows = slice(q_cuts[rank], q_cuts[rank + 1])
    keys = slice(k_cuts[rank], k_cuts[rank + 1])
    recipe = Recipe(KeepMass(0.6), precision="exact")
    options = {"is_causal": True, "recipe": recipe, "backend": "cpu"}
    out = ring_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], **options)
    want = sparge.attention(q, k, v, **options)[:, :, rows]
    return out.shape == want.shape and torch.allclose(out, want, atol=2e-5)


def test_ranks_may_have_any_number_of_rows():
    assert run_ranks(uneven, 3) == [True] * 3


def within_a_group(rank, world):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    g = torch.Generator().manual_seed(rank % 2)
    q, k, v = (torch.randn(1, 2, 400, 16, generator=g) for _ in range(3))
    recipe = Recipe(KeepMass(0.6), precision="exact")
    parts = [shard(x, group=group, layout="zigzag") for x in (q, k, v)]
    options = {"is_causal": True, "recipe": recipe, "backend": "cpu"}
    out = ring_attention(*parts, group=group, layout="zigzag", **options)
    other = groups[1 - rank % 2]
    with pytest.raises(ValueError, match="not in the group"):
        ring_attention(*parts, group=other)
    whole = unshard(out, group=group, layout="zigzag")
    return torch.allclose(whole, sparge.attention(q, k, v, **options), atol=2e-5)


def test_a_ring_within_a_group():
    assert run_ranks(within_a_group, 4) == [True] * 4


def bad_calls(rank, world):
    q = torch.randn(1, 2, 100 + rank, 16)
    said = []
    for given in (
        {"layout": "spiral"},
        {"balance": 1},
        {"layout": "zigzag"},
        {"recipe": "fast"},
        {"query": q.requires_grad_()},
    ):
        query = given.pop("query", q.detach())
        with pytest.raises((ValueError, TypeError)) as error:
            ring_attention(query, q.detach(), q.detach(), **given)
        said.append(str(error.value))
    out = ring_attention(q.detach(), q.detach(), q.detach())  # the group is whole
    return said, bool(out.isfinite().all())


def test_bad_calls_are_refused_everywhere_and_harm_nothing():
    for said, fine in run_ranks(bad_calls, 2):
        assert "layout must be one of" in said[0]
        assert "balance must be True or False" in said[1]
        assert "sparge.parallel.shard" in said[2]
        assert "recipe" in said[3]
        assert "no gradient" in said[4]
        assert fine


def test_without_a_group():
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ring_attention(x, x, x)


def interpreted_ring(rank, world):
    """Triton's kernels in the interpreter."""
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


def test_triton_s_keys_travel_as_rows_and_are_prepared_again(interpreted):
    for error, density in run_ranks(interpreted_ring, 2, timeout=200):
        assert error < 2e-3
        assert density < 0.8
