"""All stages in one parallel region: the same bits as stage by stage, whatever is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from oracle import same_bits
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe
from sparge.backends.cpu import CPU_BACKEND, library
from sparge.backends.cpu.stages import run_call
from sparge.engine.check import check_call
from sparge.routing import Router
from sparge.values.call import Inputs
from sparge.values.stages import STAGES, WAITED, KeptLimit, prepare
from sparge.values.tokenmask import TokenMask

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="no native core")


def stage_by_stage(call, inputs, tokens):
    stages = CPU_BACKEND.stages()
    if inputs.attn_mask is not None:
        tokens = replace(tokens, kinds=CPU_BACKEND.block_kinds(tokens))
    prepared = prepare(stages, call, inputs, to_plan=True, to_attend=True)
    mass = stages.predict(call, prepared, tokens) if call.predicts else None
    plan = stages.select(call, prepared, mass, tokens)
    return plan, stages.attend(call, prepared, plan, tokens)


def call_of(inputs, **options):
    return check_call(*inputs[:3], attn_mask=inputs.attn_mask, enable_gqa=True, **options)


@st.composite
def recipes(draw):
    """Of everything that a whole call serves; a recipe refuses fields that it does not use."""
    keeps = [KeepMass(0.6), KeepMass(0.97), KeepFraction(0.3), KeepError(0.05), KeepError(0.004)]
    predictors = [("mean", None), ("mean", 0.4), ("rows", None), ("blend", None)]
    precision = draw(st.sampled_from(["int8", "int8-fast", "half", "exact"]))
    pv_skip = draw(st.sampled_from([None, 3.0]))
    if draw(st.integers(0, 5)) == 0:
        return Recipe(KeepAll(), precision=precision, pv_skip=pv_skip)
    keep = draw(st.sampled_from(keeps))
    if isinstance(keep, KeepError):
        predictors, pv_skip = [("blend", None)], None
    predictor, min_similarity = draw(st.sampled_from(predictors))
    pools = draw(st.sampled_from([{}, {"skipped": "pool"}, {"skipped": "pool", "pool_group": 4}]))
    return Recipe(
        keep,
        predictor=predictor,
        precision=precision,
        min_similarity=min_similarity,
        pv_skip=pv_skip,
        sink_blocks=draw(st.sampled_from([0, 1])),
        **pools,
    )


@pytest.mark.parametrize("isa", library.available())
@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_same_bits_as_stage_by_stage(isa, threads, data):
    draw = data.draw
    B, Hk, group = draw(st.sampled_from([(1, 1, 1), (1, 2, 3), (2, 3, 1)]))
    Lq, Lk = draw(st.sampled_from([(1, 70), (130, 130), (300, 1000), (2100, 65)]))
    D, Dv = draw(st.sampled_from([(16, 16), (40, 24), (64, 64)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    q, k, v = normal(B, Hk * group, Lq, D), normal(B, Hk, Lk, D), normal(B, Hk, Lk, Dv)
    if draw(st.booleans()):
        k[0, 0, Lk // 2], v[-1, -1, 0, 0] = torch.inf, torch.nan
    masks = {
        "none": None,
        "keys": normal(B, 1, 1, Lk) > -1,
        "pairs": normal(1, Hk * group, Lq, Lk) > 0,
        "bias": normal(1, 1, Lq, Lk),
    }
    mask = masks[draw(st.sampled_from(list(masks)))]
    inputs = Inputs(q, k, v, mask)
    facts = {"recipe": draw(recipes()), "is_causal": draw(st.booleans())}
    call = call_of(inputs, **facts)
    tokens = TokenMask(Lq, Lk, call.is_causal, call.offset, mask)
    threads_before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.ENV_ISA, isa)
        torch.set_num_threads(threads)
        try:
            plan, expected = stage_by_stage(call, inputs, tokens)
            found = run_call(call, inputs)
        finally:
            torch.set_num_threads(threads_before)
    assert found.plan() == plan
    assert same_bits(found.attended.out, expected.out)
    assert same_bits(found.attended.lse, expected.lse)
    assert torch.equal(found.attended.pv_skips, expected.pv_skips)


def some_call(recipe, L=700):
    q, k, v = (torch.randn(1, 2, L, 32) for _ in range(3))
    inputs = Inputs(q, k, v)
    call = call_of(inputs, recipe=recipe, is_causal=True)
    return call, inputs


def test_beyond_the_limit_it_is_planned_and_not_attended():
    call, inputs = some_call(Recipe(KeepFraction(0.5)))
    kept = int(run_call(call, inputs).plan().counts.sum())
    over = run_call(call, inputs, limit=KeptLimit(float(kept), 0.0))
    under = run_call(call, inputs, limit=KeptLimit(kept + 0.5, 0.0))
    assert over.attended is None
    assert int(over.plan().counts.sum()) == kept
    assert under.attended is not None
    # Pooled entries cost something, too, as long as anything is skipped.
    pooled = run_call(call, inputs, limit=KeptLimit(kept + 0.5, 0.1))
    assert pooled.attended is None


def test_the_limit_is_where_the_router_turns_to_dense():
    call, inputs = some_call(replace(sparge.DEFAULT, keep=KeepFraction(0.5)))
    router = Router()
    costs = router._crossover("cpu", call)
    limit, plan = costs.kept_limit(call), run_call(call, inputs).plan()
    blocks, allowed = plan.indices.numel(), int(plan.allowed.sum())
    for kept in range(allowed):
        faster = costs.estimate_kept(call, kept, allowed, blocks).faster
        assert faster == (kept + limit.pooled_cost * allowed < limit.most_kept)


def test_seconds_of_all_stages_are_told():
    call, inputs = some_call(Recipe(KeepMass(0.9)))
    seconds = dict(run_call(call, inputs, timed=True).seconds)
    assert seconds.pop(WAITED) >= 0
    assert tuple(seconds) == STAGES
    assert all(x > 0 for x in seconds.values())
    assert run_call(call, inputs).seconds == {}


def test_the_record_divides_the_time_of_the_call(monkeypatch):
    q, k, v = (torch.randn(1, 2, 700, 32) for _ in range(3))
    with sparge.record() as runs:
        sparge.attention(q, k, v, backend="cpu")
    seconds = dict(runs[0].seconds)
    assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
    assert tuple(seconds) == STAGES


@pytest.mark.parametrize("keep", [KeepMass(0.9), KeepError(0.05), KeepAll()], ids=str)
def test_every_way_of_a_call_is_one_native_call(monkeypatch, keep):
    run, called = library.run, []

    def watched(fields):
        called.append("run")
        return run(fields)

    monkeypatch.setattr(library, "run", watched)
    q, k, v = (torch.randn(1, 2, 300, 32) for _ in range(3))
    options = {"recipe": Recipe(keep, skipped="drop"), "backend": "cpu"}
    sparge.attention(q, k, v, attn_mask=torch.rand(300, 300) < 0.7, **options)
    assert called == ["run"]
    plan = sparge.make_plan(q, k, value=v, **options)
    sparge.attend(q, k, v, plan, **options)
    assert called == ["run"] * 3
    kept = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    every = {"recipe": Recipe(KeepAll()), "backend": "cpu"}
    sparge.attention(q, k, v, block_mask=kept, **every)
    assert called == ["run"] * 4
    cuts = torch.tensor([0, 100, 300])
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    sparge.attention_varlen(*packed, cuts, cuts, **options)
    assert called == ["run"] * 5


def test_a_record_says_when_the_machine_was_busy():
    q, k, v = (torch.randn(1, 2, 700, 32) for _ in range(3))
    with sparge.record() as runs:
        sparge.attention(q, k, v, backend="cpu")
    total = runs[0].seconds["total"]
    assert 0.0 <= runs[0].waited <= total
    quiet, busy = (replace(runs[0], waited=share * total) for share in (0.01, 0.5))
    assert not quiet.is_busy
    assert "busy" not in str(quiet)
    assert busy.is_busy
    assert "waiting for threads: the machine is busy" in str(busy)
    assert busy.to_dict()["is_busy"]
