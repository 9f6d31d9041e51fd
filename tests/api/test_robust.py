"""What surrounds the numbers: threads, processes, slices, devices without numbers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import sparge
from calls import tensors
from oracle import clustered_qkv, make_qkv, same_bits
from sparge import BlockPlan, KeepAll, KeepMass, Recipe, Unsupported
from sparge.backends.reference import prepare as slow
from sparge.engine.recording import Stopwatch
from sparge.support.atomic_files import replace_file

scores = import_module("sparge.backends.reference.scores")
dense = import_module("sparge.backends.dense")


@pytest.mark.parametrize("predictor", ["rows", "blend"])
def test_keys_in_slices_change_no_bit(monkeypatch, predictor):
    q, k, _ = clustered_qkv(Hq=2, L=400, noise=0.8)
    recipe = Recipe(KeepMass(0.7), predictor=predictor)
    whole = sparge.make_plan(q, k, is_causal=True, recipe=recipe)
    monkeypatch.setattr(scores, "KEYS_AT_ONCE", 100)
    assert sparge.make_plan(q, k, is_causal=True, recipe=recipe) == whole


@pytest.mark.parametrize("return_lse", [False, True])
def test_dense_queries_in_slices(monkeypatch, return_lse):
    q, k, v = make_qkv(B=2, Hq=4, Hk=2, Lq=150, Lk=200, D=16)
    call = {"is_causal": True, "causal_align": "bottom_right", "enable_gqa": True}
    options = {**call, "backend": "dense", "return_lse": return_lse}
    whole = sparge.attention(q, k, v, **options)
    monkeypatch.setattr(dense, "_SCORES", 1)  # 16 rows at a time
    parts = sparge.attention(q, k, v, **options)
    for a, b in zip(whole, parts, strict=True) if return_lse else [(whole, parts)]:
        assert torch.allclose(a, b, atol=1e-6)


def test_many_threads_call_at_once():
    q, k, v = clustered_qkv(Hq=2, L=300)
    recipes = [Recipe(KeepMass(mass), precision=p) for mass in (0.5, 0.9) for p in ("int8", "half")]

    def run(recipe):
        with sparge.record() as runs:
            out = sparge.attention(q, k, v, recipe=recipe, backend="reference")
        return out, len(runs)

    alone = [run(recipe)[0] for recipe in recipes]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, recipes * 4))
    for i, (out, n_runs) in enumerate(together):
        assert same_bits(out, alone[i % 4])
        assert n_runs == 1, "a thread records its own calls"


def test_many_threads_write_one_file(tmp_path):
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: replace_file(path, bytes([i]) * 1000), range(100)))
    assert len(set(path.read_bytes())) == 1
    assert path.stat().st_size == 1000
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_what_crosses_processes_survives():
    plan = sparge.make_plan(*tensors()[:2])
    recipe = Recipe(KeepMass((0.5, 0.9)), protect=((0, 5),))
    with sparge.record() as runs:
        sparge.attention(*tensors())
    refusal = Unsupported("no backend", {"mine": "it is a Tuesday"}, "wait a day")
    for make in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert make(plan) == plan
        assert make(recipe) == recipe
        assert make(recipe).to_json() == recipe.to_json()
        assert make(runs[0]) == runs[0]
        assert str(make(refusal)) == str(refusal)
        assert make(refusal).reasons == refusal.reasons


def test_tensors_without_numbers_run_nothing():
    q, k, v = (x.to("meta") for x in tensors(Dv=24))
    for backend in ("auto", "reference"):
        with sparge.record() as runs:
            out, lse = sparge.attention(q, k, v, backend=backend, return_lse=True)
        assert (out.device.type, out.shape, lse.shape) == ("meta", (1, 2, 140, 24), (1, 2, 140))
        assert not runs
    plan = sparge.make_plan(q, k)
    assert (plan.indices.device.type, plan.indices.shape) == ("meta", (1, 2, 2, 4))


def test_a_stage_is_timed_on_its_own_device(monkeypatch):
    """Where torch has no events for a device, such as mps, each stage waits for it."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    with sparge.record():
        for device in ("cpu", "meta", "mps:0"):
            watch = Stopwatch(SimpleNamespace(label=""), None, torch.device(device))
            with watch.stage("attend"):
                pass
    assert waited == [torch.device("mps:0")] * 2
    assert set(watch.seconds()) == {"attend", "total"}


def test_inference_mode():
    q, k, v = tensors()
    for recipe in (Recipe(), Recipe(KeepAll(), precision="exact")):
        plain = sparge.attention(q, k, v, recipe=recipe, backend="reference")
        with torch.inference_mode():
            assert same_bits(sparge.attention(q, k, v, recipe=recipe, backend="reference"), plain)


@pytest.fixture
def coarse(add_backend):
    """A backend with one scale per 32 queries and 64 keys, as kernels on GPUs like it."""

    def prepare_keys(call, key, value, *, to_attend, **rest):
        done = slow.prepare_keys(call, key, value, to_attend=to_attend, **rest)
        coarse = slow.quantize_rows(slow.smooth_keys(key), 64)
        return replace(done, key=coarse) if to_attend else done

    def prepare_queries(call, query, *, to_attend, **rest):
        done = slow.prepare_queries(call, query, to_attend=to_attend, **rest)
        return replace(done, rows=slow.quantize_rows(query.float(), 32)) if to_attend else done

    add_backend("coarse", prepare_keys=prepare_keys, prepare_queries=prepare_queries)
    return "coarse"


