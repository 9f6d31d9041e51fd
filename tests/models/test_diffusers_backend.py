"""The backend name in diffusers' dispatch, other backends beside it, offloading and fusing."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import AutoencoderKL
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from test_diffusers_models import is_plain

import sparge
import sparge.models.diffusers
from sparge import Schedule
from sparge.models.diffusers.backend import RELAY
from tiny_denoiser_parts import SAME, SPARSE, assert_same, ran_sparse, randn
from tiny_denoisers import DENOISERS, flux, ltx, pixart, qwen, sd3, unet, wan
from tiny_pipelines import flux as flux_pipeline

DISPATCH = ["flux", "flux2", "chroma", "hunyuan", "wan", "ltx", "qwen"]


@pytest.fixture(autouse=True)
def native_again():
    """`set_attention_backend` changes what is active in the whole process."""
    yield
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


@pytest.mark.parametrize("name", DISPATCH)
def test_the_conventional_way(name):
    tiny = DENOISERS[name]()
    want = tiny()
    tiny.model.set_attention_backend("sparge")
    with sparge.record() as runs:
        out = tiny()
    assert runs
    assert (out - want).norm() < 0.2 * want.norm()
    assert all(run.recipe == sparge.DEFAULT for run in runs)
    tiny.model.set_attention_backend("native")
    assert torch.equal(tiny(), want)


def test_as_a_context():
    tiny = wan()
    want = tiny()
    with attention_backend("sparge"), sparge.record() as runs:
        tiny()
    assert runs
    assert torch.equal(tiny(), want)
    assert AttentionBackendName("sparge") in AttentionBackendName
    with pytest.raises(ValueError, match="sparg"):
        tiny.model.set_attention_backend("sparg")


def test_registering_twice_is_harmless():
    before = list(AttentionBackendName)
    sparge.models.diffusers.register()
    assert list(AttentionBackendName) == before
    assert [each.value for each in before].count("sparge") == 1


def test_the_name_serves_cross_attention_and_masks_by_torch():
    query, key = randn(1, 200, 2, 8), randn(1, 30, 2, 8)
    mask = torch.rand(1, 1, 200, 200) > 0.2
    for tensors, options in (((query, key, key), {}), ((query,) * 3, {"attn_mask": mask})):
        want = dispatch_attention_fn(*tensors, **options, backend="native")
        out = dispatch_attention_fn(*tensors, **options, backend="sparge")
        assert out.shape == want.shape
        if tensors[1] is key:
            assert torch.equal(out, want)
        else:
            assert (out - want).norm() < 0.2 * want.norm()


@pytest.mark.parametrize("make", [flux, wan, ltx, qwen])
def test_a_backend_set_while_accelerated_is_that_of_the_dense_parts(make):
    tiny = make()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        tiny.model.set_attention_backend("_native_math")
        assert_same(tiny(), want)
        assert ran_sparse(handle)
    processors = [m.processor for m in tiny.model.modules() if hasattr(m, "processor")]
    assert {p._attention_backend for p in processors} == {"_native_math"}
    math = tiny()
    schedule = Schedule(dense_first=1.0)
    with sparge.accelerate(tiny.model, SPARSE, backend="cpu", schedule=schedule):
        assert torch.equal(tiny(), math)
        tiny.model.set_attention_backend("native")
        assert torch.equal(tiny(), want)
    assert torch.equal(tiny(), want)
    tiny.model.reset_attention_backend()
    assert torch.equal(tiny(), want)


def test_a_context_around_an_accelerated_model_does_not_switch_it_off():
    tiny = wan()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle, attention_backend("native"):
        assert_same(tiny(), want)
        assert ran_sparse(handle) == 2


def test_accelerating_a_model_that_was_set_to_the_name():
    tiny = wan()
    want = tiny()
    tiny.model.set_attention_backend("sparge")
    with sparge.accelerate(
        tiny.model, SAME, backend="cpu", schedule=Schedule(dense_first=1.0)
    ) as handle:
        assert torch.equal(tiny(), want)  # cross-attention too: dense for want of a known step
        assert not any(layer.sparse_calls for layer in handle.report().layers)
    assert {m.processor._attention_backend for m in tiny.model.modules()
            if hasattr(m, "processor")} == {"sparge"}  # fmt: skip


def test_the_relay_outside_of_an_accelerated_model_is_our_own_bug():
    with pytest.raises(AssertionError, match="sets its route"):
        dispatch_attention_fn(*(randn(1, 200, 2, 8),) * 3, backend=RELAY)


def test_two_models_in_two_threads_keep_their_routes():
    one, two = wan(), flux()
    want = one(), two()
    failures = []

    def work(tiny, expected):
        for _ in range(5):
            if (tiny() - expected).norm() > 2e-5 * expected.norm():
                failures.append(tiny)

    with (
        sparge.accelerate(one.model, SAME, backend="cpu") as first,
        sparge.accelerate(two.model, SAME, backend="cpu") as second,
    ):
        pairs = zip((one, two), want, strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [layer.calls for layer in first.report().layers] == [5, 5]
        assert [layer.calls for layer in second.report().layers] == [5, 5, 5]
    assert not failures


class Moves(ModelHook):
    """As offloading does: works on a module's arguments before and behind its forward."""

    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("first", ["hook", "sparge"])
