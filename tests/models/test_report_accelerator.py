"""Reports of models on an accelerator: calls are added up as the device gets through them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import sparge
import tiny_models as tiny
from accelerators import host_activity, packed_call, pretend_stream
from sparge import KeepFraction, Recipe
from sparge.models.report import Tally
from tiny_models import ids_of, padded

SPARSE = Recipe(KeepFraction(0.5), precision="exact")
MANY = 192


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Layer(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return self.second(self.first(x))


def inputs(L=300):
    return torch.randn(1, 4, L, 16, generator=torch.Generator().manual_seed(L))


def accelerated(**options):
    return sparge.accelerate(Model(), SPARSE, backend="gpu", **options)


def counts_of(report):
    """A report but for its times."""
    layers = [{**layer.to_dict(), "seconds": 0.0} for layer in report.layers]
    return {**report.to_dict(), "seconds": 0.0, "layers": layers}


def test_a_layer_of_a_model_reads_nothing_before_its_report(gpu, monkeypatch):
    lengths = (300, 20, 300, 650)
    with accelerated() as handle:
        for L in lengths:
            handle.model(inputs(L))
        want = counts_of(handle.report())
    stream = pretend_stream(monkeypatch)
    with accelerated() as handle:
        with host_activity(monkeypatch) as seen:
            for L in lengths:
                handle.model(inputs(L))
        assert seen == []
        assert stream.waits == 0
        report = handle.report()
        assert stream.waits > 0
        assert counts_of(report) == want
        assert report.seconds == pytest.approx(1e-3 * 4 * len(lengths) * 2)
        waits = stream.waits
        assert handle.report() == report
        assert stream.waits == waits
    assert report.layers[0].sparse_calls == len(lengths)


def test_measured_errors_are_added_up_on_the_device(gpu, monkeypatch):
    with accelerated(measure_error=True) as handle:
        for L in (300, 650):
            handle.model(inputs(L))
        tallies = [site.tally for _, site in handle._sites]
        assert all(tally.errors.dtype == torch.float64 for tally in tallies)
        with host_activity(monkeypatch) as seen:
            tallies[0].add_error(tallies[1].errors)
        assert seen == []
        assert len(handle.report().layers[1].error_by_head) == 4


def unread(handle):
    return [len(site.tally.unread) for _, site in handle._sites]


def test_what_the_device_has_done_is_added_up_as_calls_go_by(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    with accelerated() as handle:
        for _ in range(MANY):
            handle.model(inputs())
            stream.complete()
            assert max(unread(handle)) == 1, "the call itself, which was not done yet"
        assert stream.waits == 0
        assert handle.report().layers[0].calls == MANY
        assert stream.waits == 0


def test_a_call_never_waits_for_a_device_that_is_far_behind(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    with accelerated() as handle:
        for n in range(1, 84):
            handle.model(inputs())
            assert unread(handle) == [n] * 2
            assert stream.waits == 0
        report = handle.report()
        assert unread(handle) == [0, 0]
    assert report.layers[0].calls == 83


def test_reset_forgets_what_was_not_read(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    with accelerated() as handle:
        handle.model(inputs())
        handle.reset()
        assert handle.report().layers[0].calls == 0
    assert stream.waits == 0


def test_threads_call_and_report_at_once(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    with accelerated() as handle:

        def work():
            with torch.no_grad():
                for _ in range(10):
                    handle.model(inputs())
                    handle.report()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        layers = handle.report().layers
    assert [layer.calls for layer in layers] == [30, 30]
    assert layers[0].density == layers[1].density < 1
    assert stream.waits <= 60


# --- while a graph is captured ------------------------------------------------------------------


def test_nothing_is_touched_while_a_graph_is_captured(gpu, monkeypatch):
    stream = pretend_stream(monkeypatch)
    with accelerated(measure_error=True) as handle:
        handle.model(inputs())
        before = handle.report()
        handle.model(inputs())
        touched = stream.touched
        stream.is_capturing = True
        with host_activity(monkeypatch) as seen, sparge.record() as runs:
            handle.model(inputs())
        stream.is_capturing = False
        assert seen == []
        assert stream.touched == touched
        report = handle.report()
    assert all(run.captured and run.ready() for run in runs)
    assert (runs[0].kept, runs[0].allowed, runs[0].seconds) == (0, 0, {"total": 0.0})
    assert "captured in a graph, not counted" in str(runs[0])
    assert runs[0].to_dict()["captured"]
    for layer, old in zip(report.layers, before.layers, strict=True):
        ((way, calls),) = layer.ran.items()
        assert (calls, layer.captured, old.captured) == (2, {way: 1}, {})
        assert (layer.density, layer.density_by_head) == (old.density, old.density_by_head)
        assert (layer.calls, layer.kept) == (2, 2 * old.kept)
    assert f"captured in a graph 2x: {way}; not counted, nor are its replays" in str(report)
    assert report.to_dict()["captured"] == {way: 2}
    assert "captured" not in str(before)


# --- serving ------------------------------------------------------------------------------------


def test_a_serving_layer_reads_a_call_when_the_device_is_done(gpu, monkeypatch):
    stream, tally = pretend_stream(monkeypatch), Tally()
    with sparge.record() as runs:
        packed_call(SPARSE)
    tally.add(runs[0], recipe=SPARSE, seconds=0.5)
    assert stream.waits == 0
    assert tally.sparse_density(calls=3) is None
    stream.complete()
    with sparge.record() as more:
        packed_call(SPARSE)
    tally.add(more[0], recipe=SPARSE, seconds=0.5)
    assert tally.sparse_density(calls=3) == pytest.approx(runs[0].density)
    stream.is_capturing = True
    with sparge.record() as captured:
        packed_call(SPARSE)
    queries = stream.queries
    tally.add(captured[0], recipe=SPARSE, seconds=0.5)
    tally.sparse_density(calls=3)
    assert (stream.waits, stream.queries) == (0, queries)
    stream.is_capturing = False
    report = tally.report("layer", SPARSE)
    assert stream.waits > 0
    assert (report.calls, report.kept) == (6, runs[0].kept + more[0].kept)
    assert sum(report.captured.values()) == 3
    assert report.seconds == 1.5, "by the caller's clock"


def test_a_pack_of_a_served_layer_reads_nothing(gpu, monkeypatch):
    """Its cuts were made on the host, and stay there."""
    from sparge.serving.vllm.batch import Step, make_pack
    from sparge.serving.vllm.routing import Shape
    from sparge.serving.vllm.worker import ServedLayer

    stream = pretend_stream(monkeypatch)
    layer = ServedLayer("a", Shape(2, 2, 16, torch.float32, "cpu", 0.25, SPARSE), "gpu")
    rows = torch.randn(3, 700, 2, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    pack = make_pack(Step.of([0, 300, 700], [300, 400]), [0, 1], *rows, gather=None)
    output = torch.zeros(700, 2, 16)
    with host_activity(monkeypatch) as seen:
        layer.attend(pack, output)
    assert seen == []
    assert (stream.waits, layer.tokens) == (0, {"served": 700})
    report = layer.tally.report("a", SPARSE)
    assert (report.calls, report.sparse_calls) == (2, 2)


# --- masks of transformers models ---------------------------------------------------------------


def test_no_layer_reads_a_padding_mask(gpu, monkeypatch):
    """Each layer asked whether it hides anything; once for each forward pass is transformers' own
    measure, and a continued prompt has a mask that is known to hide nothing."""
    model = tiny.llama()
    ids, mask = padded(ids_of(2, 300, seed=7), "left", (0, 70))
    stream = pretend_stream(monkeypatch)
    with sparge.accelerate(model, SPARSE, backend="gpu") as handle:
        with host_activity(monkeypatch) as seen:
            model(ids, attention_mask=mask)
        assert seen.count("__bool__") == 1
        cache = model(ids, use_cache=True).past_key_values
        masks = []
        handle.tap("model.layers.1.self_attn", lambda *call: masks.append(call[3]["attn_mask"]))
        with host_activity(monkeypatch) as seen:
            model(ids[:, :130], past_key_values=cache)
        assert (seen, masks) == ([], [None])
        stream.is_capturing = True
        with host_activity(monkeypatch) as seen:
            model(ids, attention_mask=mask)
            model(ids, attention_mask=torch.ones_like(mask))
        assert seen == []
        assert [each is None for each in masks] == [True, False, False]
