"""`KeepError` around the plan: recipes, refusals, JSON, ops and graphs, varlen, routing."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

import sparge
from calls import BUILT_IN
from oracle import clustered_qkv
from recipes import quick
from sparge import KeepError, KeepMass, Recipe
from sparge.routing.crossover import expected_density
from sparge.values.call import Call

errors = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)


@quick
@given(error=errors | st.lists(errors, min_size=1, max_size=4).map(tuple))
def test_json_and_back(error):
    recipe = Recipe(KeepError(error))
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert json.loads(recipe.to_json())["keep"] == {
        "error": list(error) if isinstance(error, tuple) else error
    }


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 2, math.nan, math.inf, (0.1, 0.0)])
def test_errors_that_are_none(bad):
    with pytest.raises(ValueError, match=r"max_error must be greater than 0 .*KeepAll\(\)"):
        KeepError(bad)


@pytest.mark.parametrize("bad", ["0.1", True, {0.1}, object()])
def test_errors_that_are_no_numbers(bad):
    with pytest.raises(TypeError, match="max_error must be a number"):
        KeepError(bad)


@pytest.mark.parametrize("predictor", ["mean", "rows"])
def test_other_predictors_are_refused(predictor):
    with pytest.raises(ValueError, match=f"with KeepError, got '{predictor}'; .*KeepMass"):
        Recipe(KeepError(0.1), predictor=predictor)


def test_a_plan_needs_the_value(no_work):
    q, k, v = clustered_qkv(Hq=2, Hk=1, L=200)
    recipe = Recipe(KeepError(0.1))
    with pytest.raises(ValueError, match=r"needs the value; give make_plan\(..., value=value\)"):
        sparge.make_plan(q, k, enable_gqa=True, recipe=recipe)
    for bad, says in (
        (v[:, :, :100], "same heads and length"),
        (v.double(), "one dtype"),
        (v[0], r"value must be \[B, H, L, D\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            sparge.make_plan(q, k, value=bad, enable_gqa=True, recipe=recipe)
    with pytest.raises(TypeError, match="value must be a tensor"):
        sparge.make_plan(q, k, value=3, enable_gqa=True, recipe=recipe)


def test_one_error_for_each_head():
    q, k, v = clustered_qkv(Hq=2, Hk=1, L=200)
    with pytest.raises(ValueError, match="keep has 3 numbers for 2 query heads"):
        sparge.attention(q, k, v, enable_gqa=True, recipe=Recipe(KeepError((0.1, 0.2, 0.3))))


def test_ops_and_graphs(backend):
    q, k, v = clustered_qkv(Hq=4, Hk=2, L=500, noise=0.8)
    recipe = Recipe(KeepError(0.1), precision="exact")
    facts = (True, 0, 0.25, recipe.to_json())
    found = opcheck(torch.ops.sparge.plan, (q, k, None, None, *facts, backend, v))
    assert set(found.values()) == {"SUCCESS"}
    torch._dynamo.reset()
    options = {"is_causal": True, "enable_gqa": True, "recipe": recipe, "backend": backend}

    def f(q, k, v):
        plan = sparge.make_plan(q, k, value=v, **options)
        return plan.counts, sparge.attention(q, k, v, **options)

    with sparge.record() as eager:
        truth = f(q, k, v)
    with sparge.record() as traced:
        counts, out = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
    torch._dynamo.reset()
    assert torch.equal(counts, truth[0])
    assert torch.equal(out, truth[1])
    assert [run.error_by_head for run in traced] == [run.error_by_head for run in eager]
    assert len(traced[0].error_by_head) == 4


def test_gradients_flow_through_the_plan_as_a_constant(backend):
    q, k, v = (x.requires_grad_() for x in clustered_qkv(Hq=2, L=300))
    recipe = Recipe(KeepError(0.1), precision="exact")
    sparge.attention(q, k, v, recipe=recipe, backend=backend).sum().backward()
    assert torch.isfinite(v.grad).all()
    plan = sparge.make_plan(q, k, value=v, recipe=recipe, backend=backend)
    mine, w = q.detach().requires_grad_(), v.detach().requires_grad_()
    out, _ = sparge.attend(mine, k.detach(), w, plan, recipe=recipe, backend=backend)
    out.sum().backward()
    assert torch.equal(w.grad, v.grad)


def test_every_sequence_of_a_pack_measures_its_own(backend):
    q, k, v = clustered_qkv(Hq=2, L=700, noise=0.8)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    cuts = torch.tensor([0, 300, 700])
    recipe = Recipe(KeepError(0.1), precision="exact")
    with sparge.record() as runs:
        sparge.attention_varlen(*packed, cuts, cuts, recipe=recipe, backend=backend)
        for start, stop in ((0, 300), (300, 700)):
            parts = [x[:, :, start:stop] for x in (q, k, v)]
            sparge.attention(*parts, recipe=recipe, backend=backend)
    whole, *alone = runs
    assert whole.error_by_head == tuple(map(max, *(run.error_by_head for run in alone)))
    assert [part.error_by_head for part in whole.parts] == [run.error_by_head for run in alone]


def test_the_batch_is_known_by_its_worst(backend):
    q, k, v = clustered_qkv(B=2, Hq=2, L=500, noise=0.8)
    recipe = Recipe(KeepError(0.1), precision="exact")
    options = {"recipe": recipe, "backend": backend}
    with sparge.record() as runs:
        sparge.attention(q, k, v, **options)
        for b in range(2):
            one = slice(b, b + 1)
            sparge.attention(q[one], k[one], v[one], **options)
    both, *alone = (run.error_by_head for run in runs)
    assert both == tuple(map(max, *alone))
    assert json.loads(json.dumps(runs[0].to_dict(), default=str))["error_by_head"] == list(both)


def test_a_plan_keeps_its_error_but_does_not_save_it(tmp_path):
    q, k, v = clustered_qkv(Hq=2, L=500, noise=0.8)
    recipe = Recipe(KeepError(0.1), precision="exact")
    with sparge.record() as runs:
        plan = sparge.make_plan(q, k, value=v, recipe=recipe)
    assert tuple(plan.error[0].tolist()) == runs[0].error_by_head
    assert plan.error.shape == (1, 2)
    assert torch.equal(plan.to("cpu").error, plan.error)
    plan.save(tmp_path / "plan.safetensors")
    loaded = sparge.BlockPlan.load(tmp_path / "plan.safetensors")
    assert loaded.error is None
    assert loaded == plan


def test_routing_expects_the_mass_that_it_starts_from():
    sizes = {"B": 1, "Hq": 2, "Hk": 2, "Lq": 8192, "Lk": 8192, "D": 64, "Dv": 64}
    asked = {**sizes, "dtype": torch.float32, "device": "cpu", "scale": 0.125}
    by_error = Call(**asked, recipe=Recipe(KeepError(0.05)))
    by_mass = Call(**asked, recipe=Recipe(KeepMass(0.95)))
    assert expected_density(by_error, 0.6) == expected_density(by_mass, 0.6)
    more = BUILT_IN.predict_prepare(by_error) - BUILT_IN.predict_prepare(by_mass)
    assert 0 < more < 0.08 * BUILT_IN.predict_dense(by_mass)
