"""Any torch module: its own calls of SDPA are served, and nothing else is touched."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparge
from sparge import Schedule
from tiny_denoiser_parts import SAME, SPARSE, assert_same
from tiny_modules import (
    GRID,
    ByEinsum,
    ByHelper,
    ByRegistry,
    ByTorch,
    Mixed,
    SelfAttention,
    TwoCalls,
    video_inputs,
    video_transformer,
)

DENSE = F.scaled_dot_product_attention


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def is_plain(model):
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not [name for name in vars(module) if name.startswith("_sparge")]
    return True


@pytest.mark.parametrize("order", ["hilbert", "row", "tiles:2x4x4"])
def test_a_video_transformer_of_no_framework(order):
    model, inputs = video_transformer(), video_inputs()
    want = model(*inputs)
    with sparge.accelerate(model, SAME, backend="cpu", grid=GRID, order=order) as handle:
        assert_same(model(*inputs), want)
        ran = {layer.name: layer for layer in handle.report().layers}
    for i in range(2):
        assert ran[f"blocks.{i}.attn1"].sparse_calls == 1
        assert ran[f"blocks.{i}.attn2"].sparse_calls == 0
        (why,) = ran[f"blocks.{i}.attn2"].fallbacks
        assert "cross-attention" in why
    assert torch.equal(model(*inputs), want)
    assert is_plain(model)


def test_its_grid_changes_what_is_kept_and_cross_attention_can_be_asked_for():
    model, inputs = video_transformer(), video_inputs()
    found = []
    for options in ({}, {"grid": GRID}, {"grid": GRID, "cross_attention": True}):
        with sparge.accelerate(model, SPARSE, backend="cpu", **options) as handle:
            found.append(model(*inputs))
            ran = [layer.sparse_calls for layer in handle.report().layers]
    assert ran == [1, 1, 1, 1]
    assert not torch.equal(found[0], found[1])


def test_a_schedule_on_a_module_without_a_pipeline():
    model, inputs = video_transformer(blocks=3), video_inputs()
    want = model(*inputs)
    schedule = Schedule(dense_first_layers=1)
    with sparge.accelerate(model, SPARSE, backend="cpu", grid=GRID, schedule=schedule) as handle:
        assert torch.equal(model(*inputs), want)
        for step in range(5):
            with handle.context(progress=step / 5, step=step):
                out = model(*inputs)
            assert torch.equal(out, want) == (step == 0)
        report = handle.report()
    assert list(report.density_by_step) == [0, 1, 2, 3, 4]
    assert [layer.sparse_calls for layer in report.layers] == [0, 0, 4, 0, 4, 0]


def test_a_recipe_of_the_context():
    model, inputs = video_transformer(), video_inputs()
    want = model(*inputs)
    with sparge.accelerate(
        model, lambda context: SPARSE if context.step else None, backend="cpu"
    ) as handle:
        assert torch.equal(model(*inputs), want)
        with handle.context(step=1):
            assert not torch.equal(model(*inputs), want)


def test_calls_of_one_forward_have_sites_in_their_order():
    model, x = TwoCalls(), randn(2, 2, 140, 8)
    want = model(x)
    with sparge.accelerate(model, SAME, backend="cpu") as handle:
        for _ in range(2):
            assert_same(model(x), want)
        layers = handle.report().layers
        assert [(layer.name, layer.sparse_calls) for layer in layers] == [
            ("TwoCalls", 2),
            ("TwoCalls:2", 2),
        ]
        seen = []
        handle.tap("TwoCalls:2", lambda query, key, value, arguments: seen.append(query))
        model(x)
        assert_same(seen[0], DENSE(x, x, x))
    assert torch.equal(model(x), want)
    assert is_plain(model)


@pytest.mark.parametrize("kind", [ByHelper, TwoCalls])
def test_helper_functions_are_followed(kind):
    model, x = Mixed(kind(), ByEinsum()), randn(1, 2, 140, 8)
    want = model(x)
    with sparge.accelerate(model, SAME, backend="cpu") as handle:
        assert_same(model(x), want)
        layers = handle.report().layers
        assert layers[0].name == "parts.0"
        assert layers[0].sparse_calls == 1
        assert "parts.1" in handle.report().left_alone


def test_calls_that_reading_does_not_find_have_a_site_by_their_place():
    model, x = Mixed(ByHelper(), ByRegistry()), randn(1, 2, 140, 8)
    want = model(x)
    handle = sparge.accelerate(model, SAME, backend="cpu")
    assert_same(model(x), want)
    first, second = handle.report().layers
    assert first.name == "parts.0"
    assert second.name.startswith("tiny_modules.py:")
    assert "lambda" in second.name
    assert first.sparse_calls == second.sparse_calls == 1
    again = sparge.accelerate(model, SAME, backend="cpu")
    assert not handle.active
    assert_same(model(x), want)
    again.remove()
    assert torch.equal(model(x), want)
    assert is_plain(model)


def test_a_processor_of_the_models_own_is_followed():
    """As Open-Sora-Plan's, which stands in the attention class of another library."""

    class Processor:
        def __call__(self, module, x):
            return F.scaled_dot_product_attention(x, x, x)

    class Processed(nn.Module):
        def __init__(self):
            super().__init__()
            self.processor = Processor()

        def forward(self, x):
            return self.processor(self, x)

    model, x = Processed(), randn(1, 2, 140, 8)
    want = model(x)
    with sparge.accelerate(model, SAME, backend="cpu") as handle:
        assert_same(model(x), want)
        assert handle.report().layers[0].sparse_calls == 1


