"""What the way of a call may assume of a device that is not the host: nothing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sparge
from accelerators import READS, pretend_stream
from calls import a_call, call_of, tensors
from gpus import pretend, properties
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe
from sparge.backends.cpu import library
from sparge.backends.triton.architectures import architecture_of
from sparge.routing import choose, current_router, get_backend
from sparge.values.backend import Estimate, FixedCost, host
from sparge.values.stages import Attended, PreparedKeys, PreparedQueries


class NoHostReads(TorchDispatchMode):
    """Raises where a number of a tensor is read back: on an accelerator the host would wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            raise AssertionError(f"{func} reads a number back to the host")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device(add_backend):
    """A backend of another device whose stages stay on it: every block, plain torch."""

    def prepare_keys(call, key, value, *, mean=None, to_plan, to_attend):
        return PreparedKeys(key, key if value is None else value)

    def prepare_queries(call, query, *, mean, to_plan, to_attend):
        return PreparedQueries(query)

    def predict(call, prepared, tokens):
        return torch.ones(call.B, call.Hq, call.n_q, call.n_k)

    def select(call, prepared, mass, tokens):
        return sparge.values.blockplan.plan_from_mask(mass > 0, tokens)

    def attend(call, prepared, plan, tokens):
        scores = prepared.queries.rows @ prepared.keys.key.mT * call.scale
        out = scores.softmax(-1) @ prepared.keys.value
        return Attended(out, scores.logsumexp(-1), torch.zeros_like(plan.counts))

    prepares = {"prepare_keys": prepare_keys, "prepare_queries": prepare_queries}
    stages = {**prepares, "predict": predict, "select": select, "attend": attend}
    add_backend("device", cost=FixedCost(True, "fast"), **stages)
    return "device"


@pytest.mark.parametrize("name", ["auto", "device"])
def test_nothing_on_the_way_reads_a_number_back(device, name, monkeypatch):
    q, k, v = tensors(Lq=256, Lk=256)
    recipe = Recipe(precision="exact")
    with torch.no_grad(), NoHostReads():
        out = sparge.attention(q, k, v, recipe=recipe, backend=name)
        plan = sparge.make_plan(q, k, recipe=recipe, backend=name)
        again, _ = sparge.attend(q, k, v, plan, recipe=recipe, backend=name)
        blocks = torch.ones(2, 4, dtype=torch.bool)
        third = sparge.attention(q, k, v, recipe=recipe, block_mask=blocks, backend=name)
        torch.ops.sparge.attention(
            q, k, v, None, None, False, 0, 0.25, recipe.to_json(), False, False, name
        )
    for x in (again, third):
        torch.testing.assert_close(out, x)
    # Recording leaves counts and times on a device until they are asked for.
    stream = pretend_stream(monkeypatch)
    with sparge.record() as runs, torch.no_grad(), NoHostReads():
        sparge.attention(q, k, v, recipe=recipe, backend=name)
    assert (runs[0].backend, stream.waits) == ("device", 0)
    assert (runs[0].density, stream.waits) == (1.0, 1)


