"""Calls seen before: remembered by all that matters, and by nothing less."""

from __future__ import annotations

import pytest
import torch

import sparge
from calls import EXACT, tensors
from sparge import KeepAll, Recipe
from sparge.routing import current_router


def answers():
    """How many calls are remembered."""
    return len(current_router().answers)


def test_a_call_is_checked_once(monkeypatch):
    q, k, v = tensors()
    first = sparge.attention(q, k, v)
    assert answers() == 1
    monkeypatch.setattr(
        "sparge.engine.check.check_call", lambda *a, **k: pytest.fail("checked again")
    )
    assert torch.equal(sparge.attention(q.clone(), k, v), first)


@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": True},
        {"scale": 0.3},
        {"causal_align": "bottom_right"},
        {"recipe": EXACT},
        {"recipe": Recipe(KeepAll())},
        {"backend": "reference"},
        {"return_lse": True},
        {"enable_gqa": True},
    ],
    ids=str,
)
def test_every_argument_tells_calls_apart(change):
    q, k, v = tensors()
    sparge.attention(q, k, v)
    with sparge.record() as runs:
        sparge.attention(q, k, v, **change)
    assert answers() == 2
    assert runs[0].backend == change.get("backend", "dense")


def test_what_equals_a_right_argument_is_still_refused():
    q, k, v = tensors()
    sparge.attention(q, k, v, is_causal=True)
    sparge.attention(q, k, v, scale=1)
    with pytest.raises(TypeError, match="is_causal"):
        sparge.attention(q, k, v, is_causal=1)
    with pytest.raises(TypeError, match="scale"):
        sparge.attention(q, k, v, scale=True)


def test_shapes_dtypes_and_gradients_tell_calls_apart():
    q, k, v = tensors()
    sparge.attention(q, k, v)
    sparge.attention(q[:, :, :7], k, v)
    sparge.attention(q.half(), k.half(), v.half())
    assert answers() == 3
    with pytest.raises(ValueError, match="requires grad"):
        sparge.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        sparge.attention(q, k, v)
    with pytest.raises(TypeError, match="one dtype"):
        sparge.attention(q.detach(), k.half(), v)


def test_the_environment_and_the_registry_are_asked_anew(monkeypatch, register):
    q, k, v = tensors()

    def backend():
        with sparge.record() as runs:
            sparge.attention(q, k, v, recipe=EXACT)
        return runs[0].backend

    assert backend() == "dense"
    register("mine")
    assert backend() == "mine"
    monkeypatch.setenv("SPARGE_BACKEND", "reference")
    assert backend() == "reference"
    monkeypatch.delenv("SPARGE_BACKEND")
    assert backend() == "mine"


def test_masks_are_remembered_by_their_shape_and_dtype():
    q, k, v = tensors()
    mask = torch.ones(140, 200, dtype=torch.bool)
    first = sparge.attention(q, k, v, attn_mask=mask)
    mask[:, 10:] = False
    assert not torch.equal(sparge.attention(q, k, v, attn_mask=mask), first)
    assert answers() == 1
    with pytest.raises(ValueError, match="broadcast"):
        sparge.attention(q, k, v, attn_mask=mask[:, :-1])
    with pytest.raises(TypeError, match="int32"):
        sparge.attention(q, k, v, attn_mask=mask.int())
    blocks = torch.ones(2, 4, dtype=torch.bool)
    with sparge.record() as runs:
        sparge.attention(q, k, v, block_mask=blocks)
        sparge.attention(q, k, v, attn_mask=mask)
    assert [run.backend for run in runs] == ["cpu", "dense"]


def test_nobody_can_change_what_is_remembered():
    q, k, v = tensors()
    sparge.explain(q, k, v).rejected.clear()
    assert "reference" in sparge.explain(q, k, v).rejected


def test_it_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr("sparge.routing.router.MOST_ANSWERS", 5)
    q, k, v = tensors()
    for n in range(1, 20):
        sparge.attention(q[:, :, :n], k, v)
    assert 0 < answers() <= 5