def test_what_cannot_be_seen_is_said():
    model, x = Mixed(ByHelper(), ByEinsum(), ByTorch(16)), randn(1, 2, 140, 8)
    with torch.no_grad(), sparge.accelerate(model, SAME, backend="cpu") as handle:
        model(x)
        report = handle.report()
    assert [layer.name for layer in report.layers] == ["parts.0"]
    assert "softmax itself" in report.left_alone["parts.1"]
    assert "nn.MultiheadAttention" in report.left_alone["parts.2.mha"]
    assert "left alone: parts.2.mha" in str(report)


@pytest.mark.parametrize("model, reason", [
    (ByEinsum(), "takes a softmax itself"), (ByTorch(), "nn.MultiheadAttention calls"),
    (nn.Linear(2, 2), "none of its modules calls"),
    (nn.TransformerEncoderLayer(8, 2), "nn.MultiheadAttention calls"),
])  # fmt: skip
def test_a_module_without_a_call_is_refused_with_the_reason(model, reason):
    with pytest.raises(sparge.Unsupported) as caught:
        sparge.accelerate(model)
    assert reason in caught.value.reasons["torch"]
    assert is_plain(model)


def test_another_thread_and_another_module_are_untouched():
    model, other = TwoCalls(), TwoCalls()
    x = randn(2, 2, 300, 8)
    want, plain, results = model(x), DENSE(x, x, x), []

    class Busy(nn.Module):
        """Waits inside of its forward, while the interception is on in its thread."""

        def forward(self, x):
            inside.set()
            assert go.wait(timeout=30)
            return F.scaled_dot_product_attention(x, x, x)

    inside, go, busy = threading.Event(), threading.Event(), Busy()
    with sparge.accelerate(busy, SPARSE, backend="cpu") as handle:
        thread = threading.Thread(target=lambda: results.append(busy(x)))
        thread.start()
        assert inside.wait(timeout=30)
        assert torch.equal(DENSE(x, x, x), plain)
        assert torch.equal(other(x), want)
        go.set()
        thread.join()
        assert handle.report().layers[0].calls == 1
    assert not torch.equal(results[0], plain)