def test_hooks_of_accelerate(first):
    tiny = flux()
    want = tiny()
    hooks = []

    def add():
        for module in (tiny.model, *tiny.model.transformer_blocks):
            hooks.append(Moves())
            add_hook_to_module(module, hooks[-1])

    if first == "hook":
        add()
    handle = sparge.accelerate(tiny.model, SAME, backend="cpu")
    if first == "sparge":
        add()
    assert_same(tiny(), want)
    assert ran_sparse(handle) == 3
    assert [hook.calls for hook in hooks] == [1, 1]
    handle.remove()
    assert torch.equal(tiny(), want)
    assert [hook.calls for hook in hooks] == [2, 2]
    remove_hook_from_module(tiny.model, recurse=True)
    assert torch.equal(tiny(), want)


def test_model_offload_of_a_pipeline(monkeypatch):
    """Modules are moved by hooks in turns; here from and to the same device."""
    tiny = flux_pipeline()
    want = tiny()
    tiny.pipe.enable_model_cpu_offload(device="cpu")
    with sparge.accelerate(tiny.pipe, SAME, backend="cpu", schedule=Schedule(0.0)) as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle) == 3
    assert torch.equal(tiny(), want)


def test_group_offload_of_blocks():
    tiny = wan()
    want = tiny()
    tiny.model.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle) == 2
    assert torch.equal(tiny(), want)


def test_one_processor_instance_shared_by_all_modules():
    tiny = sd3()
    shared = tiny.model.transformer_blocks[0].attn.processor
    tiny.model.set_attn_processor(shared)
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu", layers=["*.1.attn"]) as handle:
        assert_same(tiny(), want)
        ran = {layer.name: layer.sparse_calls for layer in handle.report().layers}
        assert sum(ran.values()) == ran["transformer_blocks.1.attn"] == 1
    assert all(block.attn.processor is shared for block in tiny.model.transformer_blocks)
    assert torch.equal(tiny(), want)


@pytest.mark.parametrize("make", [flux, pixart, unet])
def test_fusing_projections_is_noted_where_it_replaces_processors(make):
    tiny = make()
    want = tiny()
    handle = sparge.accelerate(tiny.model, SAME, backend="cpu")
    tiny.model.fuse_qkv_projections()
    notes = " ".join(handle.report().notes)
    out = tiny()
    assert_same(out, want)
    replaced = make is not flux
    assert ("attention processors were replaced since; accelerate again" in notes) == replaced
    assert replaced == all(layer.calls == 0 for layer in handle.report().layers)
    again = sparge.accelerate(tiny.model, SAME, backend="cpu")
    assert_same(tiny(), want)
    assert ran_sparse(again)
    again.remove()
    assert is_plain(tiny.model)
    assert_same(tiny(), want)


def test_replaced_processors_are_noted_and_left_as_they_are():
    tiny = unet()
    handle = sparge.accelerate(tiny.model, SAME, backend="cpu")
    other = copy.copy(handle._sites[0][0].processor)
    tiny.model.set_attn_processor(AttnProcessor2_0())
    assert "4 attention processors were replaced since" in " ".join(handle.report().notes)
    chosen = [m.processor for m in tiny.model.modules() if hasattr(m, "processor")]
    handle.remove()
    assert [m.processor for m in tiny.model.modules() if hasattr(m, "processor")] == chosen
    assert type(other).__name__.startswith("Sparge")
    assert is_plain(tiny.model)


def test_lora_scale_arguments_reach_the_processors():
    """diffusers filters arguments by the signature of a processor."""
    tiny = pixart()
    processor = tiny.model.transformer_blocks[0].attn1.processor
    import inspect

    plain = inspect.signature(type(processor).__call__)
    with sparge.accelerate(tiny.model, SAME):
        mine = tiny.model.transformer_blocks[0].attn1.processor
        assert isinstance(mine, type(processor))
        assert inspect.signature(mine.__call__).parameters.keys() == {
            name for name in plain.parameters if name != "self"
        }


def test_a_vae_has_nothing_to_accelerate():
    with pytest.raises(sparge.Unsupported) as caught:
        sparge.accelerate(AutoencoderKL(block_out_channels=(4,), norm_num_groups=1))
    assert "AutoencoderKL" in caught.value.reasons["diffusers"]
