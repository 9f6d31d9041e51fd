"""Recording on an accelerator: nothing is waited for or read before somebody asks for a number."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import sparge
from accelerators import host_activity, packed_call, pretend_stream
from calls import tensors
from sparge import KeepError, KeepFraction, Recipe
from sparge.engine.recording import GRAPH_LISTENERS
from sparge.support.accelerator import TorchAccelerator, accelerator
from sparge.values.blockplan import plan_from_mask
from sparge.values.run import NUMBERS

SPARSE = Recipe(KeepFraction(0.5), precision="exact")
BUDGET = Recipe(KeepError(0.2), precision="int8")
COUNTED = NUMBERS - {"seconds"}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Listener:
    def __init__(self):
        self.runs = []

    def note(self, run):
        self.runs.append(run)


@contextmanager
def listening(label):
    """What the graphs of a label tell, until the block ends."""
    listener = Listener()
    GRAPH_LISTENERS[label] = listener
    try:
        yield listener.runs
    finally:
        GRAPH_LISTENERS.pop(label)


def attention(**options):
    q, k, v = tensors(B=2, Hq=4, Lq=300, Lk=250)
    given = {"recipe": SPARSE, "backend": "gpu", "label": "layer", **options}
    return sparge.attention(q, k, v, enable_gqa=True, **given)


def attend():
    q, k, v = tensors(Lq=300)
    plan = sparge.make_plan(q, k, recipe=SPARSE, backend="gpu")
    return sparge.attend(q, k, v, plan, recipe=SPARSE, backend="gpu")


CALLS = {
    "sparse": attention,
    "causal": lambda: attention(is_causal=True, return_lse=True),
    "masked": lambda: attention(attn_mask=torch.ones(300, 250, dtype=torch.bool).tril()),
    "error budget": lambda: attention(recipe=BUDGET),
    "routed": lambda: attention(backend="auto"),
    "dense": lambda: attention(backend="dense", is_causal=True),
    "dense masked": lambda: attention(
        backend="dense", attn_mask=torch.ones(300, 250, dtype=torch.bool).tril(-70)
    ),
    "plan and attend": attend,
    "op": lambda: torch.ops.sparge.attention(
        *tensors(), None, None, False, 0, 0.25, SPARSE.to_json(), False, False, "gpu", "layer"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_reads_nothing_and_its_numbers_are_those_of_the_host(
    gpu, name, monkeypatch
):
    with sparge.record() as eager:
        CALLS[name]()
    stream = pretend_stream(monkeypatch)
    with listening("layer") as told, host_activity(monkeypatch) as seen, sparge.record() as runs:
        CALLS[name]()
    assert seen == []
    assert (stream.waits, stream.queries) == (0, 0)
    assert not any(run.ready() for run in runs)
    assert told == (runs if name == "op" else []), "other calls return their run"
    assert len(runs) == len(eager) > 0
    for run, want in zip(runs, eager, strict=True):
        assert (run.backend, run.isa, run.reason) == (want.backend, want.isa, want.reason)
        assert {x: getattr(run, x) for x in COUNTED} == {x: getattr(want, x) for x in COUNTED}
        assert run.allowed > 0
        assert set(run.seconds) == set(want.seconds)
        stages = [s for stage, s in run.seconds.items() if stage != "total"]
        assert all(s == 1e-3 for s in stages), "marks with nothing between them"
        assert run.seconds["total"] == pytest.approx(sum(stages))


def test_one_copy_and_two_marks_a_stage(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    with sparge.record():
        attention()
    copies = [work for work in stream.work if work is not None]
    assert len(copies) == 1
    assert len(stream.work) == 2 * 4 + 1 + 1, "four stages, the copy and the mark after it"


def test_a_pack_is_copied_once_and_shares_its_time(gpu, monkeypatch):
    """Packed stages that plan on a device; each sequence's share of the time is by its blocks."""
    q = torch.zeros(1, 2, 300, 16)
    tokens = sparge.values.tokenmask.TokenMask(300, 300)
    plans = [plan_from_mask(torch.ones(1, 2, 3, 5) > 0, tokens)] * 2
    plans.append(
        plan_from_mask(torch.ones(1, 2, 1, 2) > 0, sparge.values.tokenmask.TokenMask(100, 100))
    )

    class Stages:
        why_not_packed = staticmethod(lambda call, *, whole: None)

        @staticmethod
        def attend_packed(call, inputs, cuts, align, stage, some=None):
            with stage("prepare"), stage("attend"):
                out = torch.zeros(call.Lq, call.Hq, call.Dv)
            lse = torch.zeros(call.Hq, call.Lq)
            made = [(plan, torch.ones_like(plan.counts)) for plan in plans]
            return sparge.values.stages.AttendedPack(out, lse, lambda: made, left)

    backend = sparge.routing.get_backend("gpu")
    sparge.routing.unregister_backend("gpu")
    sparge.register_backend(replace(backend, packed=Stages))
    x, cuts = q[0].transpose(0, 1).repeat(3, 1, 1)[:700], torch.tensor([0, 300, 600, 700])
    facts = {"recipe": SPARSE, "backend": "gpu"}
    for left in ((), (2,)):
        with sparge.record() as eager:
            sparge.attention_varlen(x, x, x, cuts, cuts, **facts)
        with monkeypatch.context() as patch, sparge.record() as runs:
            stream = pretend_stream(patch)
            sparge.attention_varlen(x, x, x, cuts, cuts, **facts)
            assert stream.waits == 0
            assert sum(work is not None for work in stream.work) == 1
            parts = runs[0].parts
            assert [part.kept for part in parts] == [30, 30, 4]
            # prepare is marked around attend: 3 and 1 ms of the stream, by 30, 30 and 4 blocks.
            assert parts[0].seconds["prepare"] == pytest.approx(3e-3 * 30 / 64)
            rest = 60 if left else 64
            assert parts[0].seconds["attend"] == pytest.approx(1e-3 * 30 / rest)
            assert runs[0].seconds["prepare"] == pytest.approx(3e-3)
        for run, want in zip((runs[0], *parts), (eager[0], *eager[0].parts), strict=True):
            assert {x: getattr(run, x) for x in COUNTED} == {x: getattr(want, x) for x in COUNTED}
        # One that was planned in the pack and left has its share of that, and its own attend stage.
        assert parts[2].seconds["prepare"] == pytest.approx(3e-3 * 4 / 64)
        assert parts[2].seconds["attend"] == pytest.approx(1e-3 if left else 1e-3 * 4 / 64)


