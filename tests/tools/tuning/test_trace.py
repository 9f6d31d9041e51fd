"""Traces: what a model's layers attended, kept whole, bounded, and completed after a stop."""

from __future__ import annotations

import json

import pytest
import torch

from sparge_tools.tuning import Trace, trace_model, tune
from sparge_tools.tuning import tracing as trace_module
from sparge_tools.tuning.capture import exact_output
from tiny_llama import tiny_llama, token_inputs

pytest.importorskip("transformers")

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


@pytest.fixture
def model():
    return tiny_llama()


def test_a_trace_holds_what_the_layers_attended(model, tmp_path):
    """The kept rows, attended to exactly, are the rows that the model's own attention gave."""
    inputs = token_inputs()
    seen = {}

    def hook(module, args, out, name=LAYERS[1]):
        seen.setdefault(name, []).append(args[0])  # what goes into the output projection

    hooked = model.model.layers[1].self_attn.o_proj.register_forward_hook(hook)
    with torch.no_grad():
        for tokens in inputs:
            model.model(tokens)
    hooked.remove()
    trace = trace_model(model, inputs, tmp_path / "t", blocks=2, name="tiny", about=["one", "two"])
    again = Trace.open(tmp_path / "t")
    assert again == trace
    assert trace.layers == LAYERS
    assert [each.about for each in again.inputs] == ["one", "two"]
    for capture, own in zip(again.captures(LAYERS[1]), seen[LAYERS[1]], strict=True):
        assert capture.starts == (128, 384)
        assert capture.is_causal
        assert capture.offset == 0
        rows = [*range(128, 256), *range(384, 400)]
        heads = own[0, rows].unflatten(-1, (4, 16)).transpose(0, 1)
        torch.testing.assert_close(exact_output(capture), heads, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was(model, tmp_path):
    tokens = token_inputs(n=1)
    with torch.no_grad():
        before = model(tokens[0]).logits
    model.train()
    trace_model(model, tokens, tmp_path)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens[0]).logits, before)


def test_only_some_layers_are_traced(model, tmp_path):
    trace = trace_model(model, token_inputs(n=1), tmp_path, layers=["*.1.self_attn"])
    assert trace.layers == LAYERS[1:]
    with pytest.raises(ValueError, match=r"no layer 'model\.layers\.0\.self_attn'"):
        trace.captures(LAYERS[0])


def test_finished_inputs_are_not_run_again(model, tmp_path, monkeypatch):
    inputs = token_inputs(n=3)
    ran = []
    forward = trace_module._forward

    def count(model, given):
        ran.append(given)
        if len(ran) == 2:
            raise KeyboardInterrupt
        forward(model, given)

    monkeypatch.setattr(trace_module, "_forward", count)
    with pytest.raises(KeyboardInterrupt):
        trace_model(model, inputs, tmp_path)
    assert len(Trace.open(tmp_path).inputs) == 1
    whole = trace_model(model, inputs, tmp_path)
    expected = [inputs[0], inputs[1], inputs[1], inputs[2]]
    assert all(x is y for x, y in zip(ran, expected, strict=True))
    assert len(whole.inputs) == 3
    # A file that was cut short is made again, and nothing else.
    entry = whole.inputs[1].files[LAYERS[0]][0]
    file = tmp_path / entry["file"]
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"cannot be read: .*trace this input again"):
        whole.captures(LAYERS[0])
    again = trace_model(model, inputs, tmp_path)
    assert len(ran) == 5
    assert file.read_bytes() == content
    assert {each.digest for each in again.inputs} == {each.digest for each in whole.inputs}


