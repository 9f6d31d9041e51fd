"""Tracing a pipeline and tuning its heads: in Python, by `sparge trace` and by `sparge tune`."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("rich")

import tiny_pipelines
from cli_runs import complaint
from sparge import Profile, Schedule, accelerate
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge_tools.tuning import Trace, schedule_of, trace_pipeline, tune
from sparge_tools.tuning.tuner import PRESETS, preset_of

OURS = "cpu" if native.why_missing() is None else "reference"


def split(tiny, steps=5):
    arguments = {**tiny.arguments, "num_inference_steps": steps}
    return tiny.pipe, [arguments.pop("prompt")], arguments


@pytest.fixture(scope="module")
def flux():
    return split(tiny_pipelines.flux())


def test_steps_of_the_sparse_part_are_traced_with_their_noise(flux, tmp_path):
    pipe, prompts, call = flux
    trace = trace_pipeline(pipe, prompts, tmp_path, seeds=[0, 1], call=call, steps=2)
    assert [each.about for each in trace.inputs] == [
        f"a cat, seed {seed}, step {step}" for seed in (0, 1) for step in (1, 4)
    ]
    assert [each.noise_level for each in trace.inputs] == pytest.approx([0.8, 0.2] * 2)
    assert schedule_of_trace(trace) == Schedule()
    for name in trace.layers:
        captures = trace.captures(name)
        assert len(captures) == 4
        assert captures[0].key.shape == (1, 2, 12 + 14 * 18, 16)
        assert not torch.equal(captures[0].key, captures[1].key)
    assert Trace.open(tmp_path) == trace


def schedule_of_trace(trace):
    return Schedule.from_dict(trace.calibration["schedule"])


def test_what_is_traced_is_what_attention_sees(flux, tmp_path):
    """In Hilbert order, with the text in its place: a tap of an accelerated run sees the same."""
    pipe, prompts, call = flux
    name = "transformer_blocks.0.attn"
    everywhere = Schedule(dense_first=0.0)
    trace = trace_pipeline(pipe, prompts, tmp_path, call=call, steps=1, schedule=everywhere)
    seen = []
    with accelerate(pipe, backend=OURS, schedule=everywhere) as handle:
        handle.tap(name, lambda q, k, v, facts: seen.append(k.clone()))
        generator = torch.Generator().manual_seed(0)
        pipe(prompts[0], **call, generator=generator, output_type="latent")
    assert [each.about for each in trace.inputs] == ["a cat, seed 0, step 0"]
    assert torch.equal(trace.captures(name)[0].key, seen[0])
    assert not hasattr(pipe.transformer, "_sparge_handle")


def test_guidance_is_two_captures_of_a_step(tmp_path):
    pipe, prompts, call = split(tiny_pipelines.cogvideox())
    trace = trace_pipeline(pipe, prompts, tmp_path, call=call, steps=1)
    assert {len(entries) for entries in trace.inputs[0].files.values()} == {2}


def test_a_trace_is_completed_not_repeated(flux, tmp_path):
    pipe, prompts, call = flux
    first = trace_pipeline(pipe, prompts, tmp_path, call=call, steps=2)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    both = trace_pipeline(pipe, prompts, tmp_path, call=call, steps=2, seeds=[0, 1])
    assert both.inputs[:2] == first.inputs
    assert len(both.inputs) == 4
    assert all(file.stat().st_mtime_ns == at for file, at in files.items())


def test_some_layers_only(flux, tmp_path):
    pipe, prompts, call = flux
    trace = trace_pipeline(
        pipe, prompts, tmp_path, call=call, steps=1, layers=["single_*"], dtype=torch.bfloat16
    )
    assert all(name.startswith("single_") for name in trace.layers)
    assert trace.captures(trace.layers[0])[0].key.dtype == torch.bfloat16


def test_the_profile_of_a_trace_runs(flux, tmp_path):
    pipe, prompts, call = flux
    trace = trace_pipeline(pipe, prompts, tmp_path, call=call, steps=2)
    profile = tune(trace, l1=0.3, l2=0.35, backend=OURS)
    assert profile.calibration["noise_levels"] == pytest.approx([0.2, 0.8])
    assert schedule_of(profile) == Schedule()
    assert profile.density < 0.95
    with accelerate(pipe, profile=profile, measure_error=True, backend=OURS) as handle:
        pipe(prompts[0], **call, output_type="latent", generator=torch.Generator().manual_seed(0))
        report = handle.report()
    assert report.density < 1
    assert 0 < report.error < 0.35


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps must be a whole number"),
        ({"prompts": []}, "at least one prompt"),
        ({"call": {"num_frames": 3}}, "takes no num_frames"),
        ({"schedule": Schedule(dense_first=1.0)}, "no attention of FluxPipeline was sparse"),
        ({"max_bytes": 1000}, "max_bytes allows"),
    ],
)
def test_mistakes(changes, message, flux, tmp_path):
    pipe, prompts, call = flux
    with pytest.raises(ValueError, match=message):
        trace_pipeline(pipe, directory=tmp_path, **{"prompts": prompts, "call": call, **changes})
    assert not list(tmp_path.glob("manifest.json"))


def test_a_preset_for_every_denoiser():
    assert {preset_of(f"{name}Transformer2DModel") for name in ("CogVideoX", "Wan")} == {
        "cogvideox"
    }
    assert preset_of("FluxTransformer2DModel") == "flux"
    assert preset_of("SD3Transformer2DModel") == "sd3.5"
    assert preset_of("LlamaForCausalLM") == "llama"
    assert preset_of("MochiTransformer3DModel") in PRESETS


@pytest.fixture
def argv(flux, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARGE_BACKEND", OURS)
    flux[0].save_pretrained("flux")
    call = {name: x for name, x in flux[2].items() if name != "num_inference_steps"}
    made = ["--model", "flux", "--prompt", "a cat", "--call", json.dumps(call), "--steps", "5"]
    return [*made, "--dtype", "fp32", "--trace-steps", "2"]


def test_trace_then_tune(argv, capsys, tmp_path):
    assert main(["trace", *argv, "--seeds", "2", "-o", "t"]) == 0
    out = capsys.readouterr().out
    assert "on 4 inputs" in out
    assert "--preset flux" in out
    assert main(["tune", "--trace", "t", "--preset", "flux", "-o", "p.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bounds"] == {"l1": 0.07, "l2": 0.08}
    assert found["calibration"]["schedule"]["dense_first"] == 0.2
    assert Profile.load("p.json").model.architecture == "FluxTransformer2DModel"


def test_tune_at_once(argv, capsys, tmp_path):
    given = ["tune", *argv, "--l1", "0.3", "--dense-first", "0.4", "-o", "p.json"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibration"]["schedule"]["dense_first"] == 0.4
    assert found["density"] < 1
    assert not (tmp_path / "p.json.trace").exists()


def test_options_of_texts_are_not_for_pipelines(argv, capsys):
    for option in (["--length", "64"], ["--text", "essays"], ["--inputs", "2"]):
        words = f"{option[0]} is not for a diffusers pipeline"
        assert words in complaint(["trace", *argv, *option, "-o", "t"], capsys)


def test_a_module_of_the_zoo_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--model", "sam2-hiera-tiny", "-o", "t"]
    assert "is a module of the zoo" in complaint(["trace", *argv], capsys)
    assert "is a module of the zoo" in complaint(["tune", *argv, "--l1", "0.1"], capsys)
