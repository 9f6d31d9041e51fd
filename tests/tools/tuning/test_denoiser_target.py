"""A denoiser tuned to a target of its output, by bands of the noise level."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge import Profile
from sparge.cli import main
from sparge_tools.tuning import TargetNotMet, tune_denoiser
from tiny_llama import sharp_llama

pytest.importorskip("transformers")
L = 640


def denoiser():
    """Called as diffusion models are; with more noise its attention is sharper."""
    from transformers import LlamaModel

    class Denoiser(LlamaModel):
        def forward(self, latents, timestep, **others):
            level = timestep.to(latents.dtype)[:, None, None]
            noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
            return super().forward(
                inputs_embeds=(1 - level) * latents + 3 * level * noise, **others
            )

    torch.manual_seed(0)
    whole = sharp_llama(layers=2)
    model = Denoiser(whole.config).eval()
    model.load_state_dict(whole.model.state_dict())
    return model


def steps(*levels, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        {"latents": torch.randn(1, L, 64, generator=g), "timestep": torch.tensor([level])}
        for level in levels
    ]


@pytest.fixture
def inputs():
    return steps(0.9, 0.1), steps(0.8, 0.7, 0.2, 0.3, seed=1)


@pytest.fixture
def model():
    return denoiser()


def test_every_band_keeps_its_promise_in_its_context(model, inputs, tmp_path, capsys):
    """As the user runs it: the noise level of the context chooses the settings."""
    profile = tune_denoiser(model, *inputs, max_change=0.15, name="tiny")
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again.to_dict() == profile.to_dict()
    changes, densities = {}, {}
    for given in inputs[1]:
        level = float(given["timestep"])
        with torch.no_grad():
            dense = model(**given).last_hidden_state
            with sparge.accelerate(model, profile=again, backend="cpu") as handle:
                with handle.context(noise_level=level):
                    out = model(**given).last_hidden_state
                density = handle.report().density
        band = level >= 0.5
        changes.setdefault(band, []).append(float((out - dense).norm() / dense.norm()))
        densities.setdefault(band, []).append(density)
    assert [band["noise"] for band in profile.output["bands"]] == [[0.0, 0.5], [0.5, 1.0]]
    for band, of in enumerate(profile.output["bands"]):
        told = of["held_out"]
        assert told["relative_l2"] == pytest.approx(sum(changes[bool(band)]) / 2, rel=1e-3)
        assert told["density"] == pytest.approx(sum(densities[bool(band)]) / 2, rel=1e-6)
        assert told["relative_l2"] + told["relative_l2_error"] <= 0.15
        assert told["density"] < 0.95
        assert len(told["digests"]) == 2
        assert len(of["calibrated_on"]) == 1
    first, second = next(iter(profile.layers.values())).bands
    assert first.heads != second.heads
    assert main(["profile", "show", str(tmp_path / "p.json")]) == 0
    shown = capsys.readouterr().out
    assert "change of the output at most 0.15" in shown
    assert "held out, noise 0 to 0.5: change 0." in shown


def test_outside_of_all_bands_attention_is_dense(model, inputs):
    high, held = steps(0.9), steps(0.8, 0.7, seed=1)
    profile = tune_denoiser(model, high, held, max_change=0.2, bands=[(0.5, 1.0)])
    name = next(iter(profile.layers))
    assert profile.recipe_for(name, noise=0.2) is None
    assert any(profile.recipe_for(layer, noise=0.6) is not None for layer in profile.layers)


def test_a_band_that_cannot_be_met_is_named(model, inputs):
    with pytest.raises(TargetNotMet, match=r"noise 0 to 0.5: the target 1e-06 cannot be met"):
        tune_denoiser(model, *inputs, max_change=1e-6)


def test_a_state_resumes(model, inputs, tmp_path):
    path, told = tmp_path / "s.json", []
    first = tune_denoiser(model, *inputs, max_change=0.15, state=path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("the model was run"))
        again = tune_denoiser(model, *inputs, max_change=0.15, state=path, done=told.append)
    assert again.layers == first.layers
    assert again.output == first.output
    assert told


@pytest.mark.parametrize(
    "given, why",
    [
        ({"max_change": 0}, "max_change must be"),
        ({"noise_levels": [0.1]}, "noise_levels needs one for each of 2 inputs, got 1"),
        ({"noise_levels": [999, 1]}, r"in \[0, 1\], got 999; for a timestep divide it"),
        ({"held_out_levels": [0.8, 0.7, 0.2, 0.6]}, "noise 0 to 0.5 has 1 and 1"),
        ({"bands": [(0.0, 0.6), (0.5, 1.0)]}, "must not overlap"),
        ({"bands": [(0.0, 0.5)]}, "none has 0.9"),
    ],
)
def test_mistakes_are_found_before_any_work(model, inputs, given, why, no_work):
    with pytest.raises(ValueError, match=why):
        tune_denoiser(model, *inputs, **{"max_change": 0.1, **given})


def test_levels_must_be_known(model, inputs, no_work):
    plain = [{"latents": each["latents"]} for each in inputs[0]]
    with pytest.raises(ValueError, match="noise_levels must be given: the inputs have no argument"):
        tune_denoiser(model, plain, inputs[1], max_change=0.1)