def test_the_disk_is_bounded_before_it_is_filled(model, tmp_path):
    inputs = token_inputs(n=4)
    needed = trace_model(model, inputs, tmp_path / "a").bytes
    fits = trace_model(model, inputs, tmp_path / "b", max_bytes=needed)
    assert fits.bytes == needed
    with pytest.raises(ValueError, match=r"would take about .* MiB and max_bytes allows"):
        trace_model(model, inputs, tmp_path / "c", max_bytes=needed // 2)
    assert list((tmp_path / "c").rglob("*.safetensors")) == []
    assert model.config._attn_implementation == "sdpa"


def test_half_the_bytes_in_bf16(model, tmp_path):
    inputs = token_inputs(n=1)
    full = trace_model(model, inputs, tmp_path / "a")
    half = trace_model(model, inputs, tmp_path / "b", dtype=torch.bfloat16)
    assert half.bytes < 0.6 * full.bytes
    assert half.captures(LAYERS[0])[0].key.dtype == torch.bfloat16


def test_a_batch_is_a_capture_each_and_padding_is_kept(model, tmp_path):
    tokens = torch.cat(token_inputs(n=2, L=200))
    mask = torch.ones_like(tokens)
    mask[0, :70] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    captures = trace_model(model, [given], tmp_path).captures(LAYERS[0])
    assert len(captures) == 2
    assert captures[0].attn_mask is not None
    assert not captures[0].attn_mask[..., :70].any()
    assert exact_output(captures[0]).isfinite().all()


def test_another_trace_is_not_mixed_in(model, tmp_path):
    trace_model(model, token_inputs(n=1), tmp_path)
    with pytest.raises(ValueError, match=r"a trace of something else .*weights differ"):
        trace_model(tiny_llama(seed=5), token_inputs(n=1), tmp_path)
    with pytest.raises(ValueError, match="another number of blocks"):
        trace_model(model, token_inputs(n=1), tmp_path, blocks=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[:100], "damaged"),
        (lambda text: text.replace("sparge.trace/2", "sparge.trace/1"), "reads sparge.trace/2"),
        (lambda text: json.dumps({"format": "sparge.trace/2"}), "it has no 'model'"),
        (lambda text: text.replace('"shapes": {', '"shapes": {"heads": -1, '), "twice"),
        (lambda text: text.replace('"shapes": {', '"shapes": {"mine": -1, '), "shapes.mine must"),
        (lambda text: "[" * 99999, "levels deep"),
    ],
)
def test_a_manifest_that_is_not_right(model, tmp_path, change, why):
    trace_model(model, token_inputs(n=1, L=130), tmp_path)
    path = tmp_path / trace_module.MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=why):
        Trace.open(tmp_path)


def test_a_directory_without_a_trace(tmp_path):
    with pytest.raises(ValueError, match=r"holds no trace .*sparge trace writes one"):
        Trace.open(tmp_path)


def test_deleting_leaves_what_is_not_ours(model, tmp_path):
    trace = trace_model(model, token_inputs(n=1, L=130), tmp_path / "t")
    (tmp_path / "t" / "mine.txt").write_text("keep")
    trace.delete()
    assert [path.name for path in (tmp_path / "t").rglob("*")] == ["mine.txt"]


def denoiser():
    """A transformer that is called as diffusion models are: with latents and a timestep."""
    from transformers import LlamaModel

    class Denoiser(LlamaModel):
        def forward(self, latents, timestep, **others):
            level = timestep.to(latents.dtype)[:, None, None] / 1000
            noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
            return super().forward(inputs_embeds=latents + level * noise, **others)

    return Denoiser(tiny_llama().config).eval()


def steps(*levels):
    latents = torch.randn(1, 300, 64, generator=torch.Generator().manual_seed(0))
    return [{"latents": latents, "timestep": torch.tensor([level])} for level in levels]


def test_noise_levels_are_kept_and_tuned_for_together(tmp_path):
    trace = trace_model(denoiser(), steps(999, 500, 1), tmp_path)
    assert [each.noise_level for each in Trace.open(tmp_path).inputs] == [999.0, 500.0, 1.0]
    clean, noisy = trace.captures(trace.layers[0])[::-2]
    assert not torch.allclose(clean.query, noisy.query, rtol=0.1)
    profile = tune(trace, l1=0.3)
    assert profile.calibration["noise_levels"] == [1.0, 500.0, 999.0]
    assert all(layer.inputs == 3 for layer in profile.layers.values())


def test_noise_levels_can_be_said(model, tmp_path):
    trace = trace_model(model, token_inputs(), tmp_path, noise_levels=[0.9, 0.1])
    assert [each.noise_level for each in trace.inputs] == [0.9, 0.1]


def test_one_noise_level_for_each_input(model, tmp_path):
    with pytest.raises(ValueError, match=r"noise_levels needs one for each of 2 inputs, got 1"):
        trace_model(model, token_inputs(), tmp_path / "t", noise_levels=[0.9])
    assert not (tmp_path / "t").exists()


def test_one_token_is_nothing_to_tune(model, tmp_path):
    with pytest.raises(ValueError, match="longer than one token"):
        trace_model(model, [torch.tensor([[1]])], tmp_path)


def test_a_trace_is_tuned_and_its_state_lies_in_it(model, tmp_path):
    trace_model(model, token_inputs(n=2, L=300), tmp_path, name="tiny", calibration={"a": 1})
    profile = tune(tmp_path, l1=0.1, l2=0.12)
    assert list(profile.layers) == list(LAYERS)
    assert profile.name == "tiny"
    assert profile.calibration["a"] == 1
    profile.check(model)
    assert len(list(tmp_path.glob("tune-*.json"))) == 1
    told = []
    again = tune(tmp_path, l1=0.1, l2=0.12, done=lambda *news: told.append(news))
    assert told == [(name, None) for name in LAYERS]
    assert again.layers == profile.layers