@pytest.mark.rule("5.6")
@pytest.mark.parametrize("precision", ["int8", "int8-fast"])
def test_a_granularity_of_its_own_crosses_the_ops(coarse, precision):
    q, k, v = tensors()
    recipe = Recipe(KeepAll(), precision=precision)
    plan = sparge.make_plan(q, k, recipe=recipe)
    eager = sparge.attend(q, k, v, plan, recipe=recipe, backend=coarse)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: sparge.attend(q, k, v, plan, recipe=recipe, backend=coarse),
        fullgraph=True,
        backend="aot_eager",
    )(q, k, v)
    fine = sparge.attend(q, k, v, plan, recipe=recipe, backend="reference")
    assert same_bits(eager[0], compiled[0])
    assert not same_bits(eager[0], fine[0])


def test_packed_sequences_are_judged_by_their_own_lengths(register):
    register("short", refusal=lambda h, c: None if c.Lk <= 100 else "at most 100 keys")
    q, k, v = (x[0].transpose(0, 1) for x in tensors(Lq=150, Lk=150))
    fits, not_all = torch.tensor([0, 90, 150]), torch.tensor([0, 20, 150])
    for grad in (False, True):
        recipe = Recipe(precision="exact")
        packed = (q.clone().requires_grad_(grad), k, v)
        with sparge.record() as runs:
            sparge.attention_varlen(*packed, fits, fits, recipe=recipe, backend="short")
        assert [part.backend for part in runs[0].parts] == ["short", "short"]
        with sparge.record() as runs, pytest.raises(Unsupported, match="at most 100 keys"):
            sparge.attention_varlen(*packed, not_all, not_all, recipe=recipe, backend="short")
        assert not runs, "the first sequence ran before the second was refused"


def test_a_plan_is_looked_at_once(monkeypatch):
    q, k, v = tensors()
    plan = sparge.make_plan(q, k)
    by_hand = BlockPlan(plan.counts, plan.indices, plan.allowed, Lq=140, Lk=200)
    seen = []
    look = BlockPlan.validate
    monkeypatch.setattr(BlockPlan, "validate", lambda s, *a: seen.append(s) or look(s, *a))
    sparge.attend(q, k, v, plan)
    assert not seen
    sparge.attend(q, k, v, by_hand)
    sparge.attend(q, k, v, by_hand)
    assert len(seen) == 1


def test_forward_mode_is_refused_not_wrong():
    q, k, v = tensors()
    for recipe in (Recipe(), Recipe(precision="int8-fast"), Recipe(precision="exact")):
        sparge.attention(q, k, v, recipe=recipe, backend="reference")  # remembered or not

        def f(value, recipe=recipe):
            return sparge.attention(q, k, value, recipe=recipe, backend="reference")

        with pytest.raises(ValueError, match="forward-mode"):
            torch.func.jvp(f, (v,), (torch.ones_like(v),))


@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
def test_tensors_of_other_layouts_are_refused(made):
    q, k, v = tensors()
    for backend in ("auto", "reference"):
        with pytest.raises(TypeError, match="strided"):
            sparge.attention(made(q), k, v, backend=backend)


def test_a_reach_beyond_everything_keeps_everything():
    q, k, _ = tensors(Lq=512, Lk=512)
    for huge in (1000, 2**63 - 1, 2**70):
        for field in ("local_blocks", "sink_blocks"):
            recipe = Recipe(KeepMass(0.01), sink_blocks=0, precision="exact")
            recipe = dataclasses.replace(recipe, **{field: huge})
            assert sparge.make_plan(q, k, is_causal=True, recipe=recipe).density == 1.0


@pytest.mark.parametrize("precision", ["half", "exact"])
def test_tiny_values_keep_their_digits(precision):
    q, k, v = make_qkv(Hq=1, Lq=64, Lk=1000, D=16)
    recipe = Recipe(KeepAll(), precision=precision)
    plain = sparge.attention(q, k, v, recipe=recipe, backend="reference")
    tiny = sparge.attention(q, k, v * 2.0**-120, recipe=recipe, backend="reference")
    assert torch.allclose(tiny * 2.0**120, plain, rtol=1e-3, atol=1e-5)


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    q, k, v = tensors()
    plain = sparge.attention(q, k, v, scale=0.5)
    assert torch.equal(sparge.attention(q, k, v, scale=np.float32(0.5)), plain)
    assert Recipe(KeepMass(np.float64(0.5)), sink_blocks=np.int64(2)) == Recipe(
        KeepMass(0.5), sink_blocks=2
    )
    with pytest.raises(TypeError, match="number"):
        KeepMass(np.bool_(True))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "name, change",
    [("indices", lambda x: x.fill_(2**30)), ("counts", lambda x: x.fill_(10**6))],
    ids=["indices", "counts"],
)
def test_a_plan_changed_in_place_is_looked_at_again(name, change, backend):
    """It crashed the process: a plan made by a stage was trusted for good."""
    q, k, v = tensors()
    plan = sparge.make_plan(q, k, backend=backend)
    before, _ = sparge.attend(q, k, v, plan, backend=backend)
    assert plan.is_valid
    change(getattr(plan, name))
    assert not plan.is_valid
    with pytest.raises(ValueError, match="plan is damaged"):
        sparge.attend(q, k, v, plan, backend=backend)
    with torch.inference_mode():
        other = sparge.make_plan(q, k, backend=backend)
        again, _ = sparge.attend(q, k, v, other, backend=backend)
        assert torch.equal(again, before)
        change(getattr(other, name))
        with pytest.raises(ValueError, match="plan is damaged"):
            sparge.attend(q, k, v, other, backend=backend)
