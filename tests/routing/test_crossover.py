"""The cost model: what it counts, and how a call is routed by it before and after its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparge
from calls import BUILT_IN, a_call, only, tensors
from sparge import KeepAll, KeepFraction, KeepMass, Recipe
from sparge.backends.cpu.rates import FEWEST_PAIRS
from sparge.routing import choose, get_backend
from sparge.routing.crossover import (
    CLEARLY,
    Crossover,
    allowed_pairs,
    block_pairs,
)
from sparge.routing.crossover import expected_density as density_of_rows
from sparge.values.backend import DENSE_LSE, DENSE_WAY, UnitCosts, cost_names
from sparge.values.call import diagonal_offset
from sparge.values.tokenmask import EXCLUDED, TokenMask


def model(ours=1e-9, dense=1e-9, lse=7e-9, token=0.0, call=0.0, measured=True):
    """The same for every dtype and head dim."""
    costs = {DENSE_WAY: UnitCosts(0.0, 0.0, dense), DENSE_LSE: UnitCosts(0.0, 0.0, lse)}
    our_cost = UnitCosts(call, token, ours)
    return Crossover(
        {name: costs.get(name.split("/")[2], our_cost) for name in cost_names()}, measured=measured
    )


@pytest.fixture
def use(new_router):
    """Route by a model from now on."""
    return lambda crossover: new_router(costs={"cpu": crossover})


def expected_density(call):
    return density_of_rows(call, get_backend("cpu").cost.unseen_density)


@pytest.fixture
def chosen(use):
    def chosen(crossover, **facts):
        use(crossover)
        return choose(a_call(**facts))

    return chosen


# --- what is counted --------------------------------------------------------------------------

LENGTHS = [(300, 300), (300, 500), (500, 300), (1, 700), (130, 64)]


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("Lq, Lk", LENGTHS)
def test_pairs_are_those_of_the_token_mask(Lq, Lk, align):
    offset = diagonal_offset(Lq, Lk, align)
    call = a_call(Lq=Lq, Lk=Lk, is_causal=True, offset=offset)
    tokens = TokenMask(Lq, Lk, True, offset)
    allowed, _ = tokens.region(0, 0, slice(None), slice(None), torch.device("cpu"))
    assert allowed_pairs(call) == int(allowed.sum())
    assert allowed_pairs(replace(call, is_causal=False)) == Lq * Lk
    # The blocks of the diagonal whole: an estimate, at most half a block beside the count.
    may = tokens.block_kinds(torch.device("cpu"))[0, 0] != EXCLUDED
    whole = int(may.repeat_interleave(128, 0)[:Lq].repeat_interleave(64, 1)[:, :Lk].sum())
    assert allowed_pairs(call) <= block_pairs(call) <= Lq * Lk
    assert abs(block_pairs(call) - whole) <= 64 * Lq


def test_dense_attention_skips_the_upper_half_only_of_a_plain_diagonal():
    costs, square = model(), 2 * 1024 * 1024
    assert costs.predict_dense(a_call(1024)) == pytest.approx(square * 1e-9)
    causal = a_call(1024, is_causal=True)
    assert costs.predict_dense(causal) == pytest.approx(1024 * 1025 * 1e-9)
    assert costs.predict_dense(replace(causal, has_mask=True)) == pytest.approx(square * 1e-9)
    assert costs.predict_dense(replace(causal, return_lse=True)) == pytest.approx(square * 7e-9)
    longer = replace(causal, Lk=2048, offset=1024)
    assert costs.predict_dense(longer) == pytest.approx(2 * square * 1e-9)


def test_ours_pays_for_tokens_for_sampled_rows_and_for_what_is_kept():
    costs = model(ours=1e-9, token=1e-7, call=1e-3)
    call = a_call(1024, Hq=4, Hk=1, recipe=Recipe(KeepFraction(0.5), sample_rows=4))
    pairs, rows = 4 * 1024**2, 4 * 1024 + 2 * 1024
    prepared = 1e-3 + rows * 1e-7 + pairs * 4 / 128 * 1e-9
    assert costs.predict_sparse(call, 0.25) == pytest.approx(prepared + pairs / 4 * 1e-9)
    pooled = replace(call, recipe=Recipe(KeepFraction(0.5), predictor="mean"))
    assert costs.predict_prepare(pooled) == pytest.approx(1e-3 + rows * 1e-7)
    twice = replace(call, B=2)
    assert costs.predict_attend(twice, 1.0) == pytest.approx(2 * pairs * 1e-9)


def test_pooling_pays_for_its_means_and_for_its_entries():
    costs = model(ours=1e-9, token=1e-7, call=1e-3)
    drop = a_call(1024, Hq=4, Hk=1, recipe=Recipe(KeepFraction(0.5)))
    pool = replace(drop, recipe=Recipe(KeepFraction(0.5), skipped="pool", pool_group=16))
    pairs = 4 * 1024**2
    means = costs.predict_prepare(pool) - costs.predict_prepare(drop)
    assert means == pytest.approx(2 * 1024 * 1e-7)
    entries = costs.predict_attend(pool, 0.25, 0.5) - costs.predict_attend(drop, 0.25, 0.5)
    assert entries == pytest.approx(pairs * 0.5 / 16 * 1e-9)
    # With everything kept there is nothing to pool.
    assert costs.predict_attend(pool, 0.5, 0.5) == costs.predict_attend(drop, 0.5, 0.5)


def test_a_plan_whose_entries_make_it_slower_goes_to_dense():
    blocks = torch.ones(8, 16, dtype=torch.bool)
    blocks[:, :2] = False  # 0.875 kept
    plan = sparge.BlockPlan.from_mask(blocks[None, None].expand(1, 2, 8, 16), Lq=1024, Lk=1024)
    costs = model()
    call = replace(a_call(1024), recipe=Recipe(skipped="pool"))
    assert costs.estimate_plan(call, plan).faster
    call = replace(call, recipe=Recipe(skipped="pool", pool_group=4))
    estimate = costs.estimate_plan(call, plan)
    assert not estimate.faster
    assert "dense attention is faster from 72%" in estimate.reason


def test_costs_follow_the_head_dim():
    times = [BUILT_IN.predict_dense(a_call(D=D, Dv=D)) for D in (8, 32, 64, 96, 128, 256)]
    assert times == sorted(times)
    assert times[3] == pytest.approx((times[2] + times[4]) / 2)
    assert times[0] > times[2] * 0.4  # softmax remains
    assert BUILT_IN.predict_dense(a_call(D=64, Dv=128)) == pytest.approx(times[3])


def test_the_density_that_is_expected_before_planning():
    assert expected_density(a_call(recipe=Recipe(KeepAll()))) == 1.0
    assert expected_density(a_call(recipe=Recipe(KeepFraction((0.2, 0.4))))) == pytest.approx(0.3)
    by_length = [expected_density(a_call(L)) for L in (256, 1024, 4096, 65536)]
    assert by_length == sorted(by_length, reverse=True)
    assert by_length[0] == 0.98  # no more of the blocks than of the mass
    assert by_length[-1] == pytest.approx(0.6, abs=0.01)
    assert expected_density(a_call(recipe=Recipe(KeepMass(1.0)))) == 1.0
    assert expected_density(a_call(65536, recipe=Recipe(KeepMass(0.3)))) == 0.3
    assert expected_density(a_call(1024, is_causal=True)) > expected_density(a_call(1024))


# --- before the plan --------------------------------------------------------------------------


def test_the_faster_one_is_taken_and_the_reason_has_both_numbers(chosen):
    recipe = Recipe(KeepFraction(0.5), predictor="mean")
    fast = chosen(model(ours=1e-9), recipe=recipe)
    assert fast.backend == "cpu"
    assert fast.reason == (
        "the fastest that can serve this call: predicted 4.19 ms at density 0.50, dense attention "
        "8.39 ms (measured on this machine)"
    )
    slow = chosen(model(ours=2e-9, measured=False), recipe=recipe)
    assert (slow.backend, slow.routed_to_dense) == ("dense", True)
    assert slow.rejected["cpu"] == (
        "predicted 8.39 ms at density 0.50, dense attention 8.39 ms (built-in estimate, nothing "
        "was measured)"
    )


def test_ours_must_be_clearly_faster(chosen):
    recipe = Recipe(KeepAll())
    assert chosen(model(ours=(CLEARLY - 0.01) * 1e-9), recipe=recipe).backend == "cpu"
    assert chosen(model(ours=(CLEARLY + 0.01) * 1e-9), recipe=recipe).backend == "dense"


def test_an_lse_makes_dense_attention_dear(chosen):
    recipe = Recipe(KeepAll())
    assert chosen(model(ours=2e-9), recipe=recipe).backend == "dense"
    assert chosen(model(ours=2e-9), recipe=recipe, return_lse=True).backend == "cpu"


def test_a_mask_makes_ours_dearer(chosen):
    recipe = Recipe(KeepAll())
    assert chosen(model(ours=0.8e-9), recipe=recipe).backend == "cpu"
    assert chosen(model(ours=0.8e-9), recipe=recipe, has_mask=True).backend == "dense"
    # With a diagonal beside it, dense attention computes what both hide.
    masked = {"has_mask": True, "is_causal": True}
    assert chosen(model(ours=0.8e-9), recipe=recipe, **masked).backend == "cpu"


@pytest.mark.parametrize(
    "facts, why",
    [
        ({"Lq": 1}, "1 queries do not fill a block"),
        ({"Lq": 127, "Lk": 100_000}, "127 queries do not fill a block"),
        ({"Lq": 500, "Lk": 500}, f"500000 query-key pairs are fewer than {FEWEST_PAIRS}"),
        ({"needs_grad": True}, "gradient of dense attention is faster"),
    ],
)
def test_what_goes_dense_without_any_number(chosen, facts, why):
    choice = chosen(model(ours=1e-15), **facts)
    assert (choice.backend, choice.routed_to_dense, choice.estimate) == ("dense", True, None)
    assert why in choice.rejected["cpu"]


# --- after the plan ---------------------------------------------------------------------------


def long_call(recipe, **options):
    q, k, v = tensors(Lq=640, Lk=640)
    with sparge.record() as runs:
        found = sparge.attention(q, k, v, recipe=recipe, **options)
    return (q, k, v), found, only(runs)


def test_a_plan_that_keeps_nearly_all_goes_dense_and_the_record_says_so(use):
    """Expected to keep 0.92, which was worth it; random keys keep all."""
    use(model(ours=0.98e-9))
    recipe = Recipe(KeepMass(0.999999))
    choice = sparge.explain(*tensors(Lq=640, Lk=640), recipe=recipe)
    assert choice.backend == "cpu"
    (q, k, v), out, run = long_call(recipe)
    assert (run.backend, run.routed_to_dense) == ("dense", True)
    assert run.reason == (
        "the plan keeps 100% of the blocks; dense attention is faster from 99% (measured on this "
        "machine)"
    )
    assert run.rejected["cpu"] == run.reason
    assert "dense" not in run.rejected
    assert {"prepare", "predict", "select", "attend"} <= set(run.seconds)
    assert (run.density, run.sparsity) == (1.0, 0.0)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_a_plan_that_keeps_little_stays(use):
    use(model(ours=0.98e-9))
    _, _, run = long_call(Recipe(KeepFraction(0.5)))
    assert (run.backend, run.routed_to_dense) == ("cpu", False)
    assert run.density < 0.7


def test_the_lse_of_a_call_routed_by_its_plan(use):
    use(model(ours=0.98e-9, lse=1e-9))
    (q, k, _), (out, lse), run = long_call(Recipe(KeepMass(0.999999)), return_lse=True)
    assert run.routed_to_dense
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 4, -1))
    assert out.shape == q.shape


def test_a_backend_that_was_asked_for_is_never_left(use, monkeypatch):
    use(model(ours=1.0))
    everything = Recipe(KeepAll())
    assert long_call(everything)[2].backend == "dense"
    assert long_call(everything, backend="cpu")[2].backend == "cpu"
    blocks = torch.ones(5, 10, dtype=torch.bool)
    assert long_call(everything, block_mask=blocks)[2].backend == "cpu"
    monkeypatch.setenv("SPARGE_BACKEND", "cpu")
    assert long_call(everything)[2].backend == "cpu"


def test_the_op_and_varlen_are_routed_alike(use):
    use(model(ours=0.98e-9))
    x = torch.randn(640 + 100, 2, 16, generator=torch.Generator().manual_seed(0))
    cuts = torch.tensor([0, 640, 740])
    recipe = Recipe(KeepFraction(0.5))
    with sparge.record() as runs:
        sparge.attention_varlen(x, x, x, cuts, cuts, recipe=recipe)
        sparge.attention_varlen(x, x, x, cuts, cuts, recipe=Recipe(KeepMass(0.999999)))
    assert [part.backend for part in runs[0].parts] == ["cpu", "dense"]
    assert [part.backend for part in runs[1].parts] == ["dense", "dense"]
    assert "the plan keeps 100%" in runs[1].parts[0].reason
    assert "one" not in runs[1].parts[1].reason


def test_a_compiled_call_is_routed_when_it_runs(use):
    use(model(ours=0.98e-9))
    torch._dynamo.reset()
    f = torch.compile(
        lambda q, k, v, recipe: sparge.attention(q, k, v, recipe=recipe),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = tensors(Lq=640, Lk=640)
    with sparge.record() as runs:
        f(q, k, v, Recipe(KeepFraction(0.5)))
        f(q, k, v, Recipe(KeepMass(0.999999)))
    assert [run.backend for run in runs] == ["cpu", "dense"]
    torch._dynamo.reset()
