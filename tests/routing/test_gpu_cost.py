"""The GPU's cost model: its estimate, when it answers without numbers, and its calibration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import gpus
from calls import fake
from gpus import compared, pretend, properties, tiny_rates
from sparge import KeepAll, KeepFraction, Recipe, Unsupported
from sparge.backends.cpu import CPU_BACKEND
from sparge.backends.reference import REFERENCE
from sparge.backends.triton.architectures import TABLE
from sparge.backends.triton.rates import THROUGHPUTS, Card, card_of, roofline
from sparge.routing import Router, choose, cost_file, current_router
from sparge.routing.calibration import measure
from sparge.routing.crossover import Crossover
from sparge.values.backend import (
    DTYPES,
    ESTIMATED,
    HEAD_DIMS,
    MEASURED,
    UnitCosts,
    cost_names,
)

FEW = Recipe(KeepFraction(0.2))
gpu_call = partial(gpus.gpu_call, recipe=FEW)
ADA = Card("L40S", "sm_89", 142, 2.52e9, 8.6e11)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """No call measures, but in tests/routing/test_gpu_first_call.py."""
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")


@pytest.fixture
def ada(monkeypatch):
    pretend(monkeypatch, properties())


# --- the estimate -----------------------------------------------------------------------------


def test_every_throughput_is_of_an_architecture_that_is_served():
    assert set(THROUGHPUTS) <= set(TABLE)
    for name, rates in THROUGHPUTS.items():
        assert rates.source
        assert (rates.fp8 > 0) == (TABLE[name].fp8 is not None), name
        assert rates.dense_fp32 < rates.half


def test_what_torch_tells_of_a_card(monkeypatch):
    pretend(monkeypatch, properties("L40S"), properties(gcnArchName="gfx942:sramecc+:xnack-"))
    found = card_of("cuda")
    assert (found.name, found.architecture, found.processors) == ("L40S", "sm_89", 142)
    assert found.clock == pytest.approx(2.52e9)
    assert found.bandwidth == pytest.approx(864e9, rel=1e-3)
    assert card_of("cuda", 1).architecture == "gfx942"


@pytest.mark.parametrize("name", THROUGHPUTS)
def test_dense_attention_is_favoured_on_every_architecture(name):
    """Per pair and in 16 bits, where most calls are: with a name that is not known, ours is never
    assumed to be faster, but where both of its products have twice the rate."""
    found = roofline(replace(ADA, architecture=name))
    assert list(found) == cost_names()
    for D in (64, 128):
        dense = found[f"bf16/{D}/dense"].element
        for way in ("int8", "half", "exact"):
            assert found[f"bf16/{D}/{way}"].element > dense, way
        assert found[f"bf16/{D}/int8-fast"].element > 0.85 * dense
        assert found[f"bf16/{D}/int8"].call > 10 * found[f"bf16/{D}/dense"].call


def test_the_peak_is_that_of_the_data_sheet():
    """362 TFLOP/s in 16 bits for an L40S; dense attention is given 0.7 of it."""
    found = roofline(ADA)
    flops = 4 * 128 / found["fp16/128/dense"].element
    assert flops == pytest.approx(0.7 * 362e12, rel=0.02)


def test_fp32_and_an_lse_cost_dense_attention_what_torch_does_there():
    costs = roofline(Card("A100", "sm_80", 108, 1.41e9, 1.55e12))
    # Three TF32 products instead of one in 16 bits.
    assert costs["fp32/128/dense"].element == pytest.approx(6 * costs["bf16/128/dense"].element)
    assert costs["bf16/128/dense+lse"].element > 40 / 1.55e12
    assert costs["fp32/128/exact"].element > costs["fp32/128/dense"].element


@pytest.mark.parametrize(
    "card, why",
    [
        (replace(ADA, architecture="sm_75"), "the throughput of L40S (sm_75) is not known here"),
        (replace(ADA, architecture=""), "(unknown)"),
        (replace(ADA, clock=0.0), "torch does not tell the clocks and the memory of L40S"),
        (replace(ADA, bandwidth=0.0), "torch does not tell"),
    ],
)
def test_a_card_that_is_not_known_has_no_estimate(card, why):
    assert why in roofline(card)


# --- choosing ---------------------------------------------------------------------------------


def test_long_calls_that_keep_little_are_predicted_to_be_faster(ada):
    found = compared(gpu_call())
    assert (found.faster, found.source, found.provisional) == (True, ESTIMATED, False)
    assert "roofline estimate, nothing was measured on this card" in found.reason
    assert not compared(gpu_call(512)).faster, "launches take longer than dense attention"
    assert not compared(gpu_call(recipe=Recipe(KeepAll()))).faster


@pytest.mark.parametrize(
    "facts, faster, why",
    [
        ({"needs_grad": True}, False, "gradient of dense attention is faster"),
        ({"device": "cpu"}, False, "interpreter runs it on the cpu"),
        ({"Lq": 127}, False, "127 queries do not fill a block"),
    ],
)
def test_what_needs_no_number(facts, faster, why):
    found = compared(gpu_call(**facts))
    assert (found.faster, found.source) == (faster, "")
    assert why in found.reason


def test_a_graph_decides_when_it_runs(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert compared(gpu_call()).faster
    assert not compared(gpu_call(needs_grad=True)).faster


def test_an_unknown_card_runs_dense_attention_and_says_what_to_do(monkeypatch):
    pretend(monkeypatch, properties("Old GPU", 7, 0))
    found = compared(gpu_call())
    assert not found.faster
    assert "Old GPU (sm_70) is not known here; `sparge doctor --calibrate` measures" in found.reason


def test_choosing_looks_at_the_card_once(ada, monkeypatch):
    compared(gpu_call())
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    monkeypatch.setattr(cost_file, "read", None)
    assert compared(gpu_call(16384)).faster


def test_auto_takes_it(ada):
    choice = choose(gpu_call())
    assert (choice.backend, choice.estimate.source) == ("triton", ESTIMATED)
    dense = choose(gpu_call(recipe=Recipe(KeepAll())))
    assert (dense.backend, dense.routed_to_dense) == ("dense", True)
    assert "roofline estimate" in dense.rejected["triton"]


# --- measured numbers -------------------------------------------------------------------------


def adopt(ours, dense=1e-12, left_out=(), router=None, **key):
    """Measured numbers of the card, from now on."""
    unit_costs = {
        name: UnitCosts(0.0, 0.0, dense if "dense" in name else ours)
        for name in cost_names()
        if not any(words in name for words in left_out)
    }
    router = router or current_router()
    found = Crossover(
        unit_costs, router.key("triton", "cuda") | key, date="2026-01-01", measured=True
    )
    return router.adopt(found, "triton", "cuda")


def test_measured_numbers_replace_the_estimate_here_and_in_later_processes(ada):
    everything = gpu_call(recipe=Recipe(KeepAll()))
    router = current_router()
    assert router.answer("a call", lambda: choose(everything)).backend == "dense"
    assert adopt(ours=5e-13) == ""
    assert router.answer("a call", lambda: choose(everything)).backend == "triton"
    for each in (router, Router()):
        found = compared(everything, each)
        assert (found.faster, found.source, found.provisional) == (True, MEASURED, False)


def test_numbers_of_another_card_are_not_used(ada):
    adopt(ours=5e-13, device="Other GPU")
    assert compared(gpu_call(recipe=Recipe(KeepAll())), Router()).source == ESTIMATED


def test_what_was_not_measured_is_estimated(ada):
    adopt(5e-13, left_out=["int8-fast", "fp32"])
    router = Router()  # reads the file
    assert compared(gpu_call(), router).source == MEASURED
    fast = compared(gpu_call(recipe=replace(FEW, precision="int8-fast")), router)
    assert fast.source == ESTIMATED
    assert compared(gpu_call(dtype=torch.float32), router).source == ESTIMATED


def test_numbers_are_added_to_those_of_earlier_measurements(ada):
    adopt(5e-13, left_out=["fp16", "fp32"])
    adopt(4e-13, left_out=["bf16", "fp32"], router=Router())  # of another process
    adopt(3e-13, left_out=["bf16", "fp16"])
    for router in (current_router(), Router()):
        costs = router.crossover("triton", "cuda").costs
        assert sorted(costs) == sorted(cost_names())
        ours = [costs[f"{dtype}/128/int8"].element for dtype in ("bf16", "fp16", "fp32")]
        assert ours == [5e-13, 4e-13, 3e-13]


def test_one_head_dim_is_enough_for_calls_that_have_it(ada):
    adopt(5e-13, left_out=["/64/"])
    assert compared(gpu_call(D=128, Dv=128)).source == MEASURED
    assert compared(gpu_call(D=96, Dv=96)).source == ESTIMATED


def test_measuring_fits_the_trials(ada, new_router):
    """On the processor, by a clock of our own: whatever is timed took a millisecond."""
    turns = []

    def timed(work):
        turns.append(1)
        return 1e-3, work()

    # The key is the card's; the trials run where it is said.
    tiny = replace(CPU_BACKEND, cost=tiny_rates(timer=timed))
    router = new_router(measure=lambda backend, place: measure(tiny, place))
    found = router.measure("triton", "cuda")
    assert found.measured
    assert found.key == router.key("triton", "cuda")
    assert list(found.costs) == cost_names()
    # Dense attention is timed once, ours twice: before attention and in it.
    assert found.costs["fp32/64/dense"].element == pytest.approx(1e-3 / 256**2)
    ours = found.costs["fp32/64/int8"]
    assert ours.element > 1e-3 / 256**2, "some pairs were skipped"
    assert ours.token == 0.0
    assert cost_file.write(found) == ""
    assert Router().crossover("triton", "cuda") == found
    # Two rounds, of which the first compiles; 4 precisions at 2 lengths, and 3 times dense.
    assert len(turns) == 2 * len(DTYPES) * len(HEAD_DIMS) * (2 * 4 * 2 + 3)


def test_only_what_is_served_is_measured():
    def refusal(host, call):
        fp32_half = call.dtype == torch.float32 and call.recipe.precision == "half"
        return None if fp32_half else "no"

    found = measure(replace(REFERENCE, refusal=refusal, cost=tiny_rates()), ("cpu", 0))
    ours = {name for name in found.costs if "dense" not in name}
    assert ours == {"fp32/64/half", "fp32/128/half"}
    assert all(cost.element > 0 for cost in found.costs.values()), "by the real clock"
    nothing = replace(fake(refusal=lambda host, call: "needs a full moon"), cost=tiny_rates())
    with pytest.raises(Unsupported, match="needs a full moon"):
        measure(nothing, ("cpu", 0))
