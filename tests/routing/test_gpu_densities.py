"""What layers keep on a card: expected, learnt from their calls without waiting, and chosen by."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import gpus
from gpus import a_4090, an_h100, compared, pretend
from sparge import KeepFraction, KeepMass, Recipe
from sparge.backends.triton.rates import RATES
from sparge.routing import Choice, choose, current_router
from sparge.routing import densities as densities_module
from sparge.routing.crossover import expected_density
from sparge.routing.densities import EVERY, MOST_LAYERS, Densities, counts_later
from sparge.support.accelerator import KNOWN, TorchAccelerator
from sparge.values.backend import Estimate


def gpu_call(L=131072, **facts):
    return gpus.gpu_call(L, **facts)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")


@pytest.fixture
def h100(monkeypatch):
    """By the estimate, DEFAULT at 128k pays below a density of about 0.48 there."""
    pretend(monkeypatch, an_h100())


def expected(call):
    return expected_density(call, RATES.unseen_density)


def learn(call, kept, allowed):
    current_router().learn("triton", call, kept, allowed)


def after(call, plan):
    """As the engine asks once there is a plan."""
    choice = Choice("triton", "", {}, estimate=Estimate(True, "fast"))
    assert current_router().choose_after_plan(plan, call, choice) is choice


# --- the store --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "L, measured", [(2048, 0.617), (4096, 0.496), (8192, 0.352), (32768, 0.357)]
)
def test_an_unseen_layer_is_expected_a_little_above_what_was_measured(L, measured):
    """Measured: the default recipe on SmolLM2 and, at 32k, on synthetic text (docs)."""
    assert measured < expected(gpu_call(L)) < measured + 0.13


def test_recipes_that_say_what_they_keep_are_believed():
    assert expected(gpu_call(recipe=Recipe(KeepFraction(0.2)))) == pytest.approx(0.2)
    assert expected(gpu_call(recipe=Recipe(KeepMass(0.3)))) == pytest.approx(0.3)


def test_what_a_layer_kept_is_expected_of_it_alone():
    found, call = Densities(), gpu_call(label="layers.3#1")
    assert found.learnt(call) is None
    assert found.learn(call, 30, 120)
    assert found.learnt(call) == 0.25
    assert found.learnt(replace(call, Lq=150000, Lk=150000)) == 0.25, "up to a power of two"
    for other in (
        replace(call, label="layers.4#2"),
        replace(call, Lq=8192, Lk=8192),
        replace(call, recipe=Recipe()),
    ):
        assert found.learnt(other) is None
    assert not found.learn(call, 0, 0), "a mask that hides everything says nothing"


def test_small_changes_change_nothing():
    found, call = Densities(), gpu_call()
    found.learn(call, 300, 1000)
    for kept in (320, 280, 330, 270, 340):
        assert not found.learn(call, kept, 1000)
        assert found.learnt(call) == 0.3
    changes = [found.learn(call, 600, 1000) for _ in range(12)]
    assert 2 <= sum(changes) <= 6
    assert found.learnt(call) == pytest.approx(0.6, abs=0.06)


def test_calls_are_looked_at_seldom():
    found, call = Densities(), gpu_call()
    looked = [n for n in range(1, 3 * EVERY + 1) if found.due(call)]
    assert looked == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert found.due(replace(call, label="another"))


def test_the_store_does_not_grow_without_end():
    found = Densities()
    for n in range(MOST_LAYERS + 10):
        found.learn(gpu_call(label=str(n)), 1, 2)
    assert len(found._layers) <= MOST_LAYERS
    assert found.learnt(gpu_call(label=str(MOST_LAYERS + 9))) == 0.5


def test_threads_may_learn_at_once():
    found, calls = Densities(), [gpu_call(label=str(n)) for n in range(4)]

    def work(n):
        for i in range(200):
            found.learn(calls[(n + i) % 4], 1, 4)
            found.due(calls[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [found.learnt(call) for call in calls] == [0.25] * 4
    assert {layer.calls for layer in found._layers.values()} == {200}


# --- choosing ---------------------------------------------------------------------------------


def test_a_layer_that_keeps_too_much_goes_dense_and_others_stay(h100):
    dense, sparse = gpu_call(label="a#1"), gpu_call(label="b#2")
    assert [choose(call).backend for call in (dense, sparse)] == ["triton", "triton"]
    router = current_router()
    before = router.answer("a call", lambda: choose(dense))
    learn(dense, 80, 100)
    made_again = router.answer("a call", lambda: choose(dense))
    assert made_again is not before, "cached choices are made again"
    choice = choose(dense)
    assert choice.backend == "dense"
    assert "at density 0.80 (as this layer kept before)" in choice.rejected["triton"]
    assert choose(sparse).backend == "triton"
    learn(sparse, 10, 100)
    assert router.answer("a call", lambda: choose(dense)) is made_again, "the same choice"


def test_a_layer_that_was_expected_to_keep_much_may_turn_out_sparse(monkeypatch):
    pretend(monkeypatch, an_h100())
    call = gpu_call(16384, label="a#1")
    assert choose(call).backend == "dense"
    learn(call, 15, 100)  # by a run with backend="triton"
    assert choose(call).backend == "triton"


def test_a_density_that_sways_around_the_limit_does_not_choose_again_and_again(h100):
    call = gpu_call()
    router, made = current_router(), []
    for n in range(100):
        router.answer("a call", lambda: made.append(choose(call)) or made[-1])
        learn(call, 40 + 5 * (n % 2), 100)
    assert len(made) <= 2


# --- reading ----------------------------------------------------------------------------------

ON_CARD = SimpleNamespace(counts=SimpleNamespace(device=torch.device("cuda:0")))


@pytest.fixture
def card(monkeypatch):
    """A card whose sums are on their way until `card.here` is true."""
    pretend(monkeypatch, an_h100())
    card = SimpleNamespace(here=False, counts=(90, 100), looked=0, asked=0)

    def later(plan):
        card.looked += 1

        def arrived():
            card.asked += 1
            return card.counts if card.here else None

        return arrived

    monkeypatch.setattr(densities_module, "counts_later", later)
    return card


def test_a_call_does_not_wait_for_what_it_keeps(card):
    call = gpu_call()
    choice = choose(call)
    assert current_router().choose_after_plan(ON_CARD, call, choice) is choice
    assert (card.looked, card.asked) == (1, 0)
    assert choose(call).backend == "triton", "not yet there"
    card.here = True
    assert current_router().choose_after_plan(ON_CARD, call, choice) is choice
    assert choose(call).backend == "dense"


def test_nothing_is_asked_or_sent_inside_a_capture(card, monkeypatch):
    """Asking for an event would end the capture."""
    call = gpu_call()
    after(call, ON_CARD)
    asked = card.asked
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(4):
            after(call, ON_CARD)
            compared(call)
    assert (card.looked, card.asked) == (1, asked)
    after(call, ON_CARD)
    assert (card.looked, card.asked) == (2, asked + 1)


def test_plans_of_the_processor_are_not_looked_at(card):
    on_host = SimpleNamespace(counts=torch.ones(1, 2, 3))
    after(gpu_call(), on_host)
    assert card.looked == 0


def test_no_call_fails_because_counts_cannot_be_read(monkeypatch):
    pretend(monkeypatch, a_4090())

    def fail(plan):
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(densities_module, "counts_later", fail)
    after(gpu_call(), ON_CARD)
    monkeypatch.setattr(densities_module, "counts_later", None)
    for _ in range(3):
        after(gpu_call(), ON_CARD)
    assert choose(gpu_call()).backend == "triton"


def test_sums_are_copied_behind_the_kernels(monkeypatch):
    """The device's module is pretended; the sums are real."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self, stream):
            happened.append("record")

        def synchronize(self):
            assert happened.count("query") > 1, "it would wait"

        def query(self):
            happened.append("query")
            return happened.count("query") > 1

    module = SimpleNamespace(Event=Event, current_stream=lambda device: None)
    empty, pinned = torch.empty, []

    def unpinned(*args, pin_memory=False, **more):
        pinned.append(pin_memory)
        return empty(*args, **more)

    monkeypatch.setitem(KNOWN, "cpu", TorchAccelerator(module))
    monkeypatch.setattr(torch, "empty", unpinned)
    counts = torch.tensor([[[1, 2], [3, 4]]], dtype=torch.int32)
    arrived = counts_later(SimpleNamespace(counts=counts, allowed=2 * counts))
    assert (happened, pinned) == (["record"], [True])
    assert arrived() is None
    assert arrived() == (10, 20)