TRITON_CALLS = {
    "mass": (Recipe(KeepMass(0.9)), {}),
    "fraction": (Recipe(KeepFraction(0.5), precision="int8-fast"), {"is_causal": True}),
    "all": (Recipe(KeepAll(), precision="half"), {}),
    "error": (Recipe(KeepError(0.2)), {}),
    "block mask": (Recipe(precision="exact"), {"block_mask": torch.ones(2, 3, dtype=torch.bool)}),
    "mask": (Recipe(KeepMass(0.9)), {"attn_mask": torch.ones(130, 180, dtype=torch.bool).tril()}),
    "bias": (Recipe(KeepMass(0.9), precision="exact"), {"attn_mask": torch.zeros(130, 180)}),
    "pool": (Recipe(KeepFraction(0.5), skipped="pool", pool_group=16), {}),
    "pv_skip": (Recipe(KeepMass(0.9), pv_skip=4.0), {}),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", TRITON_CALLS)
def test_triton_reads_no_number_back(name, monkeypatch):
    recipe, options = TRITON_CALLS[name]
    q, k, v = tensors(Hq=1, Hk=1, Lq=130, Lk=180)
    how = {"recipe": recipe, "backend": "triton"}
    mask = {"attn_mask": options.get("attn_mask")}
    if name == "error":  # its table of rows is made on the host, once for each length
        sparge.make_plan(q, k, value=v, **how)
    stream = pretend_stream(monkeypatch)
    with torch.no_grad(), NoHostReads(), sparge.record() as runs:
        out = sparge.attention(q, k, v, **how, **options)
        plan = sparge.make_plan(q, k, value=v, **how, **options)
        again, _ = sparge.attend(q, k, v, plan, **how, **mask)
    assert out.isfinite().all()
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    assert stream.waits == 0
    assert [run.density for run in runs] == [plan.density] * 3


@pytest.mark.usefixtures("interpreted")
def test_a_pack_of_triton_is_recorded_without_a_read(monkeypatch):
    x, cuts = torch.randn(330, 1, 16), torch.tensor([0, 130, 330])
    how = {"recipe": Recipe(KeepFraction(0.5)), "backend": "triton"}
    with sparge.record() as eager:
        sparge.attention_varlen(x, x, x, cuts, cuts, **how)
    stream = pretend_stream(monkeypatch)
    with sparge.record() as runs, torch.no_grad():
        sparge.attention_varlen(x, x, x, cuts, cuts, **how)
    assert stream.waits == 0
    assert sum(work is not None for work in stream.work) == 1, "one copy for all sequences"
    for run, want in zip(runs[0].parts, eager[0].parts, strict=True):
        assert (run.kept_by_head, run.allowed) == (want.kept_by_head, want.allowed)
        assert set(run.seconds) == set(want.seconds)
    assert 0 < runs[0].density == eager[0].density < 1


def test_a_device_that_is_not_the_host_is_chosen_without_the_native_core(add_backend, monkeypatch):
    """Calibrating asked for an instruction set where there is none: IndexError."""
    monkeypatch.setattr("sparge.backends.cpu.library.MISSING", "it was not built")
    monkeypatch.setattr("sparge.backends.cpu.library.ISAS_HERE", ())
    monkeypatch.setattr(library, "available", lambda: ())

    class Provisional(FixedCost):
        def estimate(self, call):
            return Estimate(True, "by built-in numbers", "estimate", provisional=True)

    add_backend("gpu", cost=Provisional(True, ""))
    q, k, v = tensors()
    with sparge.record() as runs:
        sparge.attention(q, k, v, recipe=Recipe(KeepAll(), precision="exact"))
    assert (runs[0].backend, runs[0].cost_source) == ("gpu", "estimate")
    assert runs[0].rejected["cpu"] == "it was not built"


def test_the_cpu_refuses_other_devices_and_says_so():
    with pytest.raises(sparge.Unsupported, match="the tensors are on cuda"):
        choose(a_call(device="cuda"), "cpu")


def test_a_host_knows_the_device_it_is_asked_for(monkeypatch):
    class Properties:
        name, major, minor = "Some GPU", 9, 0

    monkeypatch.setattr("sparge.values.backend._hosts", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = host("cuda")
    assert (found.device("cuda").name, found.device("cuda").capability) == ("Some GPU", "sm_90")
    assert found.device("cpu") == host().device("cpu")
    assert host("privateuseone").device("privateuseone").capability == ""


def test_counts_of_the_second_filter_are_told_in_the_backends_groups(add_backend):
    from sparge.backends.reference import REFERENCE

    sparge.register_backend(sparge.Backend("wide", "", REFERENCE.stages, row_group=64))
    q, k, v = tensors(Lq=300)
    with sparge.record() as runs:
        sparge.attention(q, k, v, recipe=Recipe(KeepAll()), backend="wide")
        sparge.attention(q, k, v, recipe=Recipe(KeepAll()), backend="reference")
    wide, narrow = runs
    assert (wide.row_group, narrow.row_group) == (64, 16)
    assert wide.pv_groups == 2 * 4 * (2 + 2 + 1)
    assert narrow.pv_groups == 2 * 4 * (8 + 8 + 3)


def test_two_different_cards_are_told_apart_by_the_tensors_index(monkeypatch):
    """The first current card of the process once stood for all of them."""
    pretend(monkeypatch, properties("Ada", 8, 9), properties("Ampere", 8, 0, clock_rate=1_410_000))
    fast = Recipe(precision="int8-fast")
    ada, ampere = (a_call(8192, device="cuda", index=i, recipe=fast) for i in range(2))
    monkeypatch.setattr("sparge.backends.triton.MISSING", None)
    triton = get_backend("triton")
    assert triton.refusal(host(*ada.where), ada) is None
    assert "sm_80 has no fp8" in triton.refusal(host(*ampere.where), ampere)
    assert [architecture_of(*call.where).name for call in (ada, ampere)] == ["sm_89", "sm_80"]
    isas = [triton.isa(host(*call.where), call) for call in (ada, ampere)]
    assert isas == ["triton sm_89", "triton sm_80"]
    assert [host(*call.where).device("cuda").name for call in (ada, ampere)] == ["Ada", "Ampere"]
    costs = [
        current_router().crossover("triton", *call.where).costs["bf16/128/dense"]
        for call in (ada, ampere)
    ]
    assert costs[0] != costs[1]


def test_a_call_knows_which_card_its_tensors_are_on():
    q = torch.empty(1, 2, 256, 64, device="meta")
    assert call_of(q, q, q).where == ("meta", 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 256, 64, device="cuda:1")
        assert call_of(q, q, q).where == ("cuda", 1)
