"""Which backend a call gets, and why."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import sparge
from calls import EXACT, HALF, block_mask, fake, only, tensors
from sparge import Recipe, Unsupported
from sparge.routing import backends, choose, host, unregister_backend
from sparge.values.backend import Estimate, FixedCost

NO_GPU = "it runs on GPUs (cuda, xpu), and the tensors are on cpu"

# --- choosing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "reference", "dense"])
def test_an_explicit_backend_is_obeyed(name):
    q, k, v = tensors()
    choice = sparge.explain(q, k, v, backend=name)
    assert choice.backend == name
    assert choice.reason == f"asked for by backend='{name}'"
    assert not choice.routed_to_dense
    with sparge.record() as runs:
        sparge.attention(q, k, v, backend=name)
    assert only(runs).backend == name
    assert not only(runs).routed_to_dense


def test_the_backends_compute_different_things():
    q, k, v = tensors()
    sparse = sparge.attention(q, k, v, recipe=EXACT, backend="reference")
    dense = sparge.attention(q, k, v, recipe=EXACT, backend="dense")
    assert not torch.allclose(sparse, dense, atol=1e-2)


def test_unknown_names_are_refused_with_what_exists(register):
    register("mine")
    for call in (sparge.attention, sparge.explain):
        there = r"backend='cuda'.*auto, mine, triton, cpu, reference, dense"
        with pytest.raises(ValueError, match=there):
            call(*tensors(), backend="cuda")
    with pytest.raises(ValueError, match=r"backend='cuda'.*auto, mine, triton, cpu, reference"):
        sparge.make_plan(*tensors()[:2], backend="cuda")


def test_the_environment_forces_a_backend(monkeypatch):
    q, k, v = tensors()
    monkeypatch.setenv("SPARGE_BACKEND", "reference")
    choice = sparge.explain(q, k, v)
    assert (choice.backend, choice.reason) == ("reference", "asked for by SPARGE_BACKEND=reference")
    with sparge.record() as runs:
        got = sparge.attention(q, k, v)
    assert only(runs).backend == "reference"
    assert "SPARGE_BACKEND=reference" in only(runs).reason
    monkeypatch.delenv("SPARGE_BACKEND")
    assert torch.equal(got, sparge.attention(q, k, v, backend="reference"))
    assert not torch.equal(got, sparge.attention(q, k, v))


@pytest.mark.parametrize("value", ["", "auto"])
def test_an_environment_that_asks_for_nothing(monkeypatch, value):
    monkeypatch.setenv("SPARGE_BACKEND", value)
    assert sparge.explain(*tensors()).routed_to_dense


def test_the_environment_never_falls_back(monkeypatch, register):
    register("picky", refusal=lambda h, c: "it is a Tuesday")
    monkeypatch.setenv("SPARGE_BACKEND", "dense")
    for call in (sparge.attention, sparge.explain):
        with sparge.record() as runs, pytest.raises(Unsupported) as caught:
            call(*tensors(), block_mask=block_mask())
        assert runs == []
        assert "SPARGE_BACKEND=dense" in str(caught.value)
        assert set(caught.value.reasons) == {"picky", "triton", "cpu", "reference", "dense"}
        assert caught.value.reasons["picky"] == "it is a Tuesday"
        assert "was not asked" in caught.value.reasons["reference"]
        assert "block mask" in caught.value.reasons["dense"]
        for name, reason in caught.value.reasons.items():
            assert f"{name}: {reason}" in str(caught.value)


def test_an_unknown_name_in_the_environment(monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", "cuda")
    with pytest.raises(
        ValueError, match=r"SPARGE_BACKEND=cuda.*auto, triton, cpu, reference, dense"
    ):
        sparge.attention(*tensors())


def test_the_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", "dense")
    choice = sparge.explain(*tensors(), backend="reference")
    assert (choice.backend, choice.reason) == ("reference", "asked for by backend='reference'")
    monkeypatch.setenv("SPARGE_BACKEND", "nonsense")
    assert sparge.explain(*tensors(), backend="dense").backend == "dense"


@pytest.mark.parametrize("by_environment", [False, True])
def test_dense_attention_has_no_single_stages(monkeypatch, register, by_environment):
    register("picky", refusal=lambda h, c: "it is a Tuesday")
    q, k, v = tensors()
    plan = sparge.make_plan(q, k, backend="reference")
    asked = {} if by_environment else {"backend": "dense"}
    if by_environment:
        monkeypatch.setenv("SPARGE_BACKEND", "dense")
    for call in (
        lambda: sparge.make_plan(q, k, **asked),
        lambda: sparge.attend(q, k, v, plan, **asked),
    ):
        with pytest.raises(Unsupported, match="no plan and no stages") as caught:
            call()
        assert set(caught.value.reasons) == {"picky", "triton", "cpu", "reference", "dense"}


def test_auto_routes_to_dense_and_says_why():
    q, k, v = tensors()
    choice = sparge.explain(q, k, v)
    assert choice.backend == "dense"
    assert choice.routed_to_dense
    assert "written to be read" in choice.rejected["reference"]
    with sparge.record() as runs:
        out = sparge.attention(q, k, v)
    run = only(runs)
    assert (run.backend, run.reason, run.rejected) == (
        "dense",
        choice.reason,
        dict(choice.rejected),
    )
    assert run.routed_to_dense
    assert (run.density, run.pv_skipped, run.sparsity) == (1.0, 0.0, 0.0)
    assert run.kept == run.allowed == 2 * 2 * 4
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


def test_auto_with_a_block_mask_runs_a_sparse_backend():
    q, k, v = tensors()
    mask = block_mask()
    choice = sparge.explain(q, k, v, block_mask=mask)
    assert choice.backend == "cpu"
    assert "block mask" in choice.rejected["dense"]
    recipe = Recipe(precision="exact")
    with sparge.record() as runs:
        out = sparge.attention(q, k, v, block_mask=mask, recipe=recipe)
    assert only(runs).backend == "cpu"
    assert not only(runs).routed_to_dense
    assert only(runs).density == 7 / 8
    pairs = mask.repeat_interleave(128, 0)[:140].repeat_interleave(64, 1)[:, :200]
    want = F.scaled_dot_product_attention(q, k, v, pairs)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_a_registered_backend_is_picked_by_auto(register):
    register("fake")
    q, k, v = tensors()
    choice = sparge.explain(q, k, v)
    assert choice.backend == "fake"
    assert not choice.routed_to_dense
    slower = dict.fromkeys(("cpu", "reference", "dense"), "slower than fake")
    assert choice.rejected == {"triton": NO_GPU, **slower}
    with sparge.record() as runs:
        got = sparge.attention(q, k, v)
        sparge.attend(q, k, v, sparge.make_plan(q, k))
    assert [run.backend for run in runs] == ["fake"] * 3
    assert [run.isa for run in runs] == ["fake-isa"] * 3
    assert torch.equal(got, sparge.attention(q, k, v, backend="reference"))


def test_the_last_registered_is_asked_first(register):
    register("first")
    register("second")
    assert sparge.explain(*tensors()).backend == "second"
    assert [b.name for b in backends()] == ["second", "first", "triton", "cpu", "reference"]


def test_a_refusal_is_reported_and_the_next_is_asked(register):
    register("general")
    register(
        "picky",
        refusal=lambda h, c: f"head_dim {c.D} is not a multiple of 32" if c.D % 32 else None,
    )
    choice = sparge.explain(*tensors(D=16))
    assert choice.backend == "general"
    assert choice.rejected["picky"] == "head_dim 16 is not a multiple of 32"
    assert "not picky: head_dim 16 is not a multiple of 32" in str(choice)
    assert sparge.explain(*tensors(D=32)).backend == "picky"
    with pytest.raises(Unsupported, match="head_dim 16 is not a multiple of 32") as caught:
        sparge.attention(*tensors(D=16), backend="picky")
    assert "was not asked" in caught.value.reasons["general"]


def test_a_backend_that_is_slower_here_is_passed_over(add_backend):
    short = "dense attention is faster under 1000 keys"

    class Long(FixedCost):
        def estimate(self, call):
            return Estimate(call.Lk >= 1000, short)

    add_backend("long", cost=Long(True, ""))
    choice = sparge.explain(*tensors())
    assert choice.routed_to_dense
    assert choice.rejected["long"] == short
    assert sparge.explain(*tensors(Lk=1000)).backend == "long"
    # Asked by name, or where dense cannot serve, speed is no reason.
    assert sparge.explain(*tensors(), backend="long").backend == "long"
    assert sparge.explain(*tensors(), block_mask=block_mask()).backend == "long"


def test_backends_are_asked_about_the_call_as_it_is(register):
    seen = []

    def look(host, call):
        seen.append(call)

    register("curious", refusal=look)
    q, k, v = tensors(B=2, Hq=4, Hk=2, D=16, Dv=24, dtype=torch.bfloat16)
    mask = torch.ones(140, 200, dtype=torch.bool)
    options = {"enable_gqa": True, "is_causal": True, "causal_align": "bottom_right"}
    sparge.explain(q, k, v, attn_mask=mask, recipe=HALF, scale=0.5, return_lse=True, **options)
    (call,) = seen
    assert (call.B, call.Hq, call.Hk, call.Lq, call.Lk, call.D, call.Dv) == (
        2,
        4,
        2,
        140,
        200,
        16,
        24,
    )
    assert (call.dtype, call.device, call.scale, call.recipe) == (torch.bfloat16, "cpu", 0.5, HALF)
    assert (call.is_causal, call.offset) == (True, 60)
    assert (call.has_mask, call.has_block_mask, call.return_lse) == (True, False, True)
    assert not call.needs_grad
    assert (call.n_q, call.n_k) == (2, 4)


def test_nothing_can_serve_a_call(new_router):
    new_router([fake("picky", refusal=lambda h, c: "it is a Tuesday")])
    q, k, v = tensors()
    with pytest.raises(Unsupported, match="no backend can serve") as caught:
        sparge.attention(q, k, v, block_mask=block_mask())
    assert set(caught.value.reasons) == {"picky", "dense"}
    assert "[1, 2, 140x200, 16] float32 on cpu" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.usefixtures("no_work")
def test_explain_runs_nothing():
    with sparge.record() as runs:
        for name in ("auto", "reference", "dense"):
            sparge.explain(*tensors(), backend=name)
    assert runs == []


def test_a_choice_prints_and_goes_to_json():
    choice = sparge.explain(*tensors())
    assert str(choice).startswith("dense: no sparse backend is faster")
    assert "\n  not reference: " in str(choice)
    data = json.loads(json.dumps(choice.to_dict()))
    assert data == {
        "backend": "dense",
        "reason": choice.reason,
        "rejected": dict(choice.rejected),
        "routed_to_dense": True,
    }


def test_choose_is_a_function_of_its_arguments(register):
    seen = []
    register("curious", refusal=lambda h, c: seen.append((h, c)))
    sparge.explain(*tensors())
    (h, call) = seen[0]
    assert h == host()
    assert choose(call) == choose(call)
    assert choose(call, "reference").backend == "reference"


def test_what_was_not_registered_cannot_be_unregistered():
    for name in ("triton", "cpu", "reference", "dense", "auto", "nobody"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            unregister_backend(name)
