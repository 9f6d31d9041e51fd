"""Packed sequences in one native call: each is, bit for bit, as it is alone. Edges by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import sparge
from calls import BUILT_IN, FIXED
from packs import identical, one_by_one
from packs import packed as a_pack
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe, attention_varlen
from sparge.backends.cpu import CPU_BACKEND
from sparge.backends.cpu import library as native
from sparge.routing import choose
from sparge.routing.choice import choose_dense_pack
from sparge.values.backend import UnitCosts

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

CHUNKS = ((1, 64, 130, 40), (300, 64, 200, 41))
ALIGNS = ("top_left", "bottom_right")


def both(pack, **options):
    """`(out, lse)` of the pack at once, after comparing it with each sequence alone."""
    options = {"backend": "cpu", **options}
    got = attention_varlen(*pack, enable_gqa=True, return_lse=True, **options)
    for mine, alone in zip(got, one_by_one(*pack, **options), strict=True):
        identical(mine, alone)
    return got


@pytest.fixture
def counted(monkeypatch):
    """Native calls, as `pack` or `call`."""
    names, run = [], native.run

    def counting(fields):
        names.append("call" if fields.get("q_rows") is None else "pack")
        return run(fields)

    monkeypatch.setattr(native, "run", counting)
    return names


# --- what is computed -------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", ["drop", "pool"])
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
@pytest.mark.parametrize(
    "keep",
    [KeepMass(0.6), KeepFraction(0.4), KeepAll(), KeepError(0.05), KeepError(0.003)],
    ids=lambda keep: type(keep).__name__,
)
def test_recipes(keep, precision, skipped):
    pools = {"skipped": "pool", "pool_group": 16} if skipped == "pool" else {}
    recipe = Recipe(keep, precision=precision, pv_skip=3.0, **pools)
    for dtype, align in zip((torch.float32, torch.bfloat16), ALIGNS, strict=True):
        pack = a_pack(*CHUNKS, dtype=dtype)
        both(pack, recipe=recipe, is_causal=True, causal_align=align)


@pytest.mark.parametrize("predictor", ["mean", "rows", "blend"])
@pytest.mark.parametrize("precision", ["int8", "half"])
def test_predictors(predictor, precision):
    least = {"min_similarity": (0.0, 0.3, 0.01, None)} if predictor == "mean" else {}
    recipe = Recipe(KeepMass((0.3, 0.6, 0.9, 1.0)), predictor, precision=precision, **least)
    both(a_pack(*CHUNKS, dtype=torch.float16), recipe=recipe)


@pytest.mark.parametrize("D, Dv", [(1, 1), (7, 33), (64, 64), (128, 16), (256, 256)])
def test_head_dims(D, Dv):
    both(a_pack((70, 129), (70, 129), D=D, Dv=Dv), is_causal=True)


@pytest.mark.parametrize("group", [4, 64])
def test_pooled_entries_of_sequences_that_end_within_a_group(group):
    recipe = Recipe(KeepFraction(0.2), sink_blocks=0, skipped="pool", pool_group=group)
    for precision in ("int8", "int8-fast", "half"):
        pack = a_pack((130, 5, 260), (257, 4, 643), dtype=torch.bfloat16)
        both(pack, recipe=replace(recipe, precision=precision))


@pytest.mark.parametrize(
    "forced",
    [
        {"sink_blocks": 0, "local_blocks": 0},
        {"sink_blocks": 3, "local_blocks": 2},
        {"sink_blocks": 10**30, "local_blocks": 0},
        {"local_blocks": 10**30},
        {"protect": ((0, 70), (-30, None))},
        {"protect": ((5, -3), (10**30, None), (-(10**30), 2))},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [None, *ALIGNS])
def test_blocks_that_are_always_kept(forced, causal):
    recipe = Recipe(KeepFraction(0.01), "mean", precision="half", **forced)
    diagonal = {} if causal is None else {"is_causal": True, "causal_align": causal}
    both(a_pack((129, 300, 40), (500, 190, 650)), recipe=recipe, **diagonal)


# --- edges ------------------------------------------------------------------------------------


def test_one_token_sequences():
    pack = a_pack((1,) * 5, (1, 2, 63, 64, 65))
    for align in ALIGNS:
        both(pack, is_causal=True, causal_align=align)


def test_lengths_around_blocks():
    lengths = [n + d for n in (64, 128, 256) for d in (-1, 0, 1)]
    for recipe in (Recipe(KeepFraction(0.5)), Recipe(KeepAll(), precision="exact")):
        both(a_pack(lengths, lengths), is_causal=True, recipe=recipe)


def test_two_hundred_tiny_ones():
    lengths = [1 + i % 7 for i in range(200)]
    both(a_pack(lengths, lengths[::-1]), recipe=Recipe(KeepMass(0.5), skipped="pool"))


def test_a_sequence_longer_than_a_task():
    # A task of planning has 16 query blocks.
    both(a_pack((2100, 3, 2047), (2100, 3, 2047), Hq=2, Hk=1), is_causal=True)


def test_chunked_prefill():
    out, _ = both(a_pack((16, 130, 1), (400, 600, 257)), is_causal=True, causal_align=ALIGNS[1])
    assert bool(torch.isfinite(out).all())


def test_rows_that_may_attend_nothing():
    pack = a_pack((300, 64), (70, 64))
    out, lse = both(pack, is_causal=True, causal_align="bottom_right")
    assert not out[:230].any()
    assert bool((lse[:, :230] == -torch.inf).all())
    assert bool(torch.isfinite(lse[:, 230:]).all())


@pytest.mark.parametrize("isa", native.available())
def test_threads(isa, monkeypatch):
    monkeypatch.setenv(native.ENV_ISA, isa)
    pack = a_pack((200, 3, 70, 131), (200, 66, 70, 131), dtype=torch.bfloat16)
    recipe = Recipe(KeepMass(0.6), precision="int8-fast", skipped="pool", pool_group=8)
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs.append(both(pack, is_causal=True, recipe=recipe))
    for other in outs[1:]:
        for got, want in zip(other, outs[0], strict=True):
            identical(got, want)


def test_strided_inputs():
    *_, cu_q, cu_k = a_pack((130, 70), (130, 70), D=16, Dv=16)
    fused = torch.randn(200, 4 + 2 + 2, 2 * 16, generator=torch.Generator().manual_seed(0))
    parts = [x[..., ::2] for x in fused.split((4, 2, 2), 1)]
    contiguous = [x.contiguous() for x in parts]
    assert not any(x.is_contiguous() for x in parts)
    for precision in ("int8", "int8-fast", "half", "exact"):
        recipe = Recipe(KeepFraction(0.5), precision=precision)
        for mine, want in zip(
            both((*parts, cu_q, cu_k), recipe=recipe),
            both((*contiguous, cu_q, cu_k), recipe=recipe),
            strict=True,
        ):
            identical(mine, want)


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_sequence_that_is_not_finite_does_not_touch_another(name, precision):
    lengths = (70, 200, 65)
    pack = a_pack(lengths, lengths, Dv=16)
    recipe = Recipe(KeepFraction(0.5), precision=precision, skipped="pool", pool_group=16)
    before = both(pack, recipe=recipe)
    pack[("query", "key", "value").index(name)][100] = torch.nan
    after = both(pack, recipe=recipe)
    assert bool(after[0][70:270].isnan().any())
    for rows in (slice(0, 70), slice(270, None)):
        identical(after[0][rows], before[0][rows])
        identical(after[1][:, rows], before[1][:, rows])


# --- how it runs ------------------------------------------------------------------------------


def test_the_number_of_native_calls_does_not_grow(counted):
    recipe = Recipe(KeepMass(0.5), precision="int8-fast", skipped="pool", pv_skip=3.0)
    calls = []
    for n in (1, 40):
        counted.clear()
        attention_varlen(
            *a_pack((130,) * n, (70,) * n), enable_gqa=True, backend="cpu", recipe=recipe
        )
        calls.append([name for name in counted if name in ("pack", "call")])
    assert calls == [["pack"]] * 2


def test_an_error_budget_is_one_native_call_too(counted):
    recipe, pack = Recipe(KeepError(0.05)), a_pack((130, 70), (130, 70))
    _, run = recorded(pack, recipe=recipe, backend="cpu")
    assert counted == ["pack"] * 2  # recorded, and again
    assert all(part.error_by_head is not None for part in run.parts)
    both(pack, recipe=recipe)


def test_equal_lengths_are_chosen_once(register):
    asked = []
    register("curious", refusal=lambda host, call: asked.append(call.Lq) or "it only looks")
    lengths = (30, 300, 30, 300, 300)
    attention_varlen(*a_pack(lengths, lengths), enable_gqa=True)
    assert sorted(asked) == [30, 300]


def crossover(**elements):
    """Built-in costs with other seconds for a pair, by way; calls and rows cost nothing."""
    costs = {}
    for name, cost in BUILT_IN.costs.items():
        element = elements.get(name.rpartition("/")[2].replace("-", "_").replace("+", "_"))
        costs[name] = cost if element is None else UnitCosts(0.0, 0.0, element)
    return replace(BUILT_IN, costs=costs, measured=True)


def recorded(pack, **options):
    with sparge.record() as runs:
        got = attention_varlen(*pack, enable_gqa=True, is_causal=True, **options)
    (run,) = runs
    identical(got, attention_varlen(*pack, enable_gqa=True, is_causal=True, **options))
    return got, run


def test_auto_packs_the_long_ones_and_leaves_the_others_to_dense(new_router, counted):
    new_router(costs={"cpu": crossover(int8=1e-9, dense=1e-8, half=1e-7)})
    lengths = (700, 60, 800, 61)
    pack = a_pack(lengths, lengths)
    got, run = recorded(pack, recipe=Recipe(KeepFraction(0.4)))
    assert [part.backend for part in run.parts] == ["cpu", "dense", "cpu", "dense"]
    assert set(counted) & {"pack", "call"} == {"pack"}
    identical(got, one_by_one_auto(pack, recipe=Recipe(KeepFraction(0.4))))
    assert run.kept == sum(part.kept for part in run.parts) < run.allowed


def one_by_one_auto(pack, **options):
    query, key, value, cu_q, _ = pack
    outs = []
    for start, stop in pairwise(cu_q.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        out = sparge.attention(q, k, v, is_causal=True, enable_gqa=True, **options)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def test_auto_leaves_a_sequence_whose_plan_keeps_too_much(new_router):
    # Blocks of the first sequence are not alike, so that all are kept; those of the other are.
    new_router(costs={"cpu": crossover(int8=1e-9, dense=1.05e-9, half=1e-7)})
    query, key, value, *cu = a_pack((1024, 1024), (1024, 1024), Hq=2, Hk=1, D=16, Dv=16)
    signs = 1.0 - 2.0 * (torch.arange(1024) // 64 % 2)
    query[1024:], key[1024:] = 1.0, signs[:, None, None]
    recipe = Recipe(KeepFraction(0.3), "mean", min_similarity=0.9)
    got, run = recorded((query, key, value, *cu), recipe=recipe)
    assert [part.backend for part in run.parts] == ["dense", "cpu"]
    assert run.parts[0].routed_to_dense
    assert "the plan keeps 100%" in run.parts[0].reason
    assert {"prepare", "predict", "select", "attend"} <= run.parts[0].seconds.keys()
    identical(got, one_by_one_auto((query, key, value, *cu), recipe=recipe))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dense_attention_in_a_pack_where_it_was_measured_to_be_faster(new_router, dtype, counted):
    fast = crossover(half=1e-9, exact=1e-9, dense=4e-9, dense_lse=4e-9)
    new_router(costs={"cpu": fast})
    lengths = (60, 100, 61)
    pack = a_pack(lengths, lengths, dtype=dtype)
    got, run = recorded(pack, recipe=Recipe(KeepFraction(0.01)))
    assert counted.count("pack") == 2  # recorded, and again
    assert run.routed_to_dense
    assert run.density == 1.0
    assert run.recipe.keep == KeepFraction(0.01)
    for part in run.parts:
        assert part.backend == "cpu"
        assert part.recipe.keep == KeepAll()
        assert part.recipe.precision == ("half" if dtype == torch.bfloat16 else "exact")
        assert "dense attention in a pack" in part.reason
    dense = attention_varlen(*pack, enable_gqa=True, is_causal=True, backend="dense")
    torch.testing.assert_close(got, dense, rtol=2e-2, atol=2e-2)


def test_dense_attention_is_torchs_before_anything_was_measured(new_router, monkeypatch, counted):
    unknown = replace(crossover(half=1e-12, exact=1e-12), measured=False)
    new_router(costs={"cpu": unknown})
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    _, run = recorded(a_pack((60, 61), (60, 61)))
    assert run.backend == "dense"
    assert "pack" not in counted


def test_a_pack_that_saves_less_than_it_costs_is_left_to_torch():
    call = sparge.engine.check.check_varlen(
        *a_pack((60,), (60,)), is_causal=True, scale=None, enable_gqa=True, causal_align="top_left",
        recipe=Recipe(KeepAll(), precision="exact"), backend="auto", return_lse=False,
    )  # fmt: skip
    assert choose_dense_pack(CPU_BACKEND, FIXED, {0: (call, choose(call))}) == {}
    assert choose_dense_pack(CPU_BACKEND, FIXED, {}) == {}
