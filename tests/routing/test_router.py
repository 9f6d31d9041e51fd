"""The router: choices from explicit facts, its cache, and a router of one's own."""

from __future__ import annotations

import pytest
import torch

import sparge
from calls import FIXED, a_call, fake, tensors
from sparge import KeepFraction, Recipe, Unsupported
from sparge.backends.cpu import CPU_BACKEND
from sparge.routing import Router, backends, current_router, use_router
from sparge.routing.choice import Environment, Numbers, choose_backend

HALF = Recipe(KeepFraction(0.5))
SERVED = {"cpu": None, "dense": None}


def chosen(backend="auto", *, refusals=SERVED, numbers=None, **environment):
    """Of a call that takes two milliseconds, by nothing but these facts."""
    found = Numbers(FIXED, FIXED) if numbers is None else numbers
    return choose_backend(
        a_call(recipe=HALF),
        backend,
        backends=[CPU_BACKEND],
        refusals=refusals,
        numbers={"cpu": found}.__getitem__,
        environment=Environment(**environment),
    )


# --- choosing by facts ------------------------------------------------------------------------


def test_a_choice_follows_from_its_facts(monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", "nonsense")  # nobody reads it
    assert chosen().backend == "cpu"
    assert chosen(backend="dense").backend == "dense"
    refused = {"cpu": "it is a Tuesday", "dense": None}
    assert chosen(refusals=refused).rejected == {"cpu": "it is a Tuesday"}
    assert chosen(refusals=refused).backend == "dense"
    with pytest.raises(Unsupported, match="it is a Tuesday"):
        chosen("cpu", refusals=refused)


def test_the_environment_is_a_fact():
    def forced(name):
        return choose_backend(
            a_call(),
            "auto",
            backends=[CPU_BACKEND],
            refusals=SERVED,
            numbers={}.__getitem__,
            environment=Environment(backend=name),
        )

    assert forced("dense").reason == "asked for by SPARGE_BACKEND=dense"
    assert forced("cpu").backend == "cpu"


def test_numbers_are_a_fact():
    slow = Numbers("nothing is known of it", "nothing is known of it", tried=True)
    assert chosen(numbers=slow).rejected["cpu"].startswith("nothing is known of it; `sparge doctor")
    failed = Numbers(FIXED, FIXED, failure="none left", outdated=True, tried=True)
    assert "calibration failed: none left" in chosen(numbers=failed).reason
    assert chosen(numbers=Numbers(FIXED, FIXED, outdated=True)).provisional
    assert not chosen(numbers=Numbers(FIXED, FIXED, outdated=True), calibrate="0").provisional
    kept = Numbers(FIXED, FIXED, density=0.25)
    assert "at density 0.25 (as this layer kept before)" in chosen(numbers=kept).reason


# --- the cache --------------------------------------------------------------------------------


def test_answers_are_kept_by_the_environment_threads_backends_and_numbers(monkeypatch):
    router, made = Router(costs={"cpu": FIXED}), []

    def ask():
        router.answer("a call", lambda: made.append(1) or len(made))
        return len(made)

    assert [ask(), ask()] == [1, 1]
    for name, value in (
        ("SPARGE_BACKEND", "cpu"),
        ("SPARGE_ISA", "portable"),
        ("SPARGE_CALIBRATE", "0"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            before = len(made)
            assert [ask(), ask()] == [before + 1, before + 1], name
        assert ask() == before + 1
    torch.set_num_threads(2)
    assert ask() == 5
    torch.set_num_threads(1)
    router.register(fake("mine"))
    assert [ask(), ask()] == [6, 6]
    router.unregister("mine")
    assert ask() == 7
    router.adopt(FIXED, "cpu", "cpu")
    assert [ask(), ask()] == [8, 8]


def test_what_cannot_be_hashed_is_not_kept():
    router = Router()
    assert router.answer([], lambda: 1) == 1
    assert router.answers == {}


# --- a router of one's own --------------------------------------------------------------------


def test_a_router_of_ones_own_is_used_inside_the_block_alone():
    outside, names = current_router(), [b.name for b in backends()]
    with use_router(Router([fake("mine"), *backends()])) as inside:
        assert current_router() is inside
        assert sparge.explain(*tensors()).backend == "mine"
    assert current_router() is outside
    assert [b.name for b in backends()] == names
    assert sparge.explain(*tensors()).backend == "dense"


def test_a_backend_that_is_no_backend_or_has_a_taken_name_is_refused():
    with pytest.raises(TypeError, match=r"must be a sparge.Backend, got str"):
        sparge.register_backend("mine")
    for name in ("auto", "dense", "cpu"):
        with pytest.raises(ValueError, match="is taken"):
            sparge.register_backend(fake(name))
