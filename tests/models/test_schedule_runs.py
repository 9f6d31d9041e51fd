"""Schedules in real runs: the same meaning for every number of steps and every scheduler."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusionImg2ImgPipeline,
    UniPCMultistepScheduler,
)

import sparge
from sparge import KeepFraction, Recipe, Schedule
from sparge.models.clock import Clock, SchedulerClock
from sparge.values.schedule import Context
from tiny_denoiser_parts import SAME, SPARSE, assert_same
from tiny_pipelines import TinyPipeline, cogvideox, flux, stable_diffusion, wan

SCHEDULERS = [
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    UniPCMultistepScheduler,
]


def walk(scheduler, steps):
    """The contexts that a loop around a scheduler sees before each call of its model."""
    clock = Clock(())
    watched = SchedulerClock(scheduler, clock)
    scheduler.set_timesteps(steps)
    sample, seen = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(0)), []
    for timestep in scheduler.timesteps:
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(sample, timestep)
        seen.append(clock.context)
        if isinstance(scheduler, CogVideoXDDIMScheduler):
            sample = scheduler.step(0.1 * sample, timestep, sample).prev_sample
        else:
            sample = scheduler.step(0.1 * sample, timestep, sample, return_dict=False)[0]
    assert clock.context == Context()  # no step follows
    watched.stop()
    return seen


@pytest.mark.parametrize("steps", [4, 50])
@pytest.mark.parametrize("kind", SCHEDULERS, ids=lambda kind: kind.__name__)
def test_a_fifth_is_a_fifth(kind, steps):
    scheduler = kind()
    before = {name: vars(scheduler).get(name) for name in ("step", "set_timesteps")}
    seen = walk(scheduler, steps)
    calls = len(seen)
    assert calls == len(scheduler.timesteps) >= steps
    assert [context.step for context in seen] == list(range(calls))
    assert [context.progress for context in seen] == [i / calls for i in range(calls)]
    dense = [c for c in seen if Schedule().recipe_at(c.progress, SPARSE) is None]
    assert len(dense) == -(-calls // 5)
    levels = [context.noise_level for context in seen]
    assert all(0.0 <= level <= 1.0 for level in levels)
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > 0.7 > 0.3 > levels[-1]
    assert {name: vars(scheduler).get(name) for name in before} == before


@pytest.mark.parametrize("kind", SCHEDULERS, ids=lambda kind: kind.__name__)
def test_a_watched_scheduler_computes_the_same(kind):
    def last(scheduler, clock):
        if clock is not None:
            SchedulerClock(scheduler, clock)
        scheduler.set_timesteps(3)
        torch.manual_seed(0)
        sample = torch.ones(1, 4, 2, 2)
        for timestep in scheduler.timesteps:
            sample = scheduler.step(0.1 * sample, timestep, sample, return_dict=False)[0]
        return sample

    plain, watched = kind(), kind()
    assert torch.equal(last(watched, Clock(())), last(plain, None))
    for name in ("set_timesteps", "step"):  # pipelines look there for arguments they may pass
        signature = inspect.signature(getattr(watched, name))
        assert signature == inspect.signature(getattr(plain, name))


def test_a_copied_scheduler_runs_by_itself():
    scheduler, clock = EulerDiscreteScheduler(), Clock(())
    watched = SchedulerClock(scheduler, clock)
    scheduler.set_timesteps(4)
    twin = copy.deepcopy(scheduler)
    assert len(walk(twin, 10)) == 10
    assert clock.context == Context(scheduler.timesteps[0].item() / 1000, 0, 0.0)
    assert len(scheduler.timesteps) == 4
    assert scheduler.step_index is None
    watched.stop()


DENSITY = {4: [0], 10: [0, 1], 15: [0, 1, 2]}


@pytest.mark.parametrize("steps", DENSITY)
@pytest.mark.parametrize("kind", [DDIMScheduler, EulerDiscreteScheduler, UniPCMultistepScheduler])
def test_dense_steps_of_a_pipeline(kind, steps):
    tiny = stable_diffusion()
    tiny.pipe.scheduler = kind()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        tiny(steps=steps)
        density = handle.report().density_by_step
    assert len(density) == steps
    assert [step for step, d in density.items() if d == 1.0] == DENSITY[steps]


def test_a_second_order_scheduler_calls_its_model_twice_a_step():
    tiny = stable_diffusion()
    tiny.pipe.scheduler = HeunDiscreteScheduler()
    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        tiny(steps=5)
        density = handle.report().density_by_step
    assert len(density) == 9
    assert [step for step, d in density.items() if d == 1.0] == [0, 1]


def contexts(tiny, handle, **changes):
    clock, seen = handle._attached.clock, []
    hook = tiny.model.register_forward_pre_hook(lambda *_: seen.append(clock.context))
    tiny(**changes)
    hook.remove()
    return seen


@pytest.mark.parametrize("kind", [
    DDIMScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler, DPMSolverMultistepScheduler,
    UniPCMultistepScheduler,
], ids=lambda kind: kind.__name__)  # fmt: skip
def test_an_image_to_image_run_is_counted_from_where_it_begins(kind):
    tiny = stable_diffusion()
    tiny.pipe.scheduler = kind()
    pipe = StableDiffusionImg2ImgPipeline(**tiny.pipe.components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": "a cat", "image": torch.rand(1, 3, 16, 24), "strength": 0.5}
    run = TinyPipeline(pipe, given, "unet")
    with sparge.accelerate(pipe, SPARSE, backend="cpu") as handle:
        whole = contexts(run, handle, steps=8, strength=1.0)
        half = contexts(run, handle, steps=8)
    assert len(half) == (7 if kind is HeunDiscreteScheduler else 4)
    assert [c.progress for c in half] == [i / len(half) for i in range(len(half))]
    assert [c.step for c in half] == list(range(len(half)))
    assert [c.noise_level for c in half] == [c.noise_level for c in whole][-len(half) :]


def test_an_image_to_image_run_of_flow_matching():
    tiny = flux()
    parts = {n: p for n, p in tiny.pipe.components.items() if n not in ("image_encoder",)}
    parts.pop("feature_extractor", None)
    pipe = FluxImg2ImgPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    given = {**tiny.arguments, "image": torch.rand(1, 3, 28, 36), "strength": 0.5}
    run = TinyPipeline(pipe, given)
    with sparge.accelerate(pipe, SPARSE, backend="cpu") as handle:
        seen = contexts(run, handle, steps=8)
    assert [c.progress for c in seen] == [0, 0.25, 0.5, 0.75]
    assert seen[0].noise_level < 0.9


def test_by_noise_level():
    """A shifted flow keeps its noise for long: by noise more steps are in the first fifth."""
    dense = {}
    for by in ("run", "noise"):
        tiny = wan()
        schedule = Schedule(dense_first=0.2, by=by)
        with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu", schedule=schedule) as handle:
            seen = contexts(tiny, handle, steps=10)
            density = handle.report().density_by_step
        dense[by] = [step for step, d in density.items() if d == 1.0]
    levels = {c.step: c.noise_level for c in seen}
    assert dense["run"] == [0, 1]
    assert dense["noise"] == [step for step, level in levels.items() if 1 - level < 0.2]
    assert len(dense["noise"]) > 2


def test_bands_use_their_own_recipes():
    tiny = cogvideox()
    more, less = Recipe(KeepFraction(0.7)), Recipe(KeepFraction(0.2), sink_blocks=0)
    bands = ((0.2, 0.6, more), (0.6, 0.8, None), (0.8, 1.0, less))
    with sparge.accelerate(
        tiny.pipe, SAME, backend="cpu", schedule=Schedule(bands=bands)
    ) as handle:
        tiny(steps=10)
        report = handle.report()
    density = list(report.density_by_step.values())
    assert density[:2] == density[6:8] == [1.0, 1.0]
    assert all(1.0 > d > max(density[8:]) for d in density[2:6])
    recipes = {each.recipe.keep: each.calls for each in report.layers[0].by_recipe}
    calls = {step.step: step.calls for step in report.layers[0].by_step}
    assert recipes == {more.keep: 4 * calls[2], less.keep: 2 * calls[8]}


def test_a_recipe_of_the_context_in_a_pipeline():
    seen = []

    def by_noise(context):
        seen.append((context.step, context.noise_level))
        return SAME if context.noise_level is None or context.noise_level > 0.5 else None

    tiny = flux()
    want = tiny(steps=4)
    with sparge.accelerate(
        tiny.pipe, by_noise, backend="cpu", schedule=Schedule(dense_first=0.0)
    ) as handle:
        assert_same(tiny(steps=4), want)
        layer = handle.report().layers[0]
    assert 0 < layer.sparse_calls < layer.calls == 4
    assert {step for step, _ in seen} == {0, 1, 2, 3}


def test_a_pipeline_that_fails_begins_anew():
    tiny = flux()
    want = tiny.trace(steps=5)

    def fail(pipe, step, timestep, tensors):
        if step == 2:
            raise KeyboardInterrupt
        return tensors

    with sparge.accelerate(tiny.pipe, SPARSE, backend="cpu") as handle:
        with pytest.raises(KeyboardInterrupt):
            tiny(steps=5, callback_on_step_end=fail)
        handle.reset()
        latents = tiny.trace(steps=5)
        assert handle.report().density_by_step[0] == 1.0
    assert torch.equal(latents[0], want[0])