def test_one_model_in_many_threads():
    model, inputs = Mixed(TwoCalls(), ByRegistry(), TwoCalls()), randn(1, 2, 140, 8)
    want = model(inputs)
    failures = []

    def work():
        for _ in range(10):
            if (model(inputs) - want).norm() > 1e-5 * want.norm():
                failures.append(1)

    with sparge.accelerate(model, SAME, backend="cpu") as handle:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        calls = {}
        for layer in handle.report().layers:
            calls[layer.name] = calls.get(layer.name, 0) + layer.calls
    assert not failures
    assert sum(calls.values()) == 40 * 5
    assert calls["parts.0"] == calls["parts.0:2"] == 40
    assert len(calls) == 5


def test_an_error_inside_leaves_no_interception_behind():
    model, x = TwoCalls(), randn(1, 2, 140, 8)
    want = DENSE(x, x, x)
    with sparge.accelerate(model, SPARSE, backend="cpu"):
        with pytest.raises(TypeError):
            model(None)
        with pytest.raises(TypeError, match="int32"):
            model(torch.zeros(1, 2, 3, 4, dtype=torch.int32))
        assert torch.equal(DENSE(x, x, x), want)
        once = model(x)
    with sparge.accelerate(model, SPARSE, backend="cpu"):
        assert torch.equal(model(x), once)


def test_copies_have_handles_of_their_own():
    model, inputs = video_transformer(), video_inputs()
    want = model(*inputs)
    handle = sparge.accelerate(model, SAME, backend="cpu", grid=GRID)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin(*inputs), want)
        assert twin._sparge_handle.report().layers[0].sparse_calls == 1
        twin._sparge_handle.remove()
        assert torch.equal(twin(*inputs), want)
        assert is_plain(twin)
    assert handle.report().layers[0].calls == 0
    handle.remove()
    assert is_plain(model)


def test_a_second_call_replaces_the_first_and_a_part_is_refused():
    model, inputs = video_transformer(), video_inputs()
    want = model(*inputs)
    part = sparge.accelerate(model.blocks[0], SPARSE, backend="cpu")
    whole = sparge.accelerate(model, SAME, backend="cpu", grid=GRID)
    assert not part.active
    assert_same(model(*inputs), want)
    with pytest.raises(ValueError, match="covers more than this part"):
        sparge.accelerate(model.blocks[0])
    assert whole.active
    sparge.accelerate(model, SAME, backend="cpu").remove()
    assert not whole.active
    assert torch.equal(model(*inputs), want)
    assert is_plain(model)


def test_a_forward_that_was_replaced_before_stays_and_one_after_too():
    model, x = SelfAttention().requires_grad_(False), randn(1, 240, 32)
    own = model.forward
    model.forward = lambda x: own(x) + 1.0
    want = model(x)
    with sparge.accelerate(model, SAME, backend="cpu", grid=GRID) as handle:
        assert_same(model(x), want)
        assert handle.report().layers[0].sparse_calls == 1
    assert torch.equal(model(x), want)
    handle = sparge.accelerate(model, SPARSE, backend="cpu")
    inside = model.forward
    model.forward = lambda x: inside(x) * 2.0
    handle.remove()
    assert torch.equal(model(x), want * 2.0)


def test_values_in_a_module_that_compare_in_their_own_way():
    class WithArray(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = np.arange(3)

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x) * float(self.table[1])

    class Without(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = np.arange(3)

        def forward(self, x):
            return x * float(self.table[1])

    model, x = Mixed(WithArray(), Without()), randn(1, 2, 140, 8)
    want = model(x)
    with sparge.accelerate(model, SAME, backend="cpu"):
        assert_same(model(x), want)


def test_only_the_chosen_layers_and_none_elsewhere():
    model, x = Mixed(ByHelper(), ByHelper(), ByRegistry()), randn(1, 2, 140, 8)
    with sparge.accelerate(model, SPARSE, backend="cpu", layers=["parts.0"]) as handle:
        model(x)
        layers = handle.report().layers
    assert [layer.sparse_calls for layer in layers] == [1, 0, 0]
    assert layers[2].fallbacks == {"not among `layers`": 1}
