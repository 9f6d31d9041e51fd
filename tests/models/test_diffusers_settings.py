"""Settings of accelerated pipelines: profiles with noise bands, their schedule, text, tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparge
from sparge import KeepFraction, Profile, Recipe, Schedule
from sparge.models.route import Route
from sparge.models.site import Site
from sparge.models.tokens import TokenMap, Tokens
from sparge.values.profile import HeadSettings, LayerSettings, fingerprint
from tiny_denoiser_parts import SAME, SPARSE, plans_of
from tiny_denoisers import DENOISERS
from tiny_pipelines import wan


def layers_of(pipe):
    with sparge.accelerate(pipe) as handle:
        return [layer.name for layer in handle.report().layers]


def banded_profile(tiny, **calibration):
    """Noise above one half dense, below it sparse."""
    model = tiny.pipe.transformer
    heads = model.config.num_attention_heads
    dense = LayerSettings((HeadSettings(),) * heads, noise=(0.5, 1.0))
    sparse = LayerSettings((HeadSettings(mass=0.3),) * heads, noise=(0.0, 0.5), sink_blocks=0)
    settings = LayerSettings(bands=(dense, sparse))
    layers = dict.fromkeys(layers_of(tiny.pipe), settings)
    return Profile(layers, fingerprint(model), bounds=(0.1, None), calibration=calibration)


def test_a_profile_has_settings_for_noise_bands():
    tiny = wan()
    profile = banded_profile(tiny)
    with sparge.accelerate(
        tiny.pipe, profile=profile, schedule=Schedule(0.0), backend="cpu"
    ) as handle:
        tiny(steps=6)
        report = handle.report()
    for layer in report.layers:
        assert {step.noise_level > 0.5 for step in layer.by_step} == {True, False}
        for step in layer.by_step:
            assert (step.density == 1.0) == (step.noise_level >= 0.5), step


def test_a_profile_brings_the_schedule_that_it_was_tuned_with():
    tiny = wan()
    profile = banded_profile(tiny, schedule=Schedule(dense_first=0.9).to_dict(), order="row")
    with sparge.accelerate(tiny.pipe, profile=profile, backend="cpu") as handle:
        tiny(steps=10)
        density = list(handle.report().density_by_step.values())
        assert "in order 'row'" in str(handle.report())
    assert density[:9] == [1.0] * 9
    assert density[9] < 1.0
    given = Schedule(dense_first=1.0)
    with sparge.accelerate(tiny.pipe, profile=profile, schedule=given, backend="cpu") as handle:
        tiny(steps=10)
        assert handle.report().density == 1.0


def test_a_profile_with_a_broken_schedule_is_refused():
    tiny = wan()
    profile = banded_profile(tiny, schedule={"dense": 3})
    with pytest.raises(ValueError, match="unknown schedule fields"):
        sparge.accelerate(tiny.pipe, profile=profile)


def test_text_may_be_skipped_where_that_is_wanted():
    tiny = DENOISERS["cogvideox"]()
    sparsest = replace(SPARSE, keep=KeepFraction(0.05), sink_blocks=0)
    kept = {}
    for protect in (True, False):
        plans = plans_of(tiny, sparsest, protect_text=protect)
        kept[protect] = min(plan.to_mask()[..., 0].float().mean() for _, _, plan in plans)
    assert kept[True] == 1.0
    assert kept[False] < 1.0


def test_tokens_whose_place_is_not_known_leave_attention_dense():
    tokens = Tokens("hilbert")
    tokens.map = TokenMap((2, 4, 8))  # nothing before or behind it
    site = Site("layer", Recipe(KeepFraction(0.1)), "cpu")
    site.open(handle := object.__new__(type("Holder", (), {"__slots__": ("__weakref__",)})))
    route = Route(site, tokens)
    with torch.no_grad():
        for L, ran in ((64, "cpu"), (70, "own attention"), (32, "cpu")):
            x = torch.randn(1, 1, L, 8)
            route(x, x, x)
            assert any(way.startswith(ran) for way in site.report().ran), (L, site.report().ran)
            site.reset()
        x = torch.randn(1, 1, 70, 8)
        route(x, x, x)
    assert list(site.report().fallbacks) == ["6 tokens whose place is not known"]
    assert handle is not None


def test_an_option_that_a_model_has_no_use_for_is_refused():
    import tiny_models

    with pytest.raises(ValueError, match="protect_text must be left out"):
        sparge.accelerate(tiny_models.llama(), SAME, protect_text=False)