def test_sequences_one_after_another_are_one_record(gpu, monkeypatch):
    with sparge.record() as eager:
        packed_call(SPARSE)
    stream = pretend_stream(monkeypatch)
    with sparge.record() as runs:
        packed_call(SPARSE)
    assert stream.waits == 0
    assert not runs[0].ready()
    stream.complete()
    assert runs[0].ready()
    assert (runs[0].kept, runs[0].sparsity) == (eager[0].kept, eager[0].sparsity)
    assert [part.kept for part in runs[0].parts] == [part.kept for part in eager[0].parts]
    assert stream.waits == 0


def a_run(stream):
    with sparge.record() as runs:
        attention(recipe=BUDGET)
    assert not runs[0].ready()
    return runs[0]


USES = {
    "str": str,
    "repr": repr,
    "to_dict": lambda run: json.dumps(run.to_dict(), allow_nan=False),
    "==": lambda run: run == run,
    "pickle": lambda run: pickle.loads(pickle.dumps(run)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "replace": lambda run: replace(run, label="other"),
    "asdict": asdict,
    "density": lambda run: run.density,
    "density_by_head": lambda run: run.density_by_head,
}


@pytest.mark.parametrize("name", USES)
def test_a_run_is_a_plain_value_to_whoever_uses_it(gpu, name, monkeypatch):
    with sparge.record() as eager:
        attention(recipe=BUDGET)
    stream = pretend_stream(monkeypatch)
    run = a_run(stream)
    found = USES[name](run)
    assert stream.waits == 1
    assert run == replace(eager[0], seconds=run.seconds)
    if name not in ("str", "repr", "to_dict", "asdict"):
        assert found == USES[name](replace(eager[0], seconds=run.seconds))
    assert set(vars(run)) == set(run.__dataclass_fields__), "nothing of the device is held"
    with pytest.raises(AttributeError, match="'Run' object has no attribute 'kep'"):
        _ = run.kep


def test_threads_read_one_run_and_wait_once(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    run, start, found = a_run(stream), threading.Barrier(8), []

    def read():
        start.wait()
        found.append((run.kept, run.density_by_head, run.seconds["total"], run.to_dict()))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.waits == 1
    assert len(found) == 8
    assert all(each == found[0] for each in found)


def test_a_compiled_graph_records_as_the_function_does(gpu, monkeypatch):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=keep)
    def call(q, k, v):
        return sparge.attention(q, k, v, recipe=SPARSE, backend="gpu", label="layer") * 2

    given = tensors(Lq=300)
    with listening("layer") as told:
        call(*given)
        stream = pretend_stream(monkeypatch)
        with host_activity(monkeypatch, compiled=True) as seen:
            call(*given)
    assert len(graphs) == 1
    assert seen == []
    assert stream.waits == 0
    eager, run = told
    assert not run.ready()
    assert run == replace(eager, seconds=run.seconds)


# --- while a graph is captured ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "dense masked", "plan and attend", "error budget"])
def test_no_call_touches_the_device_while_a_graph_is_captured(gpu, name, monkeypatch):
    stream = pretend_stream(monkeypatch)
    stream.is_capturing = True
    with host_activity(monkeypatch) as seen, sparge.record() as runs:
        CALLS[name]()
    assert seen == []
    assert stream.touched == 0
    assert all(run.captured for run in runs)


def test_a_captured_pack_is_one_captured_call(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    stream.is_capturing = True
    with sparge.record() as runs:
        packed_call(SPARSE)
    assert stream.touched == 0
    assert runs[0].captured
    assert len(runs[0].parts) == 3
    assert all(part.captured for part in runs[0].parts)


# --- torch's own vocabulary ---------------------------------------------------------------------


class Event:
    def __init__(self, enable_timing=False):
        self.timed, self.stream = enable_timing, None

    def record(self, stream):
        self.stream = stream


def test_marks_are_timed_and_in_the_stream_of_the_tensors_device():
    module = SimpleNamespace(Event=Event, current_stream=lambda device: ("stream", device.index))
    mark = TorchAccelerator(module).mark(torch.device("cuda", 1))
    assert (mark.timed, mark.stream) == (True, ("stream", 1))


@pytest.mark.parametrize(
    "module, is_capturing",
    [
        (SimpleNamespace(), False),  # torch.xpu once had no such function
        (SimpleNamespace(is_current_stream_capturing=lambda: False), False),
        (SimpleNamespace(is_current_stream_capturing=lambda: True), True),
    ],
)
def test_a_module_that_cannot_capture_never_does(module, is_capturing):
    assert TorchAccelerator(module).capturing() is is_capturing


def test_copies_go_to_pinned_memory_and_are_not_waited_for(monkeypatch):
    made = []

    class Host:
        def copy_(self, x, *, non_blocking):
            made.append((x, non_blocking))
            return self

    def empty(shape, *, dtype, device, pin_memory):
        made.append((tuple(shape), dtype, device, pin_memory))
        return Host()

    x = torch.arange(3)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        TorchAccelerator(None).start_copy(x)
    assert made == [((3,), torch.int64, "cpu", True), (x, True)]


def test_torch_has_the_vocabulary_for_cuda_and_xpu_and_the_host_needs_none():
    assert accelerator("cpu") is accelerator("meta") is accelerator("mps") is None
    assert accelerator("cuda") == TorchAccelerator(torch.cuda)
    assert accelerator("xpu") == TorchAccelerator(torch.xpu)
