"""Whole pipelines: exact with every block kept, bit-equal where they are dense, and put back."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from diffusers import (
    AnimateDiffPipeline,
    FlowMatchEulerDiscreteScheduler,
    MotionAdapter,
    StableDiffusion3PAGPipeline,
)
from test_diffusers_models import is_plain

import sparge
from sparge import KeepFraction, Recipe, Schedule
from tiny_denoiser_parts import SAME, SPARSE, assert_same, ran_sparse
from tiny_pipelines import PIPELINES, TinyPipeline, flux, sd3, stable_diffusion, wan, wan22

ALWAYS = Schedule(dense_first=0.0)
DENSE = Schedule(dense_first=1.0)
WITH_CALLBACK = [name for name in PIPELINES if name != "pixart"]


@pytest.mark.parametrize("name", PIPELINES)
def test_keeping_all_is_the_plain_result_and_removal_is_exact(name):
    tiny = PIPELINES[name]()
    want = tiny()
    scheduler = vars(tiny.pipe.scheduler).copy()
    with sparge.accelerate(tiny.pipe, SAME, backend="cpu", schedule=ALWAYS) as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle)
    assert torch.equal(tiny(), want)
    assert is_plain(tiny.model)
    assert vars(tiny.pipe.scheduler).keys() == scheduler.keys()
    assert "_sparge_handle" not in vars(tiny.pipe)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_schedule_that_is_dense_everywhere_is_bit_identical(name):
    tiny = PIPELINES[name]()
    want = tiny(seed=3)
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu", schedule=DENSE) as handle:
        assert torch.equal(tiny(seed=3), want)
        report = handle.report()
    assert report.density == 1.0
    assert {*report.density_by_step.values()} == {1.0}
    assert all(layer.sparse_calls == 0 < layer.calls for layer in report.layers)


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_the_dense_first_part_is_bit_equal(name):
    tiny = PIPELINES[name]()
    want = tiny.trace(steps=5)
    with sparge.accelerate(
        tiny.pipe, SPARSE, backend="cpu", schedule=Schedule(dense_first=0.4)
    ) as handle:
        latents = tiny.trace(steps=5)
        density = handle.report().density_by_step
    assert [torch.equal(a, b) for a, b in zip(latents, want, strict=True)] == [1, 1, 0, 0, 0]
    assert list(density) == [0, 1, 2, 3, 4]
    assert density[0] == density[1] == 1.0
    assert max(density[2], density[3], density[4]) < 1.0


def test_the_default_of_a_pipeline_leaves_its_noisiest_fifth_dense():
    tiny = wan()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        tiny(steps=5)
        density = handle.report().density_by_step
    assert [step for step, d in density.items() if d == 1.0] == [0]
    with sparge.accelerate(tiny.model, SPARSE, backend="cpu") as handle:  # a model has no run
        tiny(steps=5)
        assert handle.report().density_by_step == {}
        assert ran_sparse(handle)


def test_encoders_and_the_vae_are_left_alone_and_named():
    tiny = sd3()
    parts = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
    with sparge.accelerate(tiny.pipe, SAME, backend="cpu") as handle:
        picture = tiny(output_type="pt")
        left = handle.report().left_alone
        for name in parts:
            assert "only denoisers" in left[name]
            for module in getattr(tiny.pipe, name).modules():
                assert not [n for n in vars(module) if n.startswith("_sparge")]
        assert not [layer.name for layer in handle.report().layers if "vae" in layer.name]
        assert "left alone: vae: AutoencoderKL" in str(handle.report())
    assert picture.shape == (1, 3, 28, 36)


def test_the_report_has_layers_by_heads_by_steps():
    tiny = sd3()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        tiny(steps=5)
        report = handle.report()
    levels = {}
    for layer in report.layers:
        assert [each.step for each in layer.by_step] == [0, 1, 2, 3, 4]
        assert sum(each.calls for each in layer.by_step) == layer.calls
        assert sum(each.kept for each in layer.by_step) == layer.kept
        assert sum(each.allowed for each in layer.by_step) == layer.allowed
        for each in layer.by_step:
            levels.setdefault(each.step, set()).add(each.noise_level)
            heads = () if each.step == 0 else (2,)
            assert (len(each.density_by_head),) == (heads or (0,))
            assert all(0 < density < 1 for density in each.density_by_head)
    noise = [levels[step].pop() for step in range(5)]
    assert noise == sorted(noise, reverse=True)
    assert not any(levels.values())
    data = report.to_dict()
    assert data["format"] == "sparge.report/3"
    assert list(data["density_by_step"]) == ["0", "1", "2", "3", "4"]
    by_step = data["layers"][0]["by_step"]
    assert len(by_step) == 5
    assert len(by_step[4]["density_by_head"]) == 2
    text = str(report)
    assert "density by step: 1.00 " in text
    assert "1×14×18, in order 'hilbert'" in text
    assert "its schedule keeps this part of the run dense" in report.fallbacks


def test_runs_add_up_and_reset_begins_anew():
    tiny = flux()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        tiny(steps=2)
        tiny(steps=4)
        calls = [each.calls for each in handle.report().layers[0].by_step]
        assert calls == [2, 2, 1, 1]
        handle.reset()
        tiny(steps=2)
        assert [each.calls for each in handle.report().layers[0].by_step] == [1, 1]


def test_two_denoisers_of_one_pipeline():
    tiny = wan22()
    want = tiny()
    schedule = Schedule(dense_first=0.5, dense_last_layers=1)
    with sparge.accelerate(tiny.pipe, SAME, backend="cpu", schedule=schedule) as handle:
        assert_same(tiny(), want)
        ran = {layer.name: layer.sparse_calls for layer in handle.report().layers}
    assert {name.split(".")[0] for name in ran} == {"transformer", "transformer_2"}
    assert ran["transformer_2.blocks.1.attn1"] == 0
    assert ran["transformer_2.blocks.0.attn1"] > 0
    assert torch.equal(tiny(), want)
    assert is_plain(tiny.pipe.transformer)
    assert is_plain(tiny.pipe.transformer_2)


def test_a_handle_that_nobody_keeps_is_replaced_all_the_same():
    tiny = wan22()
    want = tiny()
    sparge.accelerate(tiny.pipe, SPARSE, backend="cpu", schedule=ALWAYS)
    gc.collect()
    handle = sparge.accelerate(tiny.pipe, SAME, backend="cpu", schedule=ALWAYS)
    assert_same(tiny(), want)
    with pytest.raises(ValueError, match="covers more than this part"):
        sparge.accelerate(tiny.pipe.transformer, SAME)
    handle.remove()
    assert torch.equal(tiny(), want)


def test_dense_first_and_last_layers():
    tiny = sd3()
    schedule = Schedule(0.0, dense_first_layers=1, dense_last_layers=1)
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu", schedule=schedule) as handle:
        tiny(steps=2)
        layers = handle.report().layers
    sparse = [layer.name for layer in layers if layer.sparse_calls]
    assert sparse == ["transformer_blocks.1.attn"]
    dense = next(layer for layer in layers if layer.name == "transformer_blocks.0.attn2")
    assert dense.fallbacks == {"its schedule keeps this layer dense": dense.calls}
    with pytest.raises(ValueError, match="at most 3 together, the number of blocks"):
        sparge.accelerate(tiny.pipe, schedule=Schedule(dense_first_layers=4))
    assert is_plain(tiny.model)


def test_mistakes_show_before_the_first_step():
    tiny, done = wan(), []

    def at_end(pipe, step, timestep, tensors):
        done.append(step)
        return tensors

    beyond = Recipe(KeepFraction(0.5), protect=((0, 361),))
    late = Schedule(0.5, bands=((0.5, 0.9, None), (0.9, 1.0, beyond)))
    for options, match in (
        ({"recipe": beyond}, r"protect .* 360 tokens"),
        ({"recipe": SAME, "schedule": late}, r"protect .* 360 tokens"),
        ({"recipe": SAME, "grid": (3, 12, 10)}, "does not match the tokens"),
    ):
        with (
            sparge.accelerate(tiny.pipe, backend="cpu", **options),
            pytest.raises(ValueError, match=match),
        ):
            tiny(callback_on_step_end=at_end)
    assert not done
    assert is_plain(tiny.model)


def test_a_model_outside_of_its_pipeline_says_that_no_step_is_known():
    tiny = flux()
    given = {}
    hook = tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: given.update(kwargs), with_kwargs=True
    )
    tiny(steps=1)
    hook.remove()
    with torch.no_grad(), sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        want = tiny.model(**given)[0]
        (reason,) = handle.report().fallbacks
        assert "does not know the step" in reason
        with handle.context(progress=0.5):
            out = tiny.model(**given)[0]
    assert not torch.equal(out, want)


def test_another_scheduler_is_noticed():
    tiny = flux()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        tiny.pipe.scheduler = FlowMatchEulerDiscreteScheduler()
        assert "another scheduler" in " ".join(handle.report().notes)
        sparge.accelerate(tiny.pipe, SPARSE, backend="cpu")
        assert not handle.active
    tiny.pipe._sparge_handle.remove()
    assert is_plain(tiny.model)


def test_the_transformer_of_an_accelerated_pipeline_is_taken_over():
    tiny = flux()
    want = tiny()
    first = sparge.accelerate(tiny.pipe, SPARSE, backend="cpu")
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert not first.active
        assert_same(tiny(), want)
    assert torch.equal(tiny(), want)


def test_parts_that_are_not_known_are_left_alone_beside_known_ones():
    """AnimateDiff: a UNet that has taken its layers over time from an adapter."""
    tiny = stable_diffusion()
    names = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
    adapter = MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
    )
    pipe = AnimateDiffPipeline(
        **{name: tiny.pipe.components[name] for name in names}, motion_adapter=adapter
    )
    pipe.set_progress_bar_config(disable=True)
    video = TinyPipeline(pipe, {**tiny.arguments, "num_frames": 5}, "unet")
    want = video(steps=2)
    with sparge.accelerate(pipe, SAME, backend="cpu", schedule=ALWAYS) as handle:
        assert_same(video(steps=2), want)
        left = handle.report().left_alone["motion_adapter"]
        assert left == "MotionAdapter: its tokens are not known"
        assert ran_sparse(handle)
    assert torch.equal(video(steps=2), want)


def test_a_copied_pipeline_does_not_turn_the_clock_of_the_first():
    tiny = flux()
    want = tiny()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu", schedule=ALWAYS) as handle:
        twin = copy.deepcopy(tiny.pipe.scheduler)
        clock = handle._attached.clock
        before = clock.context
        twin.set_timesteps(4, mu=1.0)
        twin.step(torch.zeros(1), twin.timesteps[0], torch.zeros(1))
        assert clock.context == before
        assert tiny.pipe.scheduler.step_index != 1
    assert torch.equal(tiny(), want)


def test_a_pipeline_that_sets_processors_while_it_runs():
    """Perturbed-attention guidance: those processors attend by themselves, and ours come back."""
    tiny = sd3()
    parts = {name: part for name, part in tiny.pipe.components.items() if part is not None}
    pipe = StableDiffusion3PAGPipeline(**parts, pag_applied_layers=["blocks.1"])
    pipe.set_progress_bar_config(disable=True)
    pag = TinyPipeline(pipe, {**tiny.arguments, "pag_scale": 3.0})
    want = pag(steps=2)
    with sparge.accelerate(pipe, SAME, backend="cpu", schedule=ALWAYS) as handle:
        assert_same(pag(steps=2), want)
        assert handle.report().layers[0].sparse_calls > 0
    assert torch.equal(pag(steps=2), want)
